"""Runs a module once on fake tensors, and records what a rank computes and keeps in memory.

The module runs unchanged: its own forward, autograd's backward, PyTorch's activation checkpointing,
and the schedule's events in the same places as in the engine. No data is allocated or computed.

Fake tensors are on the CPU, because autograd needs the driver of any other device. Differences on
GPUs are emulated: attention is one fused operation even with dropout or a mask, dropout keeps a
mask of one byte per element, and autocast computes norms, softmax and losses in float32. A mask
with as many queries as keys counts as causal, because libraries make a causal mask explicit if they
cannot inspect its values.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise._private import FakeTensorMode, pytree, run_backward
from shardwise.errors import PlanError, ShardwiseError
from shardwise.features.full_precision import apply_precision
from shardwise.features.fused_wgrad import has_plain_forward, takes_slot
from shardwise.forecast.trace.recomputing import checkpoint_blocks
from shardwise.forecast.trace.recorder import Recorder, tensors_in
from shardwise.forecast.work import Workload
from shardwise.plan.precision import DEFAULT_PRECISION, MixedPrecisionPolicy
from shardwise.runtime.casting import cast_tensors
from shardwise.schedule.events import EventKind

__all__ = ["trace"]

Loss = Callable[[Any], Tensor]


def trace(
    module: nn.Module,
    batch: Sequence[Any] | Mapping[str, Any],
    *,
    units: Sequence[str],
    loss: Loss | None = None,
    autocast: torch.dtype | None = None,
    precision: MixedPrecisionPolicy = DEFAULT_PRECISION,
    checkpointing: Mapping[str, str] | None = None,
    is_stage: bool = False,
) -> Workload:
    """Run forward and backward of ``module`` on fake tensors.

    Args:
        module: the module, on any device, including "meta". It is not changed.
        batch: arguments of its forward, by position or by name. Only the shape and dtype of tensors
            matter. The first tensor has a row for each sequence. Tensors that require gradients
            count as activations.
        units: names of the units, as in a plan; the root may be omitted.
        loss: turns the module's output into a scalar; None: the output is a scalar, or its
            attribute "loss" is.
        autocast: the dtype of ``torch.autocast``; None: no autocast.
        precision: dtypes of parameters and casts between units, as for `sw.fully_shard`.
        checkpointing: module name -> mode of `checkpoint_blocks`.
        is_stage: whether the module returns activations for the next pipeline stage. Backward then
            begins with their gradients.

    Raises:
        PlanError: a unit does not exist, forward fails, or the output has no scalar loss that
            depends on a trained parameter.
    """
    names = ("", *(name for name in units if name))
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        model, kept = _fake_copy(module, precision)
        calls = _Calls(recorder, precision)
        for index, name in enumerate(names):
            calls.watch(index, _submodule(model, name))
        _watch_linear_layers(recorder, model, names)
        # Fake tensors have no random state.
        checkpoint_blocks(model, checkpointing or {}, preserve_rng_state=False)
        recorder.exclude(kept)
        inputs = [pytree.tree_map_only(Tensor, _fake_input, batch)]
        if autocast is not None:
            stack.enter_context(torch.autocast("cpu", autocast))
        stack.enter_context(_AsOnGPU(autocasts=autocast is not None))
        with recorder:
            forward_segments = _run(calls, model, inputs, _as_is if is_stage else loss)
    first = next(tensors_in(batch))  # [sequences, ...]
    return Workload(
        units=names,
        segments=tuple(recorder.segments),
        forward_segments=forward_segments,
        tokens=first.numel() if first.dim() == 2 else first.shape[0],  # noqa: PLR2004
    )


def _run(calls: "_Calls", model: nn.Module, inputs: list[Any], loss: Loss | None) -> int:
    """Run forward and backward; return the number of forward segments.

    ``inputs`` has the only reference to the batch and is emptied.
    """
    recorder = calls.recorder
    value = _loss(recorder, model, inputs.pop(), loss)
    forward_segments = len(recorder.segments) + 1  # the last segment has not ended yet
    recorder.in_backward = True
    run_backward(value)
    calls.finish_backward()
    del value
    recorder.end()
    return forward_segments


def _loss(recorder: Recorder, model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    recorder.exclude(tensor for tensor in tensors_in(batch) if not tensor.requires_grad)
    log = logging.getLogger(FakeTensorMode.__module__)
    log.addFilter(_drop)  # it prints tracebacks of errors, which are raised as well
    try:
        output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    except ShardwiseError:
        raise
    except Exception as error:  # any error of the user's forward
        raise PlanError(
            f"forward of {type(model).__name__} failed on tensors without values: "
            f"{type(error).__name__}: {str(error).strip()}; pass inputs= to sw.estimate, a "
            "function of the number of sequences and their length that returns its arguments, or "
            "use a sequence length that it supports"
        ) from error
    finally:
        log.removeFilter(_drop)
    value = output if loss is None else loss(output)
    value = getattr(value, "loss", value)
    if isinstance(value, Tensor) and (loss is _as_is or value.dim() == 0):
        if not value.requires_grad:
            raise PlanError(
                f"the loss of {type(model).__name__} depends on no trained parameter; set "
                "requires_grad of what is to be trained"
            )
        return value
    raise PlanError(
        f"the module returned {type(value).__name__}, not a scalar loss; pass "
        "loss=function_of_its_output"
    )


def _drop(_record: logging.LogRecord) -> bool:
    return False


def _as_is(output: Any) -> Any:
    return output


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise PlanError(f"{name!r}: there is no such module in {type(model).__name__}") from error


# -- the module on fake tensors ------------------------------------------------------------------


def _fake(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    shape, stride = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, stride, dtype=dtype or tensor.dtype, device="cpu")


def _fake_input(tensor: Tensor) -> Tensor:
    fake = _fake(tensor).requires_grad_(tensor.requires_grad)
    _take_gradient_of(fake)
    return fake


def _fake_copy(
    module: nn.Module, precision: MixedPrecisionPolicy
) -> tuple[nn.Module, list[Tensor]]:
    """Copy ``module`` with fake parameters as gathered; return the copy and its tensors."""
    tensors: dict[int, Any] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            kept, cast = precision.dtypes_of(parameter, owner)
            dtype = kept if cast is None else getattr(torch, cast.compute_dtype)
            fake = nn.Parameter(_fake(parameter, dtype), parameter.requires_grad)
            tensors.setdefault(id(parameter), fake)
        attributes = (*owner.buffers(recurse=False), *vars(owner).values())
        for tensor in attributes:
            if isinstance(tensor, Tensor):
                tensors.setdefault(id(tensor), _fake(tensor))
    model = copy.deepcopy(module, dict(tensors))
    apply_precision(model, precision)
    for parameter in model.parameters():
        _take_gradient_of(parameter)
    return model, [*tensors.values(), *model.buffers()]


def _take_gradient_of(leaf: Tensor) -> None:
    """Drop the gradient of ``leaf`` when it is complete: the engine moves it to a buffer."""
    if leaf.requires_grad:
        leaf.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]


def _drop_gradient(leaf: Tensor) -> None:
    leaf.grad = None


# -- gradients in the slots of reduce buffers ----------------------------------------------------


def _watch_linear_layers(recorder: Recorder, model: nn.Module, units: Sequence[str]) -> None:
    """Tell ``recorder`` when the engine computes a weight gradient in a reduce buffer.

    It does so in plain linear layers that share their weight with no other module.
    """
    uses = Counter(one for owner in model.modules() for one in owner.parameters(recurse=False))
    modules = [model.get_submodule(name) for name in units]
    # Inner units follow the units that contain them.
    unit_of = {layer: index for index, unit in enumerate(modules) for layer in unit.modules()}
    for layer, index in unit_of.items():
        if layer in modules or not has_plain_forward(layer, nn.Linear):
            continue
        weight: Any = layer.weight
        if weight.requires_grad and takes_slot(weight.numel()) and uses[weight] == 1:
            layer.register_forward_hook(partial(_expect_gradient, recorder, index))


def _expect_gradient(
    recorder: Recorder, unit: int, layer: nn.Linear, _args: Any, output: Any
) -> None:
    if output.grad_fn is not None and not torch.is_autocast_enabled("cpu"):
        output.grad_fn.register_prehook(lambda _: recorder.expect_in_slot(layer.weight, unit))


# -- the events of the engine --------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """One forward of a unit."""

    unit: int
    siblings: "list[_Call]"  # calls of the same pass, by the end of their forward
    is_visited: bool = False  # whether backward has reached it


@dataclass
class _Calls:
    """The calls of units, tracked like `Sequencer` does."""

    recorder: Recorder
    precision: MixedPrecisionPolicy
    stack: list[_Call] = field(default_factory=list)
    passes: list[list[_Call]] = field(default_factory=list)

    def watch(self, unit: int, module: nn.Module) -> None:
        module.register_forward_pre_hook(partial(self._enter, unit), with_kwargs=True)
        module.register_forward_hook(self._leave, always_call=True)

    def finish_backward(self) -> None:
        """Visit the calls that no gradient has reached."""
        self._visit_until(self.passes[0], None)

    def _enter(
        self, unit: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.stack:
            self.passes.append([])
        self.stack.append(_Call(unit, self.passes[-1]))
        self.recorder.begin(EventKind.FORWARD, unit)
        self.recorder.in_unit = True
        dtype = self.precision.param_dtype
        if self.precision.cast_forward_inputs and dtype is not None:
            args, kwargs = cast_tensors((args, kwargs), dtype)
        return args, kwargs

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        call = self.stack.pop()
        self.recorder.in_unit = bool(self.stack)
        if output is not None and self.precision.output_dtype is not None:
            output = cast_tensors(output, self.precision.output_dtype)
        nodes = {one.grad_fn for one in tensors_in(output) if one.grad_fn is not None}
        if nodes and torch.is_grad_enabled():
            call.siblings.append(call)
        for node in nodes:
            node.register_prehook(lambda _gradients: self._visit_until(call.siblings, call))
        return output

    def _visit_until(self, calls: list[_Call], last: _Call | None) -> None:
        if last is not None and last.is_visited:
            return
        for call in reversed(calls):
            if not call.is_visited:
                call.is_visited = True
                self.recorder.begin(EventKind.BACKWARD, call.unit)
            if call is last:
                return


# -- differences on a GPU ------------------------------------------------------------------------

_IN_FLOAT32 = {
    F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.cross_entropy, F.nll_loss, F.mse_loss,
    F.l1_loss, F.smooth_l1_loss, F.kl_div, torch.softmax, torch.log_softmax, Tensor.softmax,
    Tensor.log_softmax, torch.layer_norm, torch.pow, Tensor.pow, Tensor.__pow__, torch.rsqrt,
    Tensor.rsqrt, torch.exp, Tensor.exp, torch.log, Tensor.log, torch.sum, Tensor.sum, torch.prod,
    Tensor.prod, torch.cumsum, Tensor.cumsum, torch.norm, Tensor.norm, torch.logsumexp,
    Tensor.logsumexp, F.softplus,
}  # fmt: skip


class _AsOnGPU(TorchFunctionMode):
    """Makes functions compute as on a GPU.

    PyTorch's autocast has a different list of float32 functions for CPUs.
    """

    def __init__(self, *, autocasts: bool) -> None:
        super().__init__()
        self._autocasts = autocasts

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attention(func, *args, **kwargs)
        if self._autocasts and func in _IN_FLOAT32:
            args, kwargs = cast_tensors((args, kwargs), torch.float32)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
    if inplace or not training or not p:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, train=True)[0]


def _attention(
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    **options: Any,
) -> Any:
    if attn_mask is not None:
        is_causal = attn_mask.shape[-1] == attn_mask.shape[-2]
        if attn_mask.requires_grad:
            return function(query, key, value, attn_mask, **options)
    return function(query, key, value, is_causal=is_causal, **options)
