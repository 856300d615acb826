"""What replicas train with `sw.elastic` in tests, and what one process trains instead."""

import contextlib
import itertools
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint import write
from shardwise.tensor.sharding import local_of
from tests.models import WIDTH, Block, Stack
from tests.replicas.job import Job, Seat

__all__ = [
    "MODELS",
    "SEED",
    "assert_equal_to_one_process",
    "assert_same_bits",
    "batch_of",
    "program",
    "saved_in",
    "saves_of",
]

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
    # Another rate in each step, which does not vanish in a long run.
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9 ** (n % 40))


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
        self.seat.die()


def program(seat: Seat, **options: Any) -> None:
    """Train a replica with `sw.elastic`; see `Training`."""
    Training(seat, **options).run()


@dataclass
class Training:
    """What a rank of a replica does, and what is done to it."""

    seat: Seat
    steps: float = math.inf  # or those of `Job.end_after`
    dies: tuple[int, str] = (-1, "")  # in this step, at this place
    raises: tuple[int, str] = (-1, "")  # in this step, at this place, on rank 1
    waits: tuple[int, ...] = ()  # before these steps, until the test allows each
    seed: int = SEED
    strategy: str = "fsdp"
    is_async: bool = True
    init_sync: bool = False
    kind: str = ""  # of model
    tokens: bool = False  # a mean over all tokens, of which each rank has another number
    norm: float = 0.5
    retries: int = 0  # of a lighthouse that does not answer
    dies_healing: bool = False
    pause: float = 0.0  # seconds before a step, for processes that start meanwhile
    saves: int = 0  # a checkpoint after so many steps
    retention: sw.Retention | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = MODELS[self.kind]().double()
        units = None if self.kind == "branches" else Block
        sw.fully_shard(self.model, units=units, strategy=self.strategy)
        self.optimizer, self.scheduler = adamw(self.model)
        self.manager = self.seat.manager(
            use_async_quorum=self.is_async, init_sync=self.init_sync, quorum_retries=self.retries
        )
        self.replicas = sw.elastic(self.model, self.optimizer, self.manager)
        scheduler = DiesHealing(self.seat) if self.dies_healing else self.scheduler
        self.replicas.register("scheduler", scheduler)
        self.optimizer.register_step_pre_hook(self._committed)
        self._has_raised = False
        if self.dies[1] == "reduction":
            first: Any = next(self.model.parameters())
            first.register_post_accumulate_grad_hook(lambda _: self._reach("reduction"))

    def run(self) -> None:
        self.seat.log("ready")
        self.seat.wait_for("start")
        while (step := self.manager.current_step()) < min(self.steps, self.seat.last_step()):
            time.sleep(self.pause)
            if step in self.waits:
                self.seat.wait_for(f"step {step}")
            with contextlib.suppress(ZeroDivisionError, sw.PeerAborted), self.replicas.step():
                loss = self._step()
            if self.replicas.is_committed:
                self._log_step(float(loss) if self.tokens else None)
                self._save()
            else:
                self.seat.log("repeats", step=step)
        with sw.gathered(self.model):
            if self.seat.rank == 0:
                torch.save(self.model.state_dict(), self.seat.folder / f"{self.seat.number}.pt")
        self.manager.shutdown(wait=False)

    def _step(self) -> Tensor:
        self._began = self.manager.current_step()  # that of another replica, if this has healed
        self._reach("forward")
        self.seat.log("begins", step=self._began)
        batch = batch_of(self.seat.number, self.seat.rank, self._began)
        if self.tokens:
            rows = some_of(batch, self.seat.number, self.seat.rank)
            loss = sw.backward(self.model, [rows], lambda x: self.model(x).square().sum(), len)
        else:
            arguments = [self.seat.number % 3] if self.kind == "branches" else []
            loss = self.model(batch, *arguments).square().mean()
            self._reach("backward")
            loss.backward()
        sw.clip_grad_norm_(self.model.parameters(), self.norm)
        self._reach("clip")
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self._reach("end")
        return loss

    def _reach(self, place: str) -> None:
        if self.dies == (self._began, place):
            self.seat.die()
        raises = self.raises == (self._began, place) and self.seat.rank == 1
        if raises and not self._has_raised:
            self._has_raised = True
            raise ZeroDivisionError

    def _committed(self, *_: object) -> None:
        step = self.manager.current_step() - 1
        if step == 0 or self.manager.is_participating():
            self.seat.log("counts", step=step)
        self._reach("optimizer")

    def _log_step(self, loss: float | None) -> None:
        self.seat.log(
            "step",
            step=self.manager.current_step() - 1,
            digest=digest(self.model, self.optimizer),
            num_replicas=self.replicas.num_replicas,
            lr=self.optimizer.param_groups[0]["lr"],
            loss=loss,
            calls=float(getattr(self.model, "calls", 0)),
            random=zlib.crc32(torch.get_rng_state().numpy().tobytes()),
        )

    def _save(self) -> None:
        """Save a checkpoint, and die when a part of its bytes is written, if it is time."""
        step = self.manager.current_step() - 1
        if not self.saves or (step + 1) % self.saves:
            return
        path = saves_of(self.seat.folder, self.seat.number) / f"step-{step}"
        with pytest.MonkeyPatch.context() as patch:
            if self.dies == (step, "save"):
                patch.setattr(write._FlushedFile, "flush", lambda _: self.seat.die())
            sw.save(path, model=self.model, optimizer=self.optimizer, retention=self.retention)


def some_of(batch: Tensor, number: int, rank: int) -> Tensor:
    """As many rows as no other rank of 2 x 2 has, except for one."""
    return batch[: 1 + (number + rank) % 3]


def saves_of(folder: Path, number: int) -> Path:
    return folder / f"saves-{number}"


def saved_in(path: Path) -> tuple[int, dict[str, Tensor]]:
    """The step of a checkpoint, and its parameters."""
    model = sw.fully_shard(Stack().double(), units=Block)
    sw.load(path, model=model)
    whole = {name: one.full_tensor() for name, one in model.state_dict().items()}
    return int(path.name.removeprefix("step-")), whole


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
