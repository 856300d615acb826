"""Clipping by the global gradient norm."""

import contextlib
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.errors import StepError
from shardwise.features.joined_ranks import JOINED
from shardwise.optim.nonfinite import describe_nonfinite
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.reductions import norms as norms_across
from shardwise.tensor.sharded_tensor import ShardedTensor
from shardwise.tensor.sharding import sharding_of

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients so that their norm, over all ranks, is at most ``max_norm``.

    Every rank must call this. `torch.nn.utils.clip_grad_norm_` gives the same results with the same
    number of collectives, except in two cases: it cannot combine DTensors on different meshes, and
    it changes the gradients if the norm is NaN or infinite, where this function leaves them alone.

    Args:
        parameters: the model's parameters.
        max_norm: upper bound of the norm.
        norm_type: order of the norm; may be infinite.
        error_if_nonfinite: raise if the norm is NaN or infinite. The host then waits for the
            device.

    Returns:
        The norm before clipping: a scalar, the same on every rank.

    Raises:
        StepError: `sw.optimizer_in_backward` has already freed the gradients; or, with
            ``error_if_nonfinite``, the norm is not finite. The message names the first such
            gradient in backward.
    """
    if isinstance(parameters, nn.Module):
        raise TypeError("clip_grad_norm_: expected parameters, got a module; pass its parameters()")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for parameter in parameters:
        if getattr(parameter, STEPS_IN_BACKWARD, False):
            sharding = sharding_of(parameter)
            assert sharding is not None
            raise StepError(
                f"{sharding.name}: clipping by the global norm needs all gradients at once, but "
                "sw.optimizer_in_backward frees each after its step; clip single gradients in "
                "register_post_accumulate_grad_hook, or call remove() of its handle"
            )
    with contextlib.ExitStack() as stack:
        if parameters and (joined := getattr(parameters[0], JOINED, None)) is not None:
            clipping = joined.clipping(parameters, max_norm, norm_type, checks=error_if_nonfinite)
            stack.enter_context(clipping)
        total = _total_norm(parameters, norm_type)
        if error_if_nonfinite and not total.isfinite():
            where = describe_nonfinite(parameters)
            raise StepError(f"the gradient norm is {total.item()}: {where}")
        # A NaN would spread to all gradients, and no error could name the first one. A norm of 0
        # leaves the gradients as they are.
        norm = total.where(total.isfinite(), 0.0)
        for some in _by_mesh(parameters).values():
            torch.nn.utils.clip_grads_with_norm_(some, max_norm, norm, foreach=True)
    return total


def _total_norm(parameters: Iterable[Tensor], order: float) -> Tensor:
    chunks = defaultdict(list)  # by the model's mesh and the device, in the same order on all ranks
    others: list[Tensor] = []
    for parameter in parameters:
        gradient, sharding = parameter.grad, sharding_of(parameter)
        if _is_torch_dtensor(gradient) and sharding is not None and not sharding.tensor_parallel:
            # Our own collective ends if another rank raises; that of torch's DTensors does not.
            chunks[sharding.mesh, gradient.device].append(gradient.to_local())
        elif gradient is not None:
            others.append(gradient)
    norms = [norm for (mesh, _), some in chunks.items() for norm in norms_across(some, mesh, order)]
    for some in _by_mesh(others).values():
        norm = torch.nn.utils.get_total_norm(some, order, foreach=True)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.tensor(0.0)
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), order)
    return total


def _by_mesh(tensors: Iterable[Tensor]) -> dict[DeviceMesh | None, list[Tensor]]:
    """Group torch's DTensors by mesh, because only those of one mesh combine; others under None."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if _is_torch_dtensor(tensor) else None
        by_mesh.setdefault(mesh, []).append(tensor)
    return by_mesh


def _is_torch_dtensor(tensor: Tensor | None) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and not isinstance(tensor, ShardedTensor)
