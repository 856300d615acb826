"""Parameters and buffers of a module before it is sharded; as in FSDP1, ignored ones stay as is."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.features.gathered import holding
from shardwise.fsdp.errors import InStepError, StateError, UnsupportedError
from shardwise.fsdp.names import clean_name, clean_names
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime import hooks
from shardwise.runtime.accumulation import is_unreduced
from shardwise.runtime.engine import HANDLE
from shardwise.runtime.module import handle_of, keeping_gradients, ledger

__all__ = [
    "EvalPrecision",
    "buffer_dtypes",
    "materialize",
    "move",
    "preserved_buffers",
    "summon_full_params",
]


@torch.no_grad()
def materialize(
    module: nn.Module,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device | None,
    ignored: set[nn.Parameter],
) -> None:
    """Allocate and initialize the modules in ``module`` that are on the meta device, one by one."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise PlanError(f"Expected param_init_fn={param_init_fn!r} to be callable")
    for name, inner in list(module.named_modules()):
        if all(state in ignored for state in _meta_states(inner)):
            continue
        if param_init_fn is not None:
            param_init_fn(inner)
        else:
            _reset(name, inner, device or torch.get_default_device())
        if _meta_states(inner):
            raise PlanError(f"param_init_fn: left {name or 'the root'} on the meta device")


def _reset(name: str, module: nn.Module, device: torch.device) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise PlanError(
            f"{name or 'the root'}: a {type(module).__name__} on the meta device has no "
            "reset_parameters(); pass param_init_fn"
        )
    module.to_empty(device=device, recurse=False)
    reset()


def _meta_states(module: nn.Module) -> list[Tensor]:
    return [state for state in _own_states(module) if state.is_meta]


def _own_states(module: nn.Module) -> tuple[Tensor, ...]:
    return (*module.parameters(recurse=False), *module.buffers(recurse=False))


def move(
    root: nn.Module,
    device: torch.device,
    ignored_modules: Collection[nn.Module],
    ignored_params: set[nn.Parameter],
) -> None:
    """Move the parameters and buffers of ``root`` to ``device``, except for ignored ones."""

    def moves(tensor: Tensor) -> bool:
        return tensor.device != device and tensor not in ignored_params

    def to_device(tensor: Tensor) -> Tensor:
        return tensor.to(device) if moves(tensor) else tensor

    for module in root.modules():
        # Otherwise the tensors must stay the same objects.
        if module not in ignored_modules and any(map(moves, _own_states(module))):
            module._apply(to_device, recurse=False)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def preserved_buffers(modules: Collection[nn.Module]) -> Iterator[None]:
    before = [(module, dict(module._buffers)) for module in modules]
    yield
    for module, buffers in before:
        module._buffers.update(buffers)


def buffer_dtypes(root: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes of the buffers of ``root`` by name, from before wrappers cast them."""
    dtypes = {clean_name(name): buffer.dtype for name, buffer in root.named_buffers()}
    for path, module in root.named_modules():
        for name, dtype in module.__dict__.get("_buffer_dtypes", {}).items():
            dtypes[clean_name(f"{path}.{name}" if path else name)] = dtype
    return dtypes


_VARIABLE = "FSDP_USE_FULL_PREC_IN_EVAL"


class EvalPrecision:
    """Changes the dtypes of a model when it switches between training and evaluation.

    As in FSDP1, with ``FSDP_USE_FULL_PREC_IN_EVAL=1`` in the environment.
    """

    def __init__(self) -> None:
        self._is_used = os.environ.get(_VARIABLE) == "1"
        # During evaluation, the policies that the units have in training.
        self._in_training: dict[FSDPModule, MixedPrecisionPolicy] = {}

    @property
    def is_full(self) -> bool:
        """Whether the model now computes in full precision, regardless of its policies."""
        return bool(self._in_training)

    def follow(self, root: nn.Module, *, training: bool) -> None:
        """Shard ``root`` again if it has the dtypes of the other mode. Call it between steps."""
        if not self._is_used or training != self.is_full:
            return
        if training:
            policies, self._in_training = self._in_training, {}
        else:
            units = [module for module in root.modules() if isinstance(module, FSDPModule)]
            self._in_training = {unit: handle_of(unit).options.precision for unit in units}
            policies = {
                unit: MixedPrecisionPolicy(master_dtype=policy.master_dtype)
                for unit, policy in self._in_training.items()
            }
        _shard_again(root, policies)


def _shard_again(root: nn.Module, policies: Mapping[FSDPModule, MixedPrecisionPolicy]) -> None:
    """Shard ``root`` again between steps, with new ``policies`` for its units; keep gradients."""
    runtime = handle_of(root).runtime
    runtime.scheduler.check_idle("units cannot be sharded again in the middle of a step")
    for module, policy in policies.items():
        handle = handle_of(module)
        options = replace(handle.options, precision=policy)
        module.__dict__[HANDLE] = replace(handle, options=options)
    runtime.scheduler.prepare_conversion()
    with keeping_gradients(root):
        runtime.request.apply(root)


# -- whole parameters ------------------------------------------------------------------------------


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,  # noqa: ARG001
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Gather the parameters of the sharded models in ``module``. Every rank must enter.

    Args:
        module: contains an FSDP module, or is part of one.
        recurse: ignored; all parameters of a model are gathered together.
        writeback: keep changes, which must be the same on every rank.
        rank0_only: full parameters are needed only on rank 0; the other ranks gather them anyway.
        offload_to_cpu: not supported for parameters on an accelerator.
        with_grads: also gather gradients; ``writeback`` applies to them as well.

    Raises:
        UnsupportedError: flags contradict each other or are not supported.
        InStepError: a forward, a backward or another `summon_full_params` is under way.
        StateError: a parameter was replaced by one with another shape, dtype or device.
    """
    parameters = clean_names(module)
    _check_flags(parameters, writeback, rank0_only, offload_to_cpu, with_grads)
    gradients = _full_gradients(parameters) if with_grads else {}
    with contextlib.ExitStack() as stack:
        units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for unit in {id(ledger(unit)): unit for unit in units}.values():  # one of each model
            scheduler = handle_of(unit).runtime.scheduler
            in_backward = hooks.current_task() != hooks.NO_TASK
            if in_backward or scheduler.in_gathered or not scheduler.is_idle:
                raise InStepError(
                    "Cannot manually unshard parameters during forward/backward, or inside "
                    "summon_full_params; use it between steps"
                )
            try:
                stack.enter_context(holding(scheduler, write_back=writeback))
            except PlanError as error:  # a parameter was replaced
                raise StateError(f"Cannot writeback: {error}") from error
        full = clean_names(module)
        for name, gradient in gradients.items():
            full[name].grad = gradient
        yield
        changed = {name: full[name].grad for name in gradients}
    for name, gradient_after in changed.items():
        kept = parameters[name].grad
        if writeback and kept is not None and gradient_after is not None:
            kept.copy_(gradient_after)


def _check_flags(
    parameters: Mapping[str, Tensor],
    writeback: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    with_grads: bool,
) -> None:
    if rank0_only and writeback:
        raise UnsupportedError(
            "rank0_only=True with writeback=True is not supported, since changes must be made on "
            "every rank; pass writeback=False"
        )
    if offload_to_cpu and with_grads:
        raise UnsupportedError(
            "offload_to_cpu=True with with_grads=True is not supported; for gradients on the host "
            "call .cpu() on them inside"
        )
    if offload_to_cpu and any(p.device.type != "cpu" for p in parameters.values()):
        raise UnsupportedError(
            "offload_to_cpu=True: full parameters stay on the device; for a copy on the host use "
            "state_dict_type(..., FullStateDictConfig(offload_to_cpu=True))"
        )


def _full_gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    for parameter in parameters.values():
        if is_unreduced(parameter.grad):
            parameter.grad.refuse("summon_full_params(with_grads=True)")
    return {
        name: _full_gradient(parameter.grad)
        for name, parameter in parameters.items()
        if isinstance(parameter.grad, DTensor)
    }


def _full_gradient(gradient: DTensor) -> Tensor:
    """The full ``gradient``; a replicated one is not copied, so in-place changes persist."""
    is_replicated = all(placement.is_replicate() for placement in gradient.placements)
    local = gradient.to_local()
    return local.view(gradient.shape) if is_replicated else gradient.full_tensor()
