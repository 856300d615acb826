"""`sw.elastic`: equal to one process, whatever happens to the replicas."""

import contextlib
import copy
import itertools
import math
import signal
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import write
from shardwise.checkpoint.directory import MANIFEST, MARKER, latest
from shardwise.tensor.sharding import local_of
from tests.models import WIDTH, Block, Stack
from tests.replicas.job import Job, Seat

SEED = 3


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of this rank's bits of the parameters and the optimizer's states."""
    total = 0
    for parameter in model.parameters():
        states = optimizer.state.get(parameter, {}).values()
        for tensor in (parameter, *(one for one in states if one.ndim)):
            local = local_of(tensor).detach().contiguous().reshape(-1)
            total = zlib.crc32(local.view(torch.uint8).numpy().tobytes(), total)
    return total


def batch_of(number: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class Branches(nn.Module):
    """Of three layers, each replica uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, unused: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != unused:
                x = torch.tanh(layer(x))
        return x


class Noisy(Stack):
    """Each forward draws a random number, and counts in a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + torch.rand(())


MODELS: dict[str, Callable[[], nn.Module]] = {"": Stack, "branches": Branches, "noisy": Noisy}


class DiesHealing:
    """Stands for a scheduler, and kills its process when it gets a state."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # noqa: ARG002
        self.seat.die_at("", "")


def program(
    seat: Seat,
    *,
    steps: float = math.inf,  # or those of `Job.end_after`
    dies: tuple[int, str] = (-1, ""),  # in this step, at this place
    raises: tuple[int, str] = (-1, ""),  # in this step, at this place, on rank 1
    waits: int = -1,  # before this step, until the test allows it
    seed: int = SEED,
    strategy: str = "fsdp",
    is_async: bool = True,
    init_sync: bool = False,
    kind: str = "",  # of model
    tokens: bool = False,  # a mean over all tokens, of which each rank has another number
    norm: float = 0.5,
    retries: int = 0,  # of a lighthouse that does not answer
    dies_healing: bool = False,
    pause: float = 0.0,  # seconds before a step, for processes that start meanwhile
    saves: int = 0,  # a checkpoint after so many steps
    retention: sw.Retention | None = None,
) -> None:
    torch.manual_seed(seed)
    model = MODELS[kind]().double()
    units = None if kind == "branches" else Block
    sw.fully_shard(model, units=units, strategy=strategy)
    optimizer, scheduler = adamw(model)
    manager = seat.manager(use_async_quorum=is_async, init_sync=init_sync, quorum_retries=retries)
    replicas = sw.elastic(model, optimizer, manager)
    replicas.register("scheduler", DiesHealing(seat) if dies_healing else scheduler)
    seat.log("ready")
    seat.wait_for("start")
    repeats: list[int] = []
    while (step := manager.current_step()) < min(steps, seat.last_step()):
        time.sleep(pause)
        if step == waits:
            seat.wait_for("go on")
        places = iter(["forward", "backward", "clip", "optimizer", "end"])

        def reach(step: int = step, places: Any = places) -> None:
            place = next(places)
            seat.die_at(f"{step} {place}", " ".join(map(str, dies)))
            if (step, place) == raises and seat.rank == 1 and not repeats:
                raise ZeroDivisionError

        def committed(*_: object, reach: Any = reach) -> None:
            step = manager.current_step() - 1
            if step == 0 or manager.is_participating():
                seat.log("counts", step=step)
            reach()

        hook = optimizer.register_step_pre_hook(committed)
        with contextlib.suppress(ZeroDivisionError, sw.PeerAborted), replicas.step():
            reach()
            step = manager.current_step()  # of another replica, if this one has healed
            seat.log("begins", step=step)
            batch = batch_of(seat.number, seat.rank, step)
            if dies == (step, "reduction"):
                first: Any = next(model.parameters())
                first.register_post_accumulate_grad_hook(lambda _: seat.die_at("", ""))
            if tokens:
                rows = some_of(batch, seat.number, seat.rank)
                loss = sw.backward(model, [rows], lambda x: model(x).square().sum(), len)
            else:
                arguments = [seat.number % 3] if kind == "branches" else []
                loss = model(batch, *arguments).square().mean()
                reach()
                loss.backward()
            sw.clip_grad_norm_(model.parameters(), norm)
            reach()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            reach()
        hook.remove()
        if replicas.is_committed:
            step = manager.current_step() - 1
            seat.log(
                "step",
                step=step,
                digest=digest(model, optimizer),
                num_replicas=replicas.num_replicas,
                lr=optimizer.param_groups[0]["lr"],
                loss=float(loss) if tokens else None,
                calls=float(getattr(model, "calls", 0)),
                random=zlib.crc32(torch.get_rng_state().numpy().tobytes()),
            )
            if saves and (step + 1) % saves == 0:
                path = saves_of(seat.folder, seat.number) / f"step-{step}"
                with dying(seat) if dies == (step, "save") else contextlib.nullcontext():
                    sw.save(path, model=model, optimizer=optimizer, retention=retention)
        else:
            seat.log("repeats", step=step)
            repeats.append(step)
    save(seat, model)
    manager.shutdown(wait=False)


def some_of(batch: Tensor, number: int, rank: int) -> Tensor:
    """As many rows as no other rank of 2 x 2 has, except for one."""
    return batch[: 1 + (number + rank) % 3]


def saves_of(folder: Path, number: int) -> Path:
    return folder / f"saves-{number}"


@contextlib.contextmanager
def dying(seat: Seat) -> Iterator[None]:
    """Kill this process in a save, when a part of its bytes is written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write._FlushedFile, "flush", lambda _: seat.die_at("", ""))
        yield


def saved_in(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The step of a checkpoint, and its parameters."""
    model = sw.fully_shard(Stack().double(), units=Block)
    sw.load(path, model=model)
    whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
    return int(path.name.removeprefix("step-")), whole


def save(seat: Seat, model: nn.Module) -> None:
    with sw.gathered(model):
        if seat.rank == 0:
            torch.save(model.state_dict(), seat.folder / f"{seat.number}.pt")


def assert_equal_to_one_process(
    job: Job,
    steps: int,
    numbers: range,
    checkpoints: Iterable[tuple[int, dict[str, Tensor]]] = (),
    **options: Any,
) -> None:
    """All replicas have the bits of each other, and the values of one process.

    So have ``checkpoints``, after their steps.
    """
    counted: dict[int, set[int]] = defaultdict(set)  # replicas whose samples count, by step
    begun: dict[int, set[int]] = defaultdict(set)
    sizes: dict[int, int] = {}  # how many replicas counted, by step
    for number, rank in itertools.product(numbers, range(job.num_ranks)):
        lines = {line["step"]: line for line in job.lines(number, rank, "step")}
        for line in job.lines(number, rank, "counts"):
            counted[line["step"]].add(number)
        for line in job.lines(number, rank, "begins"):
            begun[line["step"]].add(number)
        sizes |= {step: line["num_replicas"] for step, line in lines.items()}
        for other in numbers:
            assert_same_bits(lines, job.lines(other, rank, "step"))
    assert sorted(counted) == list(range(steps)), "every step was trained"
    for step, size in sizes.items():  # a replica may have died after its gradients were averaged
        counted[step] = begun[step] if len(counted[step]) < size else counted[step]
        assert len(counted[step]) == size, step
    last = [(steps - 1, torch.load(job.folder / f"{n}.pt", weights_only=True)) for n in numbers]
    due = defaultdict(list)
    for step, found in [*last, *checkpoints]:
        due[step].append(found)
    for step, expected in one_process(counted, job.num_ranks, **options):
        for found, (name, parameter) in itertools.product(
            due.pop(step, []), expected.named_parameters()
        ):
            torch.testing.assert_close(found[name], parameter.data, rtol=1e-10, atol=1e-10)
    assert not due


def assert_same_bits(lines: dict[int, dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for line in others:
        for key in ("digest", "num_replicas", "lr", "loss", "calls", "random"):
            own = lines.get(line["step"], line)  # one of them may not have run this step
            assert own[key] == line[key], (line["step"], key)


def one_process(
    counted: dict[int, set[int]],
    num_ranks: int,
    *,
    seed: int = SEED,
    kind: str = "",
    tokens: bool = False,
    norm: float = 0.5,
) -> Iterator[tuple[int, nn.Module]]:
    """Each step, and the model after it."""
    torch.manual_seed(seed)
    model = MODELS[kind]().double()
    optimizer, scheduler = adamw(model)
    for step in sorted(counted):
        places = list(itertools.product(sorted(counted[step]), range(num_ranks)))
        num_tokens = sum(len(some_of(torch.empty(3), *place)) for place in places)
        for number, rank in places:
            batch = batch_of(number, rank, step)
            if tokens:
                loss = model(some_of(batch, number, rank)).square().sum() / num_tokens
            else:
                arguments = [number % 3] if kind == "branches" else []
                loss = model(batch, *arguments).square().mean() / len(places)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield step, model


@pytest.mark.parametrize(
    ("strategy", "is_async", "kind"),
    [
        ("fsdp", True, ""),
        ("zero2", False, "branches"),
        pytest.param("ddp", True, "", marks=pytest.mark.thorough),
        pytest.param("fsdp", True, "branches", marks=pytest.mark.thorough),
        pytest.param("zero1", False, "", marks=pytest.mark.thorough),
    ],
)
def test_replicas_equal_one_process(strategy: str, is_async: bool, kind: str) -> None:
    options: dict[str, Any] = {"strategy": strategy, "is_async": is_async, "kind": kind}
    with Job(num_ranks=2, min_replicas=2) as job:
        job.finish(*job.begin(2, program, steps=6, **options))
        assert_equal_to_one_process(job, 6, range(2), kind=kind)
        assert [line["num_replicas"] for line in job.lines(0, 0, "step")] == [2] * 6


@pytest.mark.parametrize("is_async", [True, False])
def test_the_samples_of_all_replicas_count_in_the_first_step(is_async: bool) -> None:
    """torchft gives zeros to replicas that "heal" then, and divides by their number as well."""
    with Job(num_ranks=2, min_replicas=2) as job:
        options: dict[str, Any] = {"steps": 2, "is_async": is_async, "init_sync": True}
        job.finish(*job.begin(2, program, **options))
        assert_equal_to_one_process(job, 2, range(2))
        assert [line["num_replicas"] for line in job.lines(1, 0, "step")] == [2, 2]


@pytest.mark.parametrize("init_sync", [True, False])
def test_replicas_that_begin_with_different_values_are_refused(init_sync: bool) -> None:
    """With `init_sync`, torchft would give each rank the shard of another replica."""
    with Job(num_ranks=2, min_replicas=2) as job:
        replicas = [
            job.start(number, program, steps=2, seed=number, init_sync=init_sync)
            for number in range(2)
        ]
        job.allow("start")
        assert [replica.join() for replica in replicas] == [[1, 1], [1, 1]]
        text = job.output.read_text("utf-8")
        assert text.count("PlanError: replicas begin with different parameters") == 4


def kill_and_return(
    job: Job,
    dies: tuple[int, str],
    back_at: int,
    steps: int,
    num_replicas: int = 2,
    **options: Any,
) -> None:
    """The last replica dies, the others train on to step ``back_at``, and it comes back."""
    last = num_replicas - 1
    options["steps"] = steps
    stay = [job.start(n, program, waits=back_at, **options) for n in range(last)]
    died = job.start(last, program, dies=dies, **options)
    job.allow_when_ready(num_replicas)
    assert died.join() == [-signal.SIGKILL] * job.num_ranks
    for number in range(last):
        job.wait_until(partial(_has_reached, job, number, back_at - 1))
    begun = len(job.lines(last, 1, "begins"))
    back = job.start(last, program, **options)
    job.wait_until(lambda: len(job.lines(last, 1, "begins")) > begun)
    job.allow("go on")
    job.finish(*stay, back)


def _last_step(job: Job, number: int) -> int:
    return max((line["step"] for line in job.lines(number, 0, "step")), default=-1)


def _has_reached(job: Job, number: int, step: int) -> bool:
    return _last_step(job, number) >= step


PLACES = ["forward", "backward", "reduction", "optimizer", "end"]


@pytest.mark.parametrize(
    ("num_replicas", "place"),
    [
        (2, "backward"),
        (2, "end"),
        *(pytest.param(2, place, marks=pytest.mark.thorough) for place in PLACES),
        *(pytest.param(3, place, marks=pytest.mark.thorough) for place in PLACES),
    ],
)
def test_a_killed_replica_returns_with_the_bits_of_the_others(
    num_replicas: int, place: str
) -> None:
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, place), back_at=5, steps=9, num_replicas=num_replicas)
        assert_equal_to_one_process(job, 9, range(num_replicas))
        returned = [line["step"] for line in job.lines(num_replicas - 1, 0, "step")]
        assert returned[-2:] == [7, 8], "within two steps after its return"


@pytest.mark.parametrize("num_replicas", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_replica_that_is_killed_in_a_save_leaves_the_last_checkpoint_whole(
    num_replicas: int,
) -> None:
    last = num_replicas - 1
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, "save"), 5, 9, num_replicas, saves=1)
        assert (saves_of(job.folder, last) / "step-2" / MARKER).exists(), "killed in the save"
        assert not (saves_of(job.folder, last) / "step-2" / MANIFEST).exists()
        before = saves_of(job.folder, last) / "step-1"
        newest = [latest(saves_of(job.folder, number)) for number in range(num_replicas)]
        assert [path and path.name for path in newest] == ["step-8"] * num_replicas
        paths = [before, *filter(None, newest)]
        assert_equal_to_one_process(job, 9, range(num_replicas), map(saved_in, paths))


def test_all_tokens_of_all_replicas_have_the_same_weight() -> None:
    """While a replica is away, and takes a state, its tokens do not count."""
    with Job(num_ranks=2, min_replicas=1) as job:
        kill_and_return(job, (2, "optimizer"), back_at=5, steps=9, tokens=True)
        assert_equal_to_one_process(job, 9, range(2), tokens=True)
        assert {line["num_replicas"] for line in job.lines(0, 0, "step")} == {1, 2}


@pytest.mark.parametrize("is_async", [True, False])
def test_a_replica_takes_buffers_and_random_states(is_async: bool) -> None:
    """With an asynchronous quorum in a step that does not count, and is repeated."""
    with Job(num_ranks=2, min_replicas=1) as job:
        options: dict[str, Any] = {"steps": 9, "kind": "noisy", "is_async": is_async}
        stays = job.start(0, program, waits=4, raises=(4, "backward"), **options)
        job.allow_when_ready(1)
        job.wait_until(partial(_has_reached, job, 0, 3))
        joins = job.start(1, program, **options)
        event = "begins" if is_async else "ready"
        job.wait_until(lambda: all(job.lines(1, rank, event) for rank in range(2)))
        job.allow("go on")
        job.finish(stays, joins)
        for rank in range(2):
            own = {line["step"]: line for line in job.lines(0, rank, "step")}
            assert_same_bits(own, job.lines(1, rank, "step"))
            assert [own[step]["calls"] for step in range(9)] == list(range(1, 10))
        if is_async:
            assert [line["step"] for line in job.lines(1, 0, "step")] == [4, 5, 6, 7, 8]
            assert job.lines(1, 0, "repeats")


@pytest.mark.parametrize("is_async", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_an_exception_of_one_rank_is_undone_and_the_others_repeat_the_step(
    is_async: bool,
) -> None:
    with Job(num_ranks=2, min_replicas=2) as job:
        job.finish(*job.begin(2, program, steps=5, raises=(2, "clip"), is_async=is_async))
        assert_equal_to_one_process(job, 5, range(2))
        assert [line["num_replicas"] for line in job.lines(0, 0, "step")] == [2] * 5
        for number, rank in itertools.product(range(2), range(2)):
            repeats = [line["step"] for line in job.lines(number, rank, "repeats")]
            assert repeats
            assert set(repeats) == {2}


def test_a_stopped_replica_is_left_out_and_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay open while it does not answer, so the step fails after a timeout."""
    monkeypatch.setattr("tests.replicas.job.TIMEOUT", timedelta(seconds=2))
    with Job(num_ranks=2, min_replicas=1) as job:
        stays = job.start(0, program, steps=9, waits=5)
        stopped = job.start(1, program, steps=9, waits=2)
        job.allow_when_ready(2)
        job.wait_until(lambda: _last_step(job, 1) == 1)
        stopped.kill(signal.SIGSTOP)
        job.wait_until(lambda: _last_step(job, 0) == 4)
        stopped.kill(signal.SIGCONT)
        job.allow("go on")
        job.finish(stays, stopped)
        assert_equal_to_one_process(job, 9, range(2))
        assert _last_step(job, 1) == 8


class Unasked:
    """A manager of which only the callbacks are registered."""

    def register_state_dict_fn(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: pytest.fail(f"{name} was called")


def test_steps_outside_of_the_block_are_refused() -> None:
    torch.manual_seed(SEED)
    model = sw.fully_shard(Stack().double(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    replicas = sw.elastic(model, optimizer, Unasked())
    batch = batch_of(0, 0, 0)
    with pytest.raises(sw.StepError, match=r"backward inside `with replicas.step\(\)`"):
        model(batch).sum().backward()
    with pytest.raises(sw.StepError, match=r"optimizer.step\(\) once in each `with"):
        optimizer.step()
    with pytest.raises(sw.StepError, match=r"and call optimizer.step\(\) without it"):
        optimizer.step(lambda: 0.0)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(batch), model(batch))
    replicas.remove()
    model(batch).sum().backward()
    optimizer.step()


def test_what_cannot_be_a_replica_is_refused() -> None:
    model = sw.fully_shard(Stack().double(), units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(sw.PlanError, match=r"expects a torchft.Manager, got dict"):
        sw.elastic(model, optimizer, {})
    handle = sw.optimizer_in_backward(model, optimizer)
    with pytest.raises(sw.PlanError, match=r"call remove\(\) on its handle"):
        sw.elastic(model, optimizer, Unasked())
    handle.remove()
    with pytest.raises(sw.PlanError, match="is not in the optimizer, so a replica that joins"):
        sw.elastic(model, torch.optim.AdamW(list(model.parameters())[:-1]), Unasked())
    ignored = Stack().double()
    sw.fully_shard(ignored, units=Block, ignored_params=[ignored.first.weight])  # type: ignore[list-item]
    with pytest.raises(sw.PlanError, match=r"first.weight is trainable but not sharded"):
        sw.elastic(ignored, torch.optim.AdamW(ignored.parameters()), Unasked())


def test_a_lighthouse_that_ends_and_starts_again_stops_nothing() -> None:
    with Job(num_ranks=2, min_replicas=1) as job:
        replicas = [
            job.start(number, program, steps=10, waits=4, retries=20) for number in range(2)
        ]
        job.allow_when_ready(2)
        for number in range(2):
            job.wait_until(partial(_has_reached, job, number, 3))
        job.lighthouse.shutdown()
        job.allow("go on")
        time.sleep(1.0)  # the replicas ask a lighthouse that is not there
        job.restart_lighthouse()
        job.finish(*replicas)
        assert_equal_to_one_process(job, 10, range(2))


def test_a_replica_that_dies_while_it_takes_a_state_is_left_out() -> None:
    """It is killed between the copy and the step; then another one takes its place."""
    with Job(num_ranks=2, min_replicas=1) as job:
        stays = job.start(0, program, steps=12, waits=4)
        job.allow_when_ready(1)
        job.wait_until(partial(_has_reached, job, 0, 3))
        dies = job.start(1, program, steps=12, dies_healing=True)
        job.wait_until(lambda: all(job.lines(1, rank, "ready") for rank in range(2)))
        job.allow("go on")
        dies.join()
        back = job.start(1, program, steps=12)
        job.finish(stays, back)
        assert_equal_to_one_process(job, 12, range(2))
        assert [line["step"] for line in job.lines(0, 0, "step")] == list(range(12))
