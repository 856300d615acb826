"""Hooks on autograd's nodes and on gradients of parameters.

How each event is detected:

- *A unit is called*: its class, made by `fully_shard`, overrides ``__call__``. So exceptions are
  caught as well, and the order of forward hooks does not matter.
- *Backward reaches a unit*: autograd runs the node that made one of its outputs, or a tensor that
  its forward left in an attribute (``self.loss = ...``) or in an argument (``losses.append(...)``),
  or that a forward hook of a module inside the unit may have kept. For a view, the node of its base
  is hooked too, because an in-place operation replaces the view's own node.
- *A gradient is ready*: AccumulateGrad has run (``register_post_accumulate_grad_hook``).
- *Backward ends*: autograd runs the callbacks queued for the graph task. If the graph task fails
  instead, autograd drops the callback object, whose ``__del__`` reports this.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise import _private
from shardwise.errors import StepError
from shardwise.runtime import nested
from shardwise.schedule.passes import Outcome

__all__ = [
    "BackwardEnd",
    "apply_gradient_hooks",
    "before_node",
    "break_graph",
    "check_calls_end",
    "check_first_order",
    "current_task",
    "is_own",
    "nodes_at_all_levels",
    "on_gradient",
    "outcome_of",
    "run_accumulated_hooks",
    "watch_gradients",
]

NO_TASK = -1
F = TypeVar("F", bound=Callable[..., Any])


# The id of the graph task that autograd runs in this thread, or `NO_TASK`.
current_task = _private.current_graph_task


def before_node(node: torch.autograd.graph.Node, callback: Callable[[], None]) -> None:
    """Call ``callback`` before backward runs ``node``."""
    node.register_prehook(partial(_run, callback))


def outcome_of(
    module: nn.Module, returned: Sequence[Tensor], *, is_watched: bool, trainable: bool
) -> Outcome:
    """How a forward ended that returned the tensors ``returned``.

    An output without gradients counts as differentiable if the module uses trainable parameters:
    the data of other ranks may have taken a branch that needs gradients. A unit with ``trainable``
    parameters that returns no tensor may have stored some where they are not found.
    """
    if not torch.is_grad_enabled():
        return Outcome.DETACHED
    if is_watched:
        return Outcome.DIFFERENTIABLE
    only_parameters = any(isinstance(one, nn.Parameter) for one in returned)
    if (
        returned
        and not only_parameters
        and (trainable or any(parameter.requires_grad for parameter in module.parameters()))
    ):
        return Outcome.DIFFERENTIABLE
    return Outcome.UNHOOKED if trainable else Outcome.DETACHED


def watch_gradients(module: nn.Module, inputs: Any, callback: Callable[[bool], None]) -> None:
    """Call ``callback`` when backward reaches gradients of ``inputs`` that a transform computed.

    Its argument says whether this is the backward of a transform of `torch.func`, in which
    parameters are constants.

    A transform such as `torch.func.grad` records how it computes gradients, so that they can be
    differentiated: by other transforms, and by backward for the parameters. Attributes of
    ``module`` may be inputs, too.
    """
    if not (torch.is_grad_enabled() and _private.is_transformed_by_functorch()):
        return

    def watch(gradient: Tensor) -> None:
        for node, is_transformed in nodes_at_all_levels([gradient]).items():
            before_node(node, partial(callback, is_transformed))

    tensors = (*nested.tensors_in(inputs), *nested.tensors_left_in(module))
    for tensor, is_transformed in _private.at_all_levels(tensors):
        if is_transformed and tensor.requires_grad:
            tensor.register_hook(watch)  # type: ignore[no-untyped-call]


def nodes_at_all_levels(tensors: Iterable[Tensor]) -> dict[torch.autograd.graph.Node, bool]:
    """The nodes that made ``tensors``, and whether each belongs to a transform of `torch.func`.

    In the backward of a transform, parameters are constants.
    """
    pairs = (
        _private.at_all_levels(tensors)
        if _private.is_transformed_by_functorch()
        else ((tensor, False) for tensor in tensors)
    )
    return {node: is_transformed for tensor, is_transformed in pairs for node in _nodes_of(tensor)}


def break_graph(function: F) -> F:
    """Have torch.compile run ``function`` uncompiled, and compile the functions that it calls.

    `torch.compiler.disable` does the same, but its import takes seconds in every program.
    """
    skip = _private.eval_frame._FrameExecStrategy(
        _private.eval_frame._FrameAction.SKIP, _private.eval_frame._FrameAction.DEFAULT
    )
    _private.eval_frame.set_code_exec_strategy(function.__code__, skip)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


@break_graph
def _run(callback: Callable[[], None], _gradients: object) -> None:
    """Call ``callback`` as a hook of autograd, which may run in a transform.

    A backward in a function that torch.compile compiles ends the compilation: what it would find
    next is the engine.
    """
    _private.eval_frame.set_eval_frame(None)
    if _private.is_transformed_by_functorch():
        with _private.without_transforms():
            callback()
    else:
        callback()


def on_gradient(parameter: Tensor, callback: Callable[[], None]) -> None:
    """Call ``callback`` each time a gradient has been accumulated into ``parameter``."""
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(partial(_run, callback))  # type: ignore[no-untyped-call]


def is_own(hook: object) -> bool:
    """Whether ``hook`` is one of `on_gradient`."""
    return isinstance(hook, partial) and hook.func is _run


def check_first_order() -> None:
    """Refuse a backward that records its own graph."""
    if torch.is_grad_enabled():
        raise StepError(
            "backward(create_graph=True) through a sharded model is not supported: the second "
            "backward would read parameters that are freed; compute the first derivative with "
            "torch.func.grad or torch.func.vjp, or shard only what it does not need"
        )


def check_calls_end() -> None:
    """Refuse compiled autograd, which does not call what is queued for the end of a graph task."""
    if _private.current_autograd_node() is None:
        raise StepError(
            "backward through a sharded model with compiled autograd is not supported, because no "
            "gradient would be reduced; switch off compiled_autograd in the configuration of "
            "Dynamo. The model or its blocks may be compiled"
        )


class BackwardEnd:
    """A callback for the end of a graph task: calls ``finish``, or ``abandon`` if the task fails.

    If it fails, autograd drops the callback without a call, and its destructor passes the call of
    ``abandon`` to ``cleanup``. Any thread may run the destructor while it holds locks, for which
    ``cleanup`` must then not wait.
    """

    def __init__(
        self,
        finish: Callable[[], None],
        abandon: Callable[[BaseException], None],
        cleanup: Callable[[Callable[[], None]], object],
    ) -> None:
        self._finish, self._abandon, self._cleanup = finish, abandon, cleanup
        self._is_over = False

    def __call__(self) -> None:
        try:
            with _private.without_transforms():
                self._finish()
        except BaseException as error:
            self._is_over = True
            self._abandon(error)
            raise
        self._is_over = True

    def __del__(self) -> None:
        if not self._is_over and not sys.is_finalizing():
            self._cleanup(partial(self._abandon, RuntimeError("an exception in backward")))


def _nodes_of(tensor: Tensor) -> Iterator[torch.autograd.graph.Node]:
    """The node that made ``tensor``, and that of its base if it is a view."""
    if tensor.grad_fn is not None:
        yield tensor.grad_fn
        base = tensor._base if tensor._is_view() else None
        if base is not None and base.grad_fn is not None:
            yield base.grad_fn


def apply_gradient_hooks(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Apply the hooks that the user registered on ``parameter`` to its gradient."""
    for hook in _private.gradient_hooks(parameter):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def run_accumulated_hooks(parameter: Tensor) -> None:
    """Call the user's hooks for a gradient that has been accumulated."""
    for hook in _private.accumulated_gradient_hooks(parameter):
        hook(parameter)
