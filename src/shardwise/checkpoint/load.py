"""`load`: every rank reads only the bytes of its own shards."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import tree
from shardwise.checkpoint.checksums import BlockPart
from shardwise.checkpoint.collect import check_kinds, checkpoint_mesh
from shardwise.checkpoint.coordination import coordinated
from shardwise.checkpoint.foreign import open_foreign
from shardwise.checkpoint.matching import (
    LoadReport,
    OptimizerStates,
    Selection,
    Target,
    load_copies,
    match_module,
)
from shardwise.checkpoint.read import OpenCheckpoint, OpenComponent, Reader, open_checkpoint
from shardwise.checkpoint.slices import TensorSlice, assign_slice, slice_to_read
from shardwise.checkpoint.stores import folder_at
from shardwise.comm.device import wait_for_device
from shardwise.errors import CheckpointError
from shardwise.runtime.module import normal_tensors

__all__ = ["Loaded", "load", "load_values"]


@dataclass(frozen=True)
class Loaded:
    """The result of `load`.

    Attributes:
        state: the saved plain data, by name.
        report: the differences that were allowed.
        bytes_read: the bytes of tensors that this rank read.
    """

    state: dict[str, Any]
    report: LoadReport
    bytes_read: int


def load(
    path: str | os.PathLike[str],
    /,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    strict: bool = True,
    only: Sequence[str] | None = None,
    cast: bool = False,
    source: Literal["shardwise", "hf", "dcp", "torch"] = "shardwise",
    **state: Any,
) -> Loaded:
    """Load a checkpoint that any number of ranks has written. Every rank must call this.

    Each rank reads bytes directly into its own shards, and every byte is checked. 16-bit values
    are converted to float32 masters as they are read. After a `CheckpointError` other than
    `CheckpointDamaged` the model is unchanged; after any other exception it may contain some values
    of the checkpoint.

    Args:
        path: the directory or URL of a complete checkpoint; `latest` finds the newest one.
        model: sharded by `fully_shard` with any strategy, or not sharded.
        optimizer: the optimizer of the model's parameters. Its options, such as the learning rate,
            are restored, too.
        strict: False ignores names that exist only in the model or only in the checkpoint, and
            lists them in the report.
        only: fnmatch patterns for the names of the tensors, and of the parameters whose states are
            loaded. Each must match one in the model or the checkpoint.
        cast: whether values may be rounded to the dtype of the model.
        source: the format; only ``"shardwise"`` has checksums. ``"hf"``: the weights in a Hugging
            Face directory or in one safetensors file. ``"dcp"``: a directory of
            ``torch.distributed.checkpoint``. ``"torch"``: a file of ``torch.save``. The last two
            contain state dicts by name (``model``, ``optim``), or one of a model. Optimizer states
            must have parameter names as keys, as torch's ``get_state_dict`` returns them.
        state: modules, optimizers, and objects with ``load_state_dict()`` to load what was passed
            to `save` under the same names. Plain data are returned instead.

    Raises:
        CheckpointError: on every rank: there is no complete checkpoint, or it does not match. The
            message lists missing, unexpected, reshaped and re-typed tensors.
        CheckpointDamaged: a byte differs from the saved one; names the tensor.
        StepError: another rank raised (an interrupt, say), or is lost.
    """
    check_kinds("load", model, optimizer)
    given = {"model": model, "optimizer": optimizer, **state}
    values = {name: value for name, value in given.items() if value is not None}
    selection = Selection(None if only is None else tuple(only), strict, cast)
    return load_values(path, values, model, selection, source)


def load_values(
    path: str | os.PathLike[str],
    values: Mapping[str, Any],
    model: nn.Module | None,
    selection: Selection,
    source: str,
) -> Loaded:
    """Load ``values`` as `load` does. ``model`` names the parameters of the optimizers in them.

    It need not be one of ``values``.
    """
    folder = folder_at(path)
    where = str(folder)
    modules = [value for value in values.values() if isinstance(value, nn.Module)]
    modules = modules or ([] if model is None else [model])
    mesh = checkpoint_mesh(modules)
    device = next((p.device for m in modules for p in m.parameters()), torch.device("cpu"))
    first = modules[0] if modules else None
    with (
        coordinated(mesh, first, device, f"sw.load({where!r})", f"load {where}") as ranks,
        contextlib.ExitStack() as cleanup,
    ):
        ranks.finish_pending()
        ranks.host_copies.clear()
        with ranks.raises_together("open the checkpoint"):
            opened = (
                open_checkpoint(folder, cleanup)
                if source == "shardwise"
                else open_foreign(folder, source, cleanup)
            )
            plan = _LoadPlan(opened, model, selection)
            with normal_tensors():  # states are changed by later steps
                for name, value in values.items():
                    plan.add(name, value)
            selection.check(where)
            plan.report.check(where, selection)
        ranks.agree(mesh, device, f"load {plan.names} of {where}")
        wait_for_device(device)  # threads read into tensors, and know none of its streams
        with ranks.raises_together("read"):
            plan.read()
        by_rank = ranks.all_gather_rows(opened.unchecked, len(BlockPart._fields))
        with ranks.raises_together("assign what was read"):
            opened.check([BlockPart(*row) for rows in by_rank for row in rows.tolist()])
            plan.assign_slices()
            plan.finish()
    return Loaded(plan.state, plan.report, opened.bytes_read)


class _LoadPlan:
    """Reads all tensors, and assigns values once everything has been read."""

    def __init__(
        self, opened: OpenCheckpoint, model: nn.Module | None, selection: Selection
    ) -> None:
        self.report = LoadReport()
        self.state: dict[str, Any] = {}
        self._components = opened.components
        self._num_readers = opened.num_readers
        self._model = model
        self._selection = selection
        self._targets: list[tuple[Reader, Target]] = []
        self._slices: list[tuple[Tensor, TensorSlice]] = []
        self._assignments: list[Callable[[], None]] = []
        # Components that are read whole, and the functions that receive their values.
        self._whole: list[tuple[OpenComponent, Callable[[Any], None]]] = [
            (component, partial(self.state.__setitem__, name))
            for name, component in opened.components.items()
            if component.kind == "data"
        ]

    def add(self, name: str, value: Any) -> None:
        component = self._components.get(name)
        if component is None:
            known = ", ".join(sorted(self._components))
            raise CheckpointError(f"{name}: not in the checkpoint, which contains {known}")
        if component.problem:
            raise CheckpointError(f"{name}: {component.problem}")
        match component.kind, value:
            case "module", nn.Module():
                targets = match_module(value, component, self._selection, self.report)
                self._read_into(component, targets)
                copies = {x.loaded_as: x.tensor for x in targets if x.loaded_as is not None}
                self._assignments.append(partial(load_copies, value, copies))
            case "optimizer", Optimizer():
                if self._model is None:
                    raise CheckpointError(f"{name}: pass model= to load an optimizer")
                states = OptimizerStates(
                    value, self._model, component, self._selection, self.report
                )
                self._assignments.append(states.assign)
                self._read_into(component, states.targets)
            case "object", _ if callable(
                getattr(value, "load_state_dict", None)
            ) and not isinstance(value, nn.Module):
                self._whole.append((component, value.load_state_dict))
            case _:
                raise CheckpointError(
                    f"{name}: saved as {component.kind}, which a {type(value).__name__} cannot "
                    "load; sw.load returns plain data in `.state` of its result"
                )

    @property
    def names(self) -> list[str]:
        """The names of the tensors to read, the same on every rank."""
        return [target.name for _, target in self._targets]

    def read(self) -> None:
        with ThreadPoolExecutor(self._num_readers) as threads:
            read = map if self._num_readers == 1 else threads.map
            self._slices = list(read(_read, self._targets))  # raises the first error, and stops
        for component, take in self._whole:
            with normal_tensors():
                value = tree.decode(component.tree, component.reader.read_whole)
            self._assignments.append(partial(take, value))

    @torch.no_grad()
    def assign_slices(self) -> None:
        """Copy the elements of tensors that were not read in place."""
        for tensor, own in self._slices:
            assign_slice(tensor, own)
            torch.autograd.graph.increment_version(tensor)

    def finish(self) -> None:
        """Assign everything else that was read."""
        for assign in self._assignments:
            assign()

    def _read_into(self, component: OpenComponent, targets: Sequence[Target]) -> None:
        self._targets += [(component.reader, target) for target in targets]


@torch.no_grad()  # also on other threads, each of which has its own mode
def _read(reader_and_target: tuple[Reader, Target]) -> tuple[Tensor, TensorSlice]:
    reader, target = reader_and_target
    own = slice_to_read(target.tensor)
    reader.read(target.name, own)
    return target.tensor, own
