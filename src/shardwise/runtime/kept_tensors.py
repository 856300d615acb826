"""Tensors of a unit's call that outlive it: where backward enters, and views of parameters.

*Entries.* Autograd numbers its nodes in the order in which a thread makes them, so the number of a
tensor's node tells in which call the tensor was made, wherever it is found: in the output of an
enclosing unit, in a list or an attribute. Tensors in closures and globals cannot be found. In the
first steps, and always if one of them needed it, saved-tensors hooks notice when autograd reads
a parameter of a unit that is freed. Hooks on all saved tensors would slow each step, so other
models run without them; autograd then refuses such a read, see `FSDPParameter.forbid_reads`.

*Views of parameters.* A unit may return a parameter or a view of one (a table of positions, a
prompt), or store it in an attribute. Autograd and the caller may read it after the unit has been
freed, even after the next forward. It is therefore replaced by a copy, through which gradients flow
to the parameter. A parameter that is never freed, as in data-parallel training, is replaced by a
view, because backward reaches a parameter itself before the younger calls.
"""

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise import _private
from shardwise.errors import PlanError, StepError
from shardwise.runtime import hooks, nested
from shardwise.runtime.unit import Unit

__all__ = ["Entries", "Entry", "ParameterViews"]

_OFF = nullcontext()
_LEARNED = 2  # steps


class ParameterViews:
    """Finds tensors that must not outlive a call of ``units``: parameters and views of them."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._labels: dict[int, str] = {}  # of units, by the storages of their parameters
        self._kept: set[int] = set()  # storages that are never freed
        # Units whose storages are made by their first gather.
        self._lazy = [unit for unit in units if not self._note(unit)]

    def unit_of(self, tensor: Tensor) -> str | None:
        """The label of the unit whose parameters ``tensor`` views."""
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            found = (self._unit_of_plain(part) for part in nested.plain_tensors(tensor))
            return next((label for label in found if label is not None), None)
        return self._unit_of_plain(tensor)

    def has_any(self, tensors: Iterable[Tensor], inputs: Iterable[Tensor], label: str) -> bool:
        """Whether one of ``tensors`` views a parameter, or of ``inputs`` one of unit ``label``."""
        self._lazy = [unit for unit in self._lazy if not self._note(unit)]
        if any(self.unit_of(tensor) is not None for tensor in tensors):
            return True
        return any(self.unit_of(tensor) == label for tensor in inputs)

    def copy_outputs(self, module: nn.Module, inputs: Any, output: Any, label: str) -> Any:
        """Replace views of parameters, wherever a forward may have left them, by copies.

        The forward of the unit ``module`` ends with ``output``, so its parameters are not freed
        yet. Lists and mappings in its arguments ``inputs`` may have views of its parameters, too.
        Returns ``output``, or an output with copies.

        Raises:
            PlanError: a view cannot be replaced, or its unit has been freed.
        """
        copies: dict[int, Tensor] = {}

        def copied(tensor: Tensor) -> Tensor:
            owner = self.unit_of(tensor)
            if owner is None:
                return tensor
            if not _has_memory(tensor):
                raise PlanError(
                    f"the output of {label} views a parameter of {owner}, which has been freed; "
                    f"return a copy (.clone()) from {owner}"
                )
            if id(tensor) not in copies:
                is_kept = all(_storage_id(x) in self._kept for x in nested.plain_tensors(tensor))
                copies[id(tensor)] = tensor.view_as(tensor) if is_kept else _copy_of(tensor)
            return copies[id(tensor)]

        try:
            nested.change_tensors_left_in(module, copied)
            nested.change_tensors(inputs, lambda x: copied(x) if self.unit_of(x) == label else x)
            return nested.change_tensors(output, copied)
        except (TypeError, AttributeError) as error:
            raise PlanError(
                f"the output of {label} has a view of a parameter in a container that cannot be "
                f"changed ({error}); return a copy (.clone()), as the parameter is freed"
            ) from error

    def _note(self, unit: Unit) -> bool:
        """Note the storages of a unit. Returns whether it has them."""
        for flat in unit.flats:
            ids = [_private.storage_id(storage) for storage in flat.codec.buffer.storages]
            self._labels.update(dict.fromkeys(ids, unit.plan.label))
            if flat.is_whole:
                self._kept.update(ids)
        return all(flat.codec.buffer.storages for flat in unit.flats)

    def _unit_of_plain(self, tensor: Tensor) -> str | None:
        storage = _storage_id(tensor)
        label = self._labels.get(storage)
        if storage not in self._kept:
            return label
        return label if tensor.requires_grad and tensor.is_leaf else None


@dataclass(eq=False, slots=True)
class Entry:
    """A call of a unit, which made the nodes from number ``first`` up to ``last``.

    Each thread numbers the nodes that it makes. A forward that backward recomputes may run on
    another thread than the one that made the nodes of its inputs, ``given``.
    """

    unit: int
    first: int
    # Prepares the unit for the backward of this call, or of a transform of `torch.func`.
    callback: Callable[[bool], None]
    given: Container[Any] = ()
    last: int = -1


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor that autograd saved, with its version; ``entry`` if it views a parameter."""

    tensor: Tensor
    version: int
    entry: Entry | None


class Entries:
    """The calls of one forward, of units whose parameters ``views`` finds."""

    def __init__(self, views: ParameterViews) -> None:
        self._views = views
        self._is_needed = False  # backward has entered a unit through a saved parameter
        self._running: list[Entry] = []
        self._ended: list[Entry] = []  # in the order of their ends

    def begin(
        self, unit: int, callback: Callable[[bool], None], recomputed_from: Iterable[Tensor] = ()
    ) -> Entry:
        """Begin a call of ``unit``; for one that backward recomputes, pass its inputs."""
        if not self._running:
            self._ended.clear()
        given = hooks.nodes_at_all_levels(recomputed_from)
        entry = Entry(unit, _private.next_node_number(), callback, given)
        self._running.append(entry)
        return entry

    def end(self, entry: Entry) -> None:
        while self._running.pop() is not entry:
            pass
        entry.last = _private.next_node_number()
        self._ended.append(entry)

    def forget_running(self) -> None:
        """After an exception, of which no call is left."""
        self._running.clear()

    def running(self, unit: int) -> Entry | None:
        """The innermost running call of ``unit``."""
        return next((entry for entry in reversed(self._running) if entry.unit == unit), None)

    def watch(self, entry: Entry, tensors: Iterable[Tensor], *, only_own: bool = False) -> bool:
        """Have backward call the callbacks of ``entry``, and of the call that made a tensor.

        ``tensors`` were found in ``entry``, a running call. ``only_own`` leaves out those that were
        made before it began. Returns whether backward can reach one of them.
        """
        found, stop = False, _private.next_node_number()
        for node, is_transformed in hooks.nodes_at_all_levels(tensors).items():
            number = _private.node_number(node)
            if only_own and (node in entry.given or not entry.first <= number < stop):
                continue
            found = True
            hooks.before_node(node, partial(entry.callback, is_transformed))
            inner = self._ended_call_with(number)
            if inner is not None:
                hooks.before_node(node, partial(inner.callback, is_transformed))
        return found

    # -- tensors that are not found --------------------------------------------------------------

    def observing(self, step: int) -> AbstractContextManager[object]:
        """A context for the forward of a unit in step ``step``; see the top of the file."""
        is_off = not (step < _LEARNED or self._is_needed) or len(self._running) > 1
        if is_off or not torch.is_grad_enabled() or _private.has_saved_tensors_hooks():
            return _OFF
        if torch.is_inference_mode_enabled() or _private.is_transformed_by_functorch():
            return _OFF
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Saved:
        is_parameter = self._running and self._views.unit_of(tensor) is not None
        entry = self._running[-1] if is_parameter else None
        # A node that saves its own output would keep itself alive through it.
        return _Saved(tensor.detach(), tensor._version, entry)

    def _unpack(self, kept: _Saved) -> Tensor:
        # A unit that was gathered ahead and is not awaited yet has memory.
        if kept.entry and (kept.tensor._version != kept.version or not _has_memory(kept.tensor)):
            self._is_needed = True
            kept.entry.callback(False)
        if kept.tensor._version != kept.version:
            raise StepError(
                f"a tensor {tuple(kept.tensor.shape)} that autograd needs was changed by an "
                f"inplace operation: it is at version {kept.tensor._version}, expected "
                f"{kept.version}"
            )
        return kept.tensor

    def _ended_call_with(self, number: int) -> Entry | None:
        """The innermost call that has ended and made the node ``number``."""
        start = bisect_right(self._ended, number, key=attrgetter("last"))
        return next((one for one in self._ended[start:] if one.first <= number), None)


_private.suspend_own_hooks_in_functorch()


def _storage_id(tensor: Tensor) -> int:
    try:
        return _private.storage_id(tensor.untyped_storage())
    except RuntimeError:  # sparse tensors and those of functorch have no storage
        return 0


def _has_memory(tensor: Tensor) -> bool:
    """Whether ``tensor``, which views a parameter, can be read."""
    return all(not x.numel() or x.untyped_storage().nbytes() for x in nested.plain_tensors(tensor))


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy; as autograd records it for a leaf in any mode, gradients reach the parameter."""
    with torch.set_grad_enabled(torch.is_grad_enabled() or tensor.requires_grad):
        if 0 not in tensor.stride():
            return tensor.clone()
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        return tensor[once].clone().expand_as(tensor)
