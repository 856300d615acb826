"""Records a run: reads the ledger of a model and writes one file per rank."""

import weakref
from collections import deque
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Self, SupportsFloat

import torch
from torch import nn

from shardwise._warnings import warn_caller
from shardwise.comm.device import device_of, is_accelerator
from shardwise.local_devices import name_of
from shardwise.plan.plan import Plan
from shardwise.plan.policies import repeated_blocks
from shardwise.recording.clocks import measure_clock_offset
from shardwise.recording.format import (
    Header,
    HeldBytes,
    Line,
    StepTotals,
    UnitFigures,
    file_of_rank,
    to_json,
)
from shardwise.recording.memory_meter import MemoryMeter
from shardwise.recording.steps import EndedSpan, EndedStep
from shardwise.runtime.attach import parameters_of
from shardwise.runtime.engine import Runtime
from shardwise.runtime.ledger import LedgerReader, Record, is_timed
from shardwise.runtime.module import runtime_of_root
from shardwise.schedule.events import COMPUTE

__all__ = ["DefaultSteps", "Recorder", "record"]


class DefaultSteps(Container[int]):
    """Steps 3 to 7, because the first ones are slower, and then 3 of every 100 steps."""

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and (3 <= step < 8 or (step >= 100 and step % 100 < 3))  # noqa: PLR2004


def record(
    model: nn.Module,
    directory: str | Path,
    *,
    steps: Container[int] = DefaultSteps(),
    optimizer: torch.optim.Optimizer | None = None,
    info: Mapping[str, Any] | None = None,
) -> "Recorder":
    """Record a run for `shardwise report` until the end of the ``with`` block::

        with sw.record(model, "runs/first", optimizer=optimizer) as recorder:
            for batch in batches:
                with recorder.span("data"):
                    ...

    Each rank writes a file such as ``directory/recording/rank-00003.jsonl``: the totals of every
    step, and all events and memory samples of some steps. An existing recording is replaced. On an
    accelerator, the totals of the other steps do not tell how long communication took.

    Args:
        model: the sharded root. All ranks of its mesh must call this.
        directory: the run's directory, shared by the hosts or one on each host. In the second case,
            copy the files into one directory before you make a report.
        steps: the steps to record in detail: any container of step numbers, such as
            ``range(10, 13)``. In the ledger, each backward ends a step.
        optimizer: if given, its steps are recorded as spans and its state as memory.
        info: further facts for the report; values must be serializable as JSON.

    Raises:
        PlanError: the model is not sharded, or it is a unit inside a sharded model.
    """
    return Recorder(model, Path(directory), steps, optimizer, dict(info or {}))


class Recorder(LedgerReader):
    """An ongoing recording. Use it as a context manager, or call `close` at the end."""

    def __init__(
        self,
        model: nn.Module,
        directory: Path,
        steps: Container[int],
        optimizer: torch.optim.Optimizer | None,
        info: dict[str, Any],
    ) -> None:
        runtime = runtime_of_root(model)
        self._ledger = weakref.ref(runtime.scheduler.ledger)  # weak: the ledger refers to this
        self._clock = runtime.scheduler.ledger.clock
        self._steps = steps
        self._device = device_of(runtime.pools.device)
        self._meter = MemoryMeter(model, runtime, optimizer)
        self._samples: list[tuple[Record, HeldBytes]] = []  # samples of the current step
        self._sampled_step = -1
        self._tokens: tuple[int, int] | None = None
        self._pending: deque[EndedStep | EndedSpan] = deque()  # the device may not be done
        self._forward_began: SupportsFloat = 0.0
        self.exposed_seconds = 0.0  # sum over all steps whose times are known
        self.num_timed_steps = 0  # of these
        self._closing = ExitStack()
        clock = measure_clock_offset(runtime)
        self._offset = clock.seconds
        info = {
            "torch": torch.__version__,
            "clock_error_seconds": clock.error_seconds,
            "blocks": _blocks_of(model, runtime.plan),
            **({} if optimizer is None else _info_of(optimizer)),
            **info,
        }
        world = runtime.mesh.world
        path = file_of_rank(directory, world.index)
        path.parent.mkdir(parents=True, exist_ok=True)
        if world.index == 0:
            for left in path.parent.glob("rank-*.jsonl"):  # by an earlier run on more ranks
                if int(left.stem.removeprefix("rank-")) >= world.size:
                    left.unlink(missing_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._write([_header(runtime, clock.seconds, info)])
        if self._file.closed:  # the disk is full
            return
        runtime.scheduler.ledger.readers.append(self)
        if optimizer is not None:
            self._watch(optimizer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the remaining lines and stop recording."""
        self._detach()
        while self._pending:  # on an accelerator, the host waits for them
            self._write(list(self._pending.popleft().lines(self._offset)))
        with suppress(OSError):  # what a quota of the server refuses only now
            self._file.close()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Record the ``with`` block as a span called ``name``, such as "data" or "checkpoint"."""
        ledger = self._ledger()
        return nullcontext() if ledger is None else ledger.span(name)

    def count_tokens(self, tokens: int, padded: int = 0) -> None:
        """Add to the token counts of the current step: tokens that count, and padding."""
        counted, padding = self._tokens or (0, 0)
        self._tokens = counted + tokens, padding + padded

    # -- called by the ledger --------------------------------------------------------------------

    def wants_times(self, step: int) -> bool:
        return step in self._steps

    def forward_began(self) -> None:
        ledger = self._ledger()
        assert ledger is not None
        if not ledger.is_timed:
            self._forward_began = self._clock()
        if ledger.step not in self._steps:
            return
        if self._sampled_step != ledger.step:
            self._sampled_step = ledger.step
            self._meter.step_begins()
        self._meter.forward_began()

    def forward_ended(self) -> None:
        self._meter.forward_ended()

    def appended(self, record: Record) -> None:
        ledger = self._ledger()
        if record.event.kind in COMPUTE and record.step == self._sampled_step and ledger:
            self._samples.append((record, self._meter.sample(ledger.gathered_bytes)))

    def step_ended(self, step: int, records: Sequence[Record]) -> None:
        ledger = self._ledger()
        assert ledger is not None
        samples, self._samples = self._samples, []
        tokens, self._tokens = self._tokens, None
        if records and is_timed(records):
            began, ended_at = records[0].began, records[-1].ended
        else:
            began, ended_at = self._forward_began, self._clock()
        ended = EndedStep(
            step,
            records,
            samples,
            updates=ledger.updates,
            gathered_bytes=ledger.gathered_bytes,
            tokens=tokens,
            is_detailed=step in self._steps,
            began=began,
            ended=ended_at,
        )
        self._pending.append(ended)
        self._write_pending()

    def step_abandoned(self) -> None:
        self._meter.forward_ended()
        self._samples.clear()
        self._tokens = None

    def span_ended(self, step: int, name: str, began: SupportsFloat, ended: SupportsFloat) -> None:
        self._pending.append(EndedSpan(step, name, began, ended))

    # -- writing ---------------------------------------------------------------------------------

    def _write_pending(self) -> None:
        """Write the steps and spans whose times are known, without waiting for the device."""
        lines: list[Line] = []
        while self._pending and self._pending[0].is_over(self._device):
            lines += self._pending.popleft().lines(self._offset)
        self._write(lines)

    def _write(self, lines: Collection[Line]) -> None:
        totals = [line.exposed_seconds for line in lines if isinstance(line, StepTotals)]
        timed = [seconds for seconds in totals if seconds is not None]
        self.exposed_seconds += sum(timed)
        self.num_timed_steps += len(timed)
        text = "".join(to_json(line) + "\n" for line in lines)
        try:
            self._file.write(text)
            self._file.flush()  # so that the steps of a killed run are kept
        except OSError as error:  # a full disk must not stop training
            with suppress(OSError):  # raised again for the text that is left
                self._file.close()
            warn_caller(f"{self._file.name}: recording stopped: {error}")
            self._pending.clear()
            self._detach()

    def _detach(self) -> None:
        ledger = self._ledger()
        if ledger is not None and self in ledger.readers:
            ledger.readers.remove(self)
        self._closing.close()
        self._meter.forward_ended()

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        began: list[SupportsFloat] = []
        clock, this = self._clock, weakref.ref(self)

        def begin(*_: object) -> None:
            began[:] = [clock()]

        def end(*_: object) -> None:
            recorder = this()
            ledger = None if recorder is None else recorder._ledger()
            if recorder is not None and ledger is not None and began:
                recorder.span_ended(ledger.step, "optimizer", began.pop(), clock())

        self._closing.callback(optimizer.register_step_pre_hook(begin).remove)
        self._closing.callback(optimizer.register_step_post_hook(end).remove)


def _header(runtime: Runtime, clock_offset: float, info: dict[str, Any]) -> Header:
    plan, world = runtime.plan, runtime.mesh.world
    return Header(
        rank=world.index,
        world_size=world.size,
        strategy=plan.strategy.name,
        prefetch=plan.prefetch,
        replicas=plan.replicas,
        device=name_of(runtime.pools.device),
        clock_offset=clock_offset,
        units=tuple(
            UnitFigures.of(unit.plan, sum(one.local.nbytes for one in unit.parameters))
            for unit in runtime.units
        ),
        info=info,
    )


def _blocks_of(model: nn.Module, plan: Plan) -> dict[str, list[int]]:
    """Return the elements of each repeated block, for units with such blocks and no child units."""
    blocks: dict[str, list[int]] = {}
    for unit in plan.units:
        if unit.has_child_units:
            continue
        module = model.get_submodule(unit.name)
        found = [module.get_submodule(name) for name in repeated_blocks(module)]
        if found:
            blocks[unit.label] = [sum(p.numel() for p in block.parameters()) for block in found]
    return blocks


def _info_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Describe ``optimizer``, and whether it is fused, uses foreach or loops over its tensors."""
    groups = optimizer.param_groups
    parameters = parameters_of(optimizer)
    on_accelerator = all(is_accelerator(parameter.device) for parameter in parameters)
    if all(group.get("fused") for group in groups):
        implementation = "fused"
    elif all(
        group.get("foreach") or (group.get("foreach") is None and on_accelerator)
        for group in groups
    ):
        implementation = "foreach"
    else:
        implementation = "loop"
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_tensors": len(parameters),
        "optimizer_way": implementation,
    }
