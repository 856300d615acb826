"""Parameters and buffers of a module before it is sharded; as in FSDP1, ignored ones stay as is."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.features.fsdp_module import FSDPModule
from shardwise.fsdp.names import clean_name
from shardwise.plan.precision import MixedPrecisionPolicy
from shardwise.runtime.attach import parameter_of
from shardwise.runtime.engine import HANDLE
from shardwise.runtime.module import handle_of, keeping_gradients

__all__ = ["EvalPrecision", "buffer_dtypes", "materialize", "move", "preserved_buffers"]


@torch.no_grad()
def materialize(
    module: nn.Module,
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device | None,
    ignored: set[nn.Parameter],
    others: Collection[nn.Module],
) -> None:
    """Allocate and initialize what is on the meta device in ``module``, without ``others``.

    As in FSDP1, ``param_init_fn`` is called for all modules, each before those inside it.
    Parameters that replace ``ignored`` ones are added to that set.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    if param_init_fn is not None and not callable(param_init_fn):
        raise PlanError(f"Expected param_init_fn={param_init_fn!r} to be callable")
    modules = [
        inner
        for inner in _breadth_first(module, others)
        if not (_meta_states(inner) and ignored.issuperset(_meta_states(inner)))
    ]
    if not any(map(_meta_states, modules)):
        return
    names = {inner: name for name, inner in module.named_modules()}
    for inner in modules:
        if param_init_fn is not None:
            param_init_fn(inner)
        elif _meta_states(inner):
            _reset(names[inner], inner, device or torch.get_default_device())
    for inner in filter(_meta_states, modules):
        raise PlanError(f"param_init_fn: left {names[inner] or 'the root'} on the meta device")
    ignored.update(parameter_of(module, name) for name, before in named if before in ignored)


def _breadth_first(root: nn.Module, others: Collection[nn.Module]) -> list[nn.Module]:
    found = dict.fromkeys([root])
    for module in (queue := [root]):
        new = [x for x in module.children() if x not in found and x not in others]
        found.update(dict.fromkeys(new))
        queue += new
    return queue


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
