"""`verify`: compares sharded training with training in one process.

Every rank trains the whole model (`reference`) and then, for each strategy, a sharded model on its
part of the same batches (`compare`). Everything runs in float64, so that rounding cannot hide an
error.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from shardwise.api import fully_shard
from shardwise.errors import PlanError
from shardwise.local_devices import local_device
from shardwise.optim.outer import Outer
from shardwise.plan.policies import Units
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwise.plan.spelling import did_you_mean
from shardwise.plan.strategy import STRATEGIES, Strategy, resolve_strategy
from shardwise.plan.wire import UNQUANTIZED, Wire
from shardwise.tensor.mesh import all_ranks_of, resolve_mesh
from shardwise.verification.batches import cut_batch
from shardwise.verification.compare import Judge
from shardwise.verification.engines import Engine, set_up
from shardwise.verification.exchange import RankExchange
from shardwise.verification.reference import LossFn, Outcome, Reference, Training
from shardwise.verification.replicas import ReplicaTraining
from shardwise.verification.result import HEAD, Verification

__all__ = ["resolve_strategies", "verify"]

TOLERANCE = 1e-10
NOISE = 8  # default tolerance with mp_policy, in multiples of the dtype's spacing at 1
CORRUPTION = 1e-3  # added to a gradient to test the comparison


def verify(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Any],
    strategies: str | Strategy | Iterable[str | Strategy] | None = None,
    *,
    loss_fn: LossFn | None = None,
    units: Units = "auto",
    optimizer_fn: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    tolerance: float | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    mesh: DeviceMesh | None = None,
    outer: Outer | None = None,
    corrupt: str | None = None,
    engine: Engine | None = None,
    quiet: bool = False,
    **options: Any,
) -> Verification:
    """Compare loss, every gradient and every updated parameter with those of one process.

    Every rank must call it, with or without a process group, and gets the same result::

        sw.verify(
            lambda: Transformer(...),
            lambda step: torch.randint(256, (8, 33)),
            loss_fn=lambda model, tokens: cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]),
            units=Block,
        ).raise_for_difference()

    The reference process runs the ranks' parts of each batch one after the other, on models that
    share parameters but not buffers, and then takes a step on the mean of the losses. This makes it
    possible to compare layers that depend on several rows at once (batch norm, routers) or use
    torch's generator (dropout). Buffers, such as running statistics, are not compared, because each
    rank has its own.

    Args:
        model_fn: builds a new model, not sharded, with the same values at each call. torch's seed
            is set before the call, and the model is cast to float64 after it. Each rank needs
            memory for the whole model, its gradients and its values after each step.
        batch_fn: takes the step (from 0) and returns its global batch, the same on every rank: a
            tensor, or a tuple, list or dict of tensors, which are split along dim 0 over the ranks.
            torch's seed is set before the call; floating-point tensors are cast to float64.
        strategies: the strategies to compare, as for `fully_shard`; None: all that fit the mesh.
        loss_fn: ``loss_fn(model, batch)`` returns the mean loss of a part of the batch, or a tuple
            of the sum of its tokens' losses and the number of tokens, for a mean over the tokens of
            all parts. None if calling the model with the batch returns the loss.
        units: as for `fully_shard`.
        optimizer_fn: makes an optimizer for ``model.parameters()``; None: AdamW.
        steps: optimizer steps to compare. The comparison stops after the first step that differs.
        tolerance: the largest relative error, in the Euclidean norm, that counts as equal; None:
            1e-10, or, with ``mp_policy``, 8 times the spacing of its narrowest dtype at 1.
        mp_policy: as for `fully_shard`. The reference still computes in float64, so differences
            include the rounding of the policy.
        mesh: as for `fully_shard`; None: all ranks. A strategy that needs a two-dimensional mesh
            then gets two replicas, or the smallest number that divides the number of ranks.
        outer: compare replicas that `outer_optimizer` synchronizes with as many simulated in one
            process. The first of the two named dims of ``mesh`` has the replicas, and each replica
            is sharded over the second. With ``Outer(dtype="float64", ...)``, results are equal.
        corrupt: a parameter whose gradient is changed on one rank, to test the comparison.
        engine: another engine to check: ``engine(model, mesh, units)`` returns the model to train,
            or ``(model, backward)``, where ``backward(loss_fn, rows)`` computes the gradients of
            this rank's rows and returns their loss. ``strategies``, ``mp_policy`` and ``options``
            are not used. ``mesh`` may have any dims; "dp...", "efsdp" and "ep" split the batch.
            If a gradient differs, possible causes are listed.
        quiet: whether to print nothing. Otherwise rank 0 prints the table line by line.
        options: further arguments for `fully_shard`: prefetch, reshard_after_forward, unused.

    Raises:
        PlanError: an argument is not valid. Differences are returned, not raised.
    """
    training, shard_mesh = Training(model_fn, loss_fn, optimizer_fn), mesh
    if outer is not None:
        mesh = _replica_mesh(mesh)
        shard_mesh = mesh[(mesh.mesh_dim_names or ())[1]]
        training = ReplicaTraining(model_fn, loss_fn, optimizer_fn, outer, mesh)
        training.check(steps, is_ours=engine is None)
    rows = [] if engine is not None else resolve_strategies(strategies, shard_mesh)
    if tolerance is None:
        _check_is_exact(options.get("wire", UNQUANTIZED), outer)
        tolerance = _tolerance_for(mp_policy)
    if steps < 1 or not tolerance >= 0:
        raise PlanError(
            f"steps={steps}, tolerance={tolerance}: expected steps of 1 or more and a tolerance of "
            "0 or more"
        )
    if mesh is None or (engine is None and outer is None):
        dp_mesh = resolve_mesh(mesh, STRATEGIES["ddp"] if mesh is None else rows[0])
    else:
        dp_mesh = all_ranks_of(mesh)
    exchange = RankExchange(dp_mesh.group, None if engine is None else mesh)
    console = Console(
        quiet=quiet or exchange.rank > 0, soft_wrap=True, markup=False, highlight=False
    )
    device = local_device()
    generators = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(generators, device_type=device.type):
        reference = Reference(training, dp_mesh, exchange)
        batches = [cut_batch(batch_fn, step, exchange, reference.device) for step in range(steps)]
        zeros = options.get("unused") == "zeros"
        outcomes = [reference.step(parts, zeros=zeros) for parts in batches]
        if corrupt is not None:
            _check_gets_gradient(corrupt, outcomes)
        judge = Judge(
            training, batches, outcomes, exchange, tolerance, reference if engine else None
        )
        found = Verification(reference.name, exchange.size, ())
        console.print(f"{found.title}\n{HEAD}")
        for row, own_mesh in _with_meshes(rows, shard_mesh, reference.device):
            model = reference.rebuild()
            fully_shard(
                model, strategy=row, mesh=own_mesh, units=units, mp_policy=mp_policy, **options
            )
            if isinstance(training, ReplicaTraining):
                outcomes = training.outcomes(model, dp_mesh, exchange, batches, zeros=zeros)
                judge = replace(judge, outcomes=outcomes)
            if corrupt is not None:
                _corrupt(model.get_parameter(corrupt), exchange)
            found = found.plus(judge.compare(model, row.name))
            console.print(found.comparisons[-1].row)
        if engine is not None:
            model, backward = set_up(engine, reference.rebuild(), mesh, units)
            name = getattr(engine, "__name__", "engine").lstrip("_")
            found = found.plus(judge.compare(model, name, backward))
            console.print(found.comparisons[-1].row)
    return found


def _check_is_exact(wire: Wire, outer: Outer | None) -> None:
    """Raise a PlanError if ranks send rounded values."""
    if wire != UNQUANTIZED:
        raise PlanError(
            f"wire={wire}: quantized values differ from those of one process by up to 1/254 "
            "(int8), 1/16 (fp8) or 1/14 (int4) of the largest value in their block, so small "
            "values in a block may have a large relative error; pass tolerance=. With "
            "Wire(block=8) and SGD, 0.5 is enough for int8 and fp8, and for int4 in reductions"
        )
    if outer is not None and outer.dtype != "float64":
        raise PlanError(
            f"Outer(dtype={outer.dtype!r}): differences are rounded when they are sent; pass "
            'Outer(dtype="float64", ...), which does not round, or tolerance='
        )


def _tolerance_for(policy: MixedPrecisionPolicy) -> float:
    given = policy.param_dtype, policy.reduce_dtype
    dtypes = [dtype for dtype in given if isinstance(dtype, torch.dtype)]
    return max([TOLERANCE, *(NOISE * torch.finfo(dtype).eps for dtype in dtypes)])


def resolve_strategies(
    strategies: str | Strategy | Iterable[str | Strategy] | None, mesh: DeviceMesh | None = None
) -> list[Strategy]:
    """Return the strategies with these names; None: all that fit ``mesh``."""
    if strategies is None:
        distinct = dict.fromkeys(STRATEGIES.values())
        if mesh is None and dist.is_initialized():
            return list(distinct)
        has_two_dims = mesh is not None and mesh.ndim > 1
        return [row for row in distinct if (row.num_axes > 1) is has_two_dims]
    if isinstance(strategies, (str, Strategy)):
        strategies = [strategies]
    if not (rows := [resolve_strategy(strategy) for strategy in strategies]):
        raise PlanError(f"strategies=[]: expected at least one of {', '.join(STRATEGIES)}")
    return rows


def _with_meshes(
    rows: list[Strategy], mesh: DeviceMesh | None, device: torch.device
) -> list[tuple[Strategy, DeviceMesh | None]]:
    """Pair each strategy with the user's mesh or, if there is none, the mesh that it needs."""
    two_dims = mesh
    if mesh is None and dist.is_initialized() and any(row.num_axes > 1 for row in rows):
        two_dims = _two_dims(device)
    return [(row, two_dims if row.num_axes > 1 else mesh) for row in rows]


def _two_dims(device: torch.device) -> DeviceMesh:
    num_ranks = dist.get_world_size()
    # As few replicas as possible, but at least two if the ranks allow it: with one replica, hybrid
    # strategies would not be tested.
    replicas = next((n for n in range(2, num_ranks + 1) if num_ranks % n == 0), 1)
    return init_device_mesh(
        device.type, (replicas, num_ranks // replicas), mesh_dim_names=("replicate", "shard")
    )


def _replica_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Return a mesh of replicas and the ranks of each replica."""
    if mesh is None:
        if resolve_mesh(None, STRATEGIES["ddp"]).group is None:
            raise PlanError("outer=: expected at least two ranks; start them with torchrun")
        return _two_dims(local_device())
    if mesh.ndim != 2 or not mesh.mesh_dim_names:  # noqa: PLR2004
        raise PlanError(
            f"outer= with {mesh}: expected two named dims, (replicas, ranks of a replica), as in "
            "init_device_mesh(device, (2, 4), mesh_dim_names=('replicate', 'shard'))"
        )
    return mesh


def _check_gets_gradient(name: str, outcomes: Sequence[Outcome]) -> None:
    gradients = [item for outcome in outcomes for item in outcome.gradients.items()]
    trained = sorted({key for key, gradient in gradients if gradient is not None})
    if name not in trained:
        hint = did_you_mean(name, trained) or f"; expected one of {', '.join(trained)}"
        raise PlanError(f"corrupt={name!r}: no parameter of this name gets a gradient{hint}")


def _corrupt(parameter: nn.Parameter, exchange: RankExchange) -> None:
    """Change the parameter's gradient on the last rank that owns elements of it."""
    assert isinstance(parameter, DTensor)
    owners = [
        rank for rank, size in enumerate(exchange.gather(parameter.to_local().numel())) if size
    ]
    if owners and exchange.rank == owners[-1]:
        parameter.register_hook(lambda gradient: gradient + CORRUPTION)  # type: ignore[no-untyped-call]
