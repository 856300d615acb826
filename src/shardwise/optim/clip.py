"""Clipping by the global norm."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardwise.errors import StepError
from shardwise.optim.nonfinite import describe_nonfinite
from shardwise.runtime.parameters import STEPS_IN_BACKWARD
from shardwise.tensor.reductions import norms as norms_across
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

    Every rank has to call it. `torch.nn.utils.clip_grad_norm_` gives the same numbers in as many
    collectives, unless the model has DTensors of several kinds, which it cannot combine, or the
    norm is NaN or infinite: then this leaves the gradients as they are.

    Args:
        parameters: of the model.
        max_norm: the largest norm that is left as it is.
        norm_type: the order of the norm, which may be infinite.
        error_if_nonfinite: raise if the norm is NaN or infinite, for which the host waits for the
            device.

    Returns:
        The norm before clipping: a scalar, the same on every rank.

    Raises:
        StepError: `sw.optimizer_in_backward` has used and dropped the gradients; or with
            ``error_if_nonfinite``, names the first gradient in backward that is not finite.
    """
    if isinstance(parameters, nn.Module):
        raise TypeError("clip_grad_norm_: expected parameters, got a module; pass its parameters()")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for parameter in parameters:
        sharding = sharding_of(parameter)
        if sharding is not None and getattr(parameter, STEPS_IN_BACKWARD, False):
            raise StepError(
                f"{sharding.name}: clipping by the global norm needs all gradients at "
                "once, and sw.optimizer_in_backward has used each and dropped it; clip single "
                "gradients in register_post_accumulate_grad_hook, or call remove() of its handle"
            )
    total = _total_norm(parameters, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise StepError(f"the gradient norm is {total.item()}: {describe_nonfinite(parameters)}")
    # A scale that is NaN would spread to all gradients, and no error could name the first.
    divisor = total.where(total.isfinite(), 0.0)
    for some in _by_mesh(parameters).values():
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, divisor, foreach=True)
    return total


def _total_norm(parameters: Iterable[Tensor], order: float) -> Tensor:
    """Over all ranks. Norms of torch's DTensors are DTensors, which stack on one mesh only."""
    chunks = defaultdict(list)  # by the mesh of the model
    others: list[Tensor] = []
    for parameter in parameters:
        gradient, sharding = parameter.grad, sharding_of(parameter)
        if type(gradient) is DTensor and sharding is not None and not sharding.tensor_parallel:
            # In a collective of ours, which ends if another rank has raised.
            chunks[sharding.mesh].append(gradient.to_local())
        elif gradient is not None:
            others.append(gradient)
    norms = [norm for mesh, some in chunks.items() for norm in norms_across(some, mesh, order)]
    by_mesh = _by_mesh(others).values()
    of_others = [torch.nn.utils.get_total_norm(some, order, foreach=True) for some in by_mesh]
    norms += [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in of_others]
    if not norms:
        return torch.tensor(0.0)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def _by_mesh(tensors: Iterable[Tensor]) -> dict[DeviceMesh | None, list[Tensor]]:
    """Those of torch's DTensors that operate together, and all others."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for one in tensors:
        by_mesh.setdefault(one.device_mesh if type(one) is DTensor else None, []).append(one)
    return by_mesh
