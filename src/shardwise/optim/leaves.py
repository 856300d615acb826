"""The micro-batches ("leaves") of a step of a reproducible model, and random numbers for each."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.device import keeping_random_states, seed_generators
from shardwise.comm.tree import tree_sum
from shardwise.errors import PlanError
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.reductions import across

__all__ = ["check_leaves", "leaf_mean", "leaf_rng", "leaves", "sum_over_leaves"]


def leaves(model: nn.Module) -> range:
    """The micro-batches of each step that this rank runs, in order.

    They are numbered over all ranks, from 0 to ``reproducible - 1``. Choose the data and the random
    numbers of a micro-batch by its number and not by the rank::

        model = sw.fully_shard(model, units=Block, reproducible=8)
        for step in range(steps):
            losses = []
            for leaf in sw.leaves(model):
                with sw.leaf_rng(seed, step, leaf):
                    loss = model(batch_of(step, leaf)).mean()
                loss.backward()                        # of a mean, not divided by 8
                losses.append(loss.detach())
            sw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(sw.leaf_mean(model, losses))

    Raises:
        PlanError: the model is not reproducible.
    """
    mesh = runtime_of_root(model).mesh
    if mesh.leaves is None:
        raise PlanError("sw.leaves: the model has none; pass reproducible=... to fully_shard")
    return mesh.own_leaves


def leaf_mean(model: nn.Module, values: Sequence[Tensor]) -> Tensor:
    """The mean of a scalar over all micro-batches of a step, with the same bits on any ranks.

    Args:
        model: a reproducible model. All ranks must call this.
        values: this rank's scalars, of one dtype, one for each of `sw.leaves`. They are summed in
            float64.

    Raises:
        PlanError: the model is not reproducible.
        ValueError: the number of values is not that of this rank's micro-batches, or they are no
            scalars.
    """
    leaves(model)
    runtime = runtime_of_root(model)
    mesh, device = runtime.mesh, runtime.pools.device
    check_leaves(mesh, len(values), "values")
    if any(value.numel() != 1 for value in values):
        raise ValueError(f"expected scalars, got shapes {[tuple(value.shape) for value in values]}")
    exact = [value.detach().to(device, torch.float64).reshape(1) for value in values]
    return (sum_over_leaves(exact, mesh)[0] / mesh.num_addends).to(values[0].dtype)


def sum_over_leaves(values: Sequence[Tensor], mesh: DataParallelMesh) -> Tensor:
    """Sum tensors [n] over all micro-batches of a step; ``values`` are those of this rank."""
    own = tree_sum(torch.stack(list(values)))
    return tree_sum(across(own.unbind(), mesh, mesh.in_order))


def check_leaves(mesh: DataParallelMesh, number: int, what: str) -> None:
    """Raise a ValueError if ``number`` is not the number of this rank's micro-batches."""
    expected = len(mesh.own_leaves)
    if number != expected:
        raise ValueError(
            f"{number} {what}: expected {expected}, one for each micro-batch that this rank of "
            f"{mesh.num_ranks} runs of the {mesh.leaves} in a step (sw.leaves)"
        )


@contextlib.contextmanager
def leaf_rng(seed: int, step: int, leaf: int) -> Iterator[None]:
    """Seed torch's default generators with (``seed``, ``step``, ``leaf``) in the block.

    Dropout in the forward of a micro-batch then draws the same numbers on any rank. Activation
    checkpointing draws them again in backward, inside the block or after it, because torch restores
    the state of the generators when it recomputes a forward. At the end of the block the generators
    return to their states before it. They are those of the CPU and of the current accelerator,
    which is that of the model unless it was changed after `fully_shard`.

    There is nothing to save but ``seed`` and ``step``, as in ``sw.save(path, model=model,
    optimizer=optimizer, step=step)``.

    Args:
        seed: of the run.
        step: number of the optimizer step.
        leaf: number of the micro-batch, from `sw.leaves`.
    """
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    digest = hashlib.blake2b(f"{seed} {step} {leaf}".encode(), digest_size=8).digest()
    with keeping_random_states(device):
        seed_generators(device, int.from_bytes(digest) >> 1)
        yield
