"""`load`: every rank reads the bytes that it keeps, and no others."""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint import crc, tree
from shardwise.checkpoint.collect import axis_of
from shardwise.checkpoint.foreign import open_foreign
from shardwise.checkpoint.opening import Opened, Part, open_checkpoint
from shardwise.checkpoint.peers import peers_of
from shardwise.checkpoint.reader import Reader
from shardwise.checkpoint.remote import folder_at
from shardwise.checkpoint.report import Report
from shardwise.checkpoint.shares import own_run
from shardwise.checkpoint.states import States
from shardwise.checkpoint.targets import Choice, Target, match_module
from shardwise.errors import CheckpointError
from shardwise.runtime.tensor import ShardedTensor

__all__ = ["Loaded", "load"]


@dataclass(frozen=True)
class Loaded:
    """What `load` has done.

    Attributes:
        state: the plain data that were saved, by name.
        report: what did not fit exactly, and was allowed.
        bytes_read: of tensors, by this rank.
    """

    state: dict[str, Any]
    report: Report
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
    """Load a checkpoint, written by any number of ranks; all ranks have to call this.

    Each rank reads the bytes of its own shards, straight into them, and every byte is checked.
    Values of 16-bit files become those of 32-bit masters as they are read. After an error that is
    a `CheckpointDamaged` the model may have values of the checkpoint in it; after any other it is
    as it was.

    Args:
        path: the directory of a complete checkpoint, or its URL; `latest` finds the newest.
        model: sharded by `fully_shard`, by any strategy, or plain.
        optimizer: of the model's parameters. It takes the saved options (the learning rate), too.
        strict: False leaves out what is only here or only there; the report lists it.
        only: patterns of names, as in fnmatch, of the tensors and the parameters' states to load.
        cast: whether values may be rounded to the dtype that is here.
        source: what else there may be in ``path``, without checksums: ``"hf"``, the weights of a
            Hugging Face directory or of one safetensors file; ``"dcp"``, a directory of
            ``torch.distributed.checkpoint``; ``"torch"``, a file of ``torch.save``. In the last two
            are state dicts by name (``model``, ``optim``), or that of a model. Optimizer states
            have the names of parameters, as torch's ``get_state_dict`` gives them.
        state: what `save` was given by these names: modules, optimizers, and objects with
            ``load_state_dict()``. Plain data are returned instead.

    Raises:
        CheckpointError: on every rank: there is no complete checkpoint, or it does not fit; lists
            missing, unexpected, reshaped and re-typed tensors.
        CheckpointDamaged: a byte is not the one that was saved; names the tensor.
    """
    where = str(folder_at(path))
    given = {"model": model, "optimizer": optimizer, **state}
    values = {name: value for name, value in given.items() if value is not None}
    modules = [value for value in values.values() if isinstance(value, nn.Module)]
    axis = axis_of(modules)
    device = next((p.device for m in modules for p in m.parameters()), torch.device("cpu"))
    peers = peers_of(axis, modules[0] if modules else None)
    peers.meet(axis, device, f"load {where}")
    peers.settle()
    peers.staging.release()
    choice = Choice(None if only is None else tuple(only), strict, cast)
    with contextlib.ExitStack() as cleanup:
        with peers.together("open the checkpoint"):
            opened = (
                open_checkpoint(folder_at(where), cleanup)
                if source == "shardwise"
                else open_foreign(where, source, cleanup)
            )
            plan = _Plan(opened, model, choice)
            for name, value in values.items():
                plan.add(name, value)
            plan.report.check(where, strict=strict, cast=cast)
        peers.meet(axis, device, f"load {plan.names} of {where}")
        with peers.together("read"):
            plan.read()
        told = peers.exchange(crc.encode(opened.unchecked))
        opened.check([part for parts in told for part in crc.decode(parts)])
    with peers.together("assign what was read"):
        plan.finish()
    return Loaded(plan.state, plan.report, opened.bytes_read)


class _Plan:
    """What is read where, and what is done when all has been read."""

    def __init__(self, opened: Opened, model: nn.Module | None, choice: Choice) -> None:
        self._parts = opened.parts
        self._num_readers = opened.num_readers
        self.report = Report()
        self.state: dict[str, Any] = {}
        self._model = model
        self._choice = choice
        self._targets: list[tuple[Reader, Target]] = []
        self._whole: list[tuple[Part, Callable[[Any], None]]] = []  # read as it is
        self._decoded: list[tuple[Callable[[Any], None], Any]] = []
        self._states: list[States] = []
        for name, part in opened.parts.items():
            if part.kind == "data":
                self._whole.append((part, partial(self.state.__setitem__, name)))

    def add(self, name: str, value: Any) -> None:
        """``value`` takes what was saved as ``name``."""
        part = self._parts.get(name)
        if part is None:
            known = ", ".join(sorted(self._parts))
            raise CheckpointError(f"{name}: not in the checkpoint, which has {known}")
        match part.kind, value:
            case "module", nn.Module():
                self._extend(
                    part,
                    match_module(value, part.specs, part.aliases, self._choice, self.report),
                )
            case "optimizer", Optimizer():
                if self._model is None:
                    raise CheckpointError(f"{name}: an optimizer is loaded with its model=")
                states = States(value, self._model, part.tree, part.specs)
                states.match(self._choice, self.report)
                self._states.append(states)
                self._extend(part, states.targets)
            case "object", _ if callable(getattr(value, "load_state_dict", None)):
                self._whole.append((part, value.load_state_dict))
            case _:
                raise CheckpointError(
                    f"{name}: saved as {part.kind}, and a {type(value).__name__} cannot take that; "
                    "plain data come back in `.state` of what sw.load returns"
                )

    @property
    def names(self) -> list[str]:
        """What is read, the same on every rank."""
        return [target.name for _, target in self._targets]

    def read(self) -> None:
        if self._num_readers == 1:
            for reader, target in self._targets:
                _fill(reader, target)
        else:
            threads = ThreadPoolExecutor(self._num_readers)
            try:
                for done in [threads.submit(_fill, *each) for each in self._targets]:
                    done.result()
            finally:  # after an error the rest is not read
                threads.shutdown(cancel_futures=True)
        for part, take in self._whole:
            self._decoded.append((take, tree.decode(part.tree, part.reader.read_whole)))

    def finish(self) -> None:
        for states in self._states:
            states.assign()
        for take, value in self._decoded:
            take(value)

    def _extend(self, part: Part, targets: Sequence[Target]) -> None:
        self._targets += [(part.reader, target) for target in targets]


@torch.no_grad()  # which is of a thread
def _fill(reader: Reader, target: Target) -> None:
    tensor: Tensor = target.tensor
    share = own_run(tensor)
    reader.read(target.name, share)
    if not isinstance(tensor, ShardedTensor) and not tensor.is_contiguous():
        tensor.copy_(share.elements.view(tensor.shape))  # which was not its own memory
    torch.autograd.graph.increment_version(tensor)
