"""The files that `sw.record` writes while a model trains."""

import gc
import time
import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.recording.clocks import offset_from
from shardwise.recording.format import RankRecording, read_recording
from shardwise.recording.record import DefaultSteps
from shardwise.report.trace import trace_events
from shardwise.schedule.events import EventKind
from tests.models import CASES, WIDTH, Block, Stack, build
from tests.ranks import on_ranks
from tests.report.opening import assert_opens
from tests.runtime.one_process import adamw
from tests.waiting import eventually
from tests.watching import without_frames


def train(model: nn.Module, recorder: sw.Recorder, optimizer: torch.optim.Optimizer) -> None:
    """Run three updates of two backwards each, with an evaluation before each update."""
    for _ in range(3):
        with recorder.span("data"):
            batches = [torch.randn(4, WIDTH, dtype=torch.float64) for _ in range(2)]
        with torch.no_grad():
            model(batches[0])
        for batch in batches:
            recorder.count_tokens(tokens=3, padded=1)
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(directory: Path, strategy: str = "fsdp") -> tuple[RankRecording, ...]:
    model = sw.fully_shard(build("stack"), units=Block, strategy=strategy)
    optimizer = adamw(model.parameters())
    optimizer.state["k"] = torch.tensor([0])  # type: ignore[index]  # as MADGRAD has
    steps = range(2, 4)
    with sw.record(model, directory, steps=steps, optimizer=optimizer, info={"a": 1}) as recorder:
        train(model, recorder, optimizer)
    assert not sw.ledger(model).readers
    if dist.is_initialized():
        dist.barrier()
    return read_recording(directory)


@on_ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_every_step_has_totals_and_chosen_ones_have_events(tmp_path: Path, strategy: str) -> None:
    ranks = recorded(tmp_path, strategy)
    for rank in ranks:
        assert [step.step for step in rank.steps] == list(range(6))
        assert [step.updates for step in rank.steps] == [0, 0, 1, 1, 2, 2]
        assert {(step.tokens, step.padded_tokens) for step in rank.steps} == {(3, 1)}
        assert rank.detailed_steps == (2, 3)
        names = [span.name for span in rank.spans]
        assert names == ["data", "optimizer"] * 3
        assert rank.header.info["optimizer"] == "AdamW"
        assert rank.header.info["a"] == 1
        times = [(one.began, one.ended) for one in rank.steps]
        times += [(one.began, one.ended) for one in rank.spans]
        assert sorted(times) == sorted(times, key=lambda pair: pair[1]), "one after the other"
    plans = [
        [(one.event, one.unit, one.bytes) for one in rank.events if one.step == 2] for rank in ranks
    ]
    assert plans[0] == plans[1]
    assert len(plans[0]) == len([one for one in ranks[0].events if one.step == 3])


@on_ranks(2)
def test_its_trace_opens(tmp_path: Path) -> None:
    events = trace_events(recorded(tmp_path))
    assert_opens(events)
    gathers = [one for one in events if one.get("cat") == "gathers"]
    arrows = [one for one in events if one["ph"] == "s"]
    assert len(arrows) >= len(gathers)


@on_ranks(2)
def test_totals_follow_from_the_events(tmp_path: Path) -> None:
    for rank in recorded(tmp_path):
        for totals in rank.steps[2:4]:
            events = [event for event in rank.events if event.step == totals.step]
            spans = [span for event in events for span in event.spans]
            assert totals.communication_seconds == pytest.approx(sum(b - a for a, b in spans))
            assert totals.communication_bytes == sum(one.bytes for one in events if one.spans)
            assert totals.began == events[0].began
            assert totals.ended == events[-1].ended
            waits = [one for one in events if one.event in ("wait", "finish_reduce")]
            assert totals.exposed_seconds == pytest.approx(sum(one.seconds for one in waits))
            root, *others = (unit.gathered_bytes for unit in rank.header.units)
            assert 0 < totals.peak_gathered_bytes <= root + 2 * max(others)


@on_ranks(2)
def test_memory_is_sampled_where_units_begin(tmp_path: Path) -> None:
    with without_frames():
        ranks = recorded(tmp_path)
    for rank in ranks:
        begins = [
            (event.step, event.unit, event.ended)
            for event in rank.events
            if event.event in (EventKind.FORWARD, EventKind.BACKWARD)
        ]
        assert [(one.step, one.unit, one.at) for one in rank.memory] == begins
        first, *_, last = (sample for sample in rank.memory if sample.step == 2)
        assert first.shards == sum(unit.shard_bytes for unit in rank.header.units)
        assert first.optimizer >= 2 * sum(unit.own_bytes for unit in rank.header.units)
        assert (first.gradients, first.activations, first.buffers) == (0, 0, 0)
        assert last.gradients > 0
        peak = max(sample.activations for sample in rank.memory)
        assert peak >= 3 * 4 * 2 * WIDTH * 8, "tanh keeps its output in each block"
        second = next(sample for sample in rank.memory if sample.step == 3)
        assert second.activations == 4 * WIDTH * 8, "the batch, which train() still holds"
        assert second.gradients == sum(unit.gradient_shard_bytes for unit in rank.header.units)


def test_a_step_that_raises_is_left_out(tmp_path: Path) -> None:
    class Fails(nn.Module):
        fails = True

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            if self.fails:
                raise RuntimeError("once")
            return y

    model = sw.fully_shard(Fails())
    with sw.record(model, tmp_path, steps=range(9)):
        with pytest.raises(RuntimeError, match="once"):
            model(torch.randn(2, 4))
        Fails.fails = False
        model(torch.randn(2, 4)).sum().backward()
    (rank,) = read_recording(tmp_path)
    assert [step.step for step in rank.steps] == [0]
    assert len(rank.memory) == 2


def test_files_of_more_ranks_are_removed(tmp_path: Path) -> None:
    old = tmp_path / "recording" / "rank-00001.jsonl"
    old.parent.mkdir()
    old.write_text("of a run on two ranks\n")
    assert len(recorded(tmp_path)) == 1
    assert not old.exists()


@pytest.mark.parametrize("closes", [False, True])
def test_a_full_disk_ends_the_recording_and_not_the_run(closes: bool, tmp_path: Path) -> None:
    """A disk that fills up during the run: no file of another name would do that."""
    model = sw.fully_shard(nn.Linear(4, 4))
    recorder = sw.record(model, tmp_path)
    recorder._file.close()
    recorder._file = open("/dev/full", "w")  # noqa: PTH123, SIM115
    full = pytest.warns(UserWarning, match="recording stopped: .*No space left")
    with full as warned, recorder if closes else nullcontext():
        model(torch.randn(2, 4)).sum().backward()
    assert len(warned) == 1
    model(torch.randn(2, 4)).sum().backward()
    assert not sw.ledger(model).readers


def test_a_disk_that_is_full_before_the_first_line_ends_the_recording(tmp_path: Path) -> None:
    model = sw.fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording" / "rank-00000.jsonl").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="recording stopped: .*No space left") as warned:
        recorder = sw.record(model, tmp_path, optimizer=optimizer)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    recorder.close()
    assert len(warned) == 1


def test_hooks_of_the_user_keep_deciding_what_is_saved(tmp_path: Path) -> None:
    model = sw.fully_shard(Stack())
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with sw.record(model, tmp_path, steps=range(9)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(2, WIDTH)).sum()
        loss.backward()
    assert saved


def test_times_of_a_device_are_written_once_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later:
        """An event of a device that has not happened yet."""

        def __init__(self) -> None:
            self.seconds = time.perf_counter()

        def __float__(self) -> float:
            assert not is_running, "the host would wait for the device"
            return self.seconds

    model = sw.fully_shard(nn.Linear(4, 4))
    ledger, is_running = sw.ledger(model), True
    ledger.clock = Later
    recorder = sw.record(model, tmp_path, steps=range(9))
    monkeypatch.setattr(recorder._device, "is_over", lambda _event: not is_running)
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
    is_running = False
    recorder.close()
    (rank,) = read_recording(tmp_path)
    assert rank.detailed_steps == (0, 1)


def test_steps_that_are_recorded_in_detail() -> None:
    chosen = DefaultSteps()
    assert [step for step in range(310) if step in chosen] == [
        *range(3, 8),
        *(100, 101, 102, 200, 201, 202, 300, 301, 302),
    ]


def test_clocks_are_compared_by_the_shortest_exchange() -> None:
    ahead = 5.0  # clock of the other rank relative to rank 0
    began = [(0.0, 0.1 + ahead), (1.0, 1.0 + ahead), (2.0, 2.3 + ahead)]
    ended = [(0.4, 0.5 + ahead), (1.01, 1.03 + ahead), (2.9, 2.5 + ahead)]
    offset = offset_from(began, ended)
    assert offset.seconds == pytest.approx(-ahead, abs=offset.error_seconds)
    assert offset.error_seconds == pytest.approx((0.01 + 0.03) / 2)


@on_ranks(2)
def test_ranks_of_one_host_have_one_clock(tmp_path: Path) -> None:
    rank = recorded(tmp_path)[dist.get_rank()]
    assert abs(rank.header.clock_offset) <= rank.header.info["clock_error_seconds"] + 1e-6


@on_ranks(2)
@pytest.mark.parametrize("name", ["gpt", "checkpointed inside, reentrant", "unused and reused"])
def test_recording_changes_no_number(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    losses = []
    for steps in (None, range(9)):
        torch.manual_seed(0)
        model = sw.fully_shard(build(name), units=case.units)
        optimizer = adamw(model.parameters())
        options = {"steps": steps, "optimizer": optimizer}
        with nullcontext() if steps is None else sw.record(model, tmp_path, **options):  # type: ignore[arg-type]
            for _ in range(2):
                loss = case.loss(model(case.batch(4)))
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
    assert torch.equal(torch.stack(losses[:2]), torch.stack(losses[2:]))


def test_a_model_that_is_deleted_frees_its_memory_while_it_is_recorded(tmp_path: Path) -> None:
    model = sw.fully_shard(Stack())
    recorder = sw.record(model, tmp_path, steps=range(9), optimizer=adamw(model.parameters()))
    model(torch.randn(2, WIDTH)).sum().backward()
    freed = weakref.ref(sw.ledger(model))
    gc.collect()
    gc.disable()
    try:
        del model
        assert eventually(lambda: freed() is None)
    finally:
        gc.enable()
    recorder.close()
    assert len(read_recording(tmp_path)[0].steps) == 1
