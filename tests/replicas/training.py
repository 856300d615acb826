"""What replicas train with `sw.elastic` in tests, and what one process trains instead."""

import contextlib
import itertools
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

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
_ERRORS = ZeroDivisionError, KeyboardInterrupt  # the second one in clipping


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of this rank's bits of the parameters and the optimizer's states."""
    total = 0
    for parameter in model.parameters():
        states = optimizer.state.get(parameter, {}).values()
        for tensor in (parameter, *(one for one in states if one.ndim)):
            local = local_of(tensor).detach().contiguous().reshape(-1)
            total = zlib.crc32(local.view(torch.uint8).numpy().tobytes(), total)
    return total


def sums_of(model: nn.Module) -> list[tuple[int, float]]:
    """The number and the sum of this rank's elements of each parameter."""
    locals_ = [local_of(parameter).detach() for parameter in model.parameters()]
    return [(local.numel(), float(local.sum())) for local in locals_]


def batch_of(number: int, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    """The sum over all elements. The target of a row is another row, so gradients never vanish."""
    return (output - batch.roll(1, 0)).square().sum()


def freeze(model: nn.Module, kind: str) -> None:
    """As adapters (LoRA) do: only some parameters are trained."""
    if kind == "frozen":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "up" in name


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-3)
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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "": Stack,
    "frozen": Stack,
    "branches": Branches,
    "noisy": Noisy,
    "deep": partial(Stack, 4),
}


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
    minimum: int = 1  # replicas without which no step counts
    dies_healing: bool = False
    dies_giving: bool = False  # when another replica takes its state
    replica_id: str = ""  # or that of the seat
    unreachable: bool = False  # replicas whose state rank 1 would take
    first: int = 0  # step, after a checkpoint
    differs: bool = False  # a shard of rank 1 at the beginning
    micro_batches: int = 1
    mesh: tuple[int, int] = (0, 0)  # of "hsdp" inside a replica
    precision: sw.MixedPrecisionPolicy = field(default_factory=sw.MixedPrecisionPolicy)
    pause: float = 0.0  # seconds before a step, for processes that start meanwhile
    saves: int = 0  # a checkpoint after so many steps
    retention: sw.Retention | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.model = MODELS[self.kind]().double()
        units = None if self.kind == "branches" else Block
        freeze(self.model, self.kind)
        sharding: dict[str, Any] = {"strategy": self.strategy, "mp_policy": self.precision}
        if self.strategy == "hsdp":
            sharding["mesh"] = init_device_mesh("cpu", self.mesh)
        sw.fully_shard(self.model, units=units, **sharding)
        if self.differs and self.seat.rank == 1:
            local_of(next(self.model.parameters())).data.add_(1)
        self.optimizer, self.scheduler = adamw(self.model)
        self.manager = self.seat.manager(
            use_async_quorum=self.is_async,
            init_sync=self.init_sync,
            quorum_retries=self.retries,
            min_replica_size=self.minimum,
            replica_id=self.replica_id or f"replica{self.seat.number}",
        )
        self.replicas = sw.elastic(self.model, self.optimizer, self.manager)
        scheduler = DiesHealing(self.seat) if self.dies_healing else self.scheduler
        self.replicas.register("scheduler", scheduler)
        if self.dies_giving:
            self.replicas._state.save = self.seat.die  # type: ignore[assignment,method-assign]
        if self.unreachable and self.seat.rank == 1:
            self.manager._checkpoint_transport.recv_checkpoint = self._fail_to_take
        self.manager.load_state_dict({"step": self.first, "batches_committed": self.first})
        self._exchange = self.replicas.group._all_gather
        self._exchanges = 0
        self.replicas.group._all_gather = self._count  # type: ignore[method-assign]
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
            with contextlib.suppress(*_ERRORS, sw.PeerAborted), self.replicas.step():
                loss = self._step()
            if self.replicas.is_committed:
                self._log_step(float(loss) if self.tokens else None)
                self._save()
            else:
                self.seat.log("repeats", step=step, then=self.manager.current_step())
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
            loss = sw.backward(self.model, [rows], lambda x: loss_of(self.model(x), x), len)
        else:
            arguments = [self.seat.number % 3] if self.kind == "branches" else []
            for part in batch.chunk(self.micro_batches):
                loss = loss_of(self.model(part, *arguments), part) / batch.numel()
                self._reach("backward")
                loss.backward()  # type: ignore[no-untyped-call]
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
            raise _ERRORS[place == "clip"]

    def _count(self, own: Tensor) -> list[Tensor] | None:
        self._exchanges += 1
        return self._exchange(own)

    def _fail_to_take(self, **_: Any) -> None:
        raise ConnectionError("no route to host")

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
            sums=sums_of(self.model),
            num_replicas=self.replicas.num_replicas,
            members=self.replicas.group.num_replicas,
            quorum=self.manager._quorum_id,
            exchanges=self._exchanges,
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

    Sums of each parameter after each step are compared, and its elements at the end and in
    ``checkpoints``.
    """
    counted = numbers_by_step(job, numbers, "counts")  # replicas whose samples count
    begun = numbers_by_step(job, numbers, "begins")
    sizes: dict[int, int] = {}  # how many replicas counted, by step
    sums: dict[tuple[int, int], list[Any]] = defaultdict(list)  # of ranks, by step and replica
    for number, rank in itertools.product(numbers, range(job.num_ranks)):
        lines = {line["step"]: line for line in job.lines(number, rank, "step")}
        for step, line in lines.items():
            sums[step, number].append(line["sums"])
            sizes[step] = line["num_replicas"]
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
        for number in numbers:
            assert_same_sums(expected, sums[step, number], job.num_ranks)
        for found, (name, parameter) in itertools.product(
            due.pop(step, []), expected.named_parameters()
        ):
            torch.testing.assert_close(found[name], parameter.data, rtol=1e-10, atol=1e-10)
    assert not due


def numbers_by_step(job: Job, numbers: range, event: str) -> dict[int, set[int]]:
    """The replicas, any rank of which has logged ``event``, by step."""
    found: dict[int, set[int]] = defaultdict(set)
    for number, rank in itertools.product(numbers, range(job.num_ranks)):
        for line in job.lines(number, rank, event):
            found[line["step"]].add(number)
    return found


def assert_same_sums(
    expected: nn.Module, ranks: list[list[tuple[int, float]]], num_ranks: int
) -> None:
    """The parameters of ``expected`` have the sums of those that ``ranks`` store."""
    if len(ranks) < num_ranks:  # the replica has died before all of them had logged the step
        return
    for (name, parameter), found in zip(
        expected.named_parameters(), zip(*ranks, strict=True), strict=True
    ):
        copies = sum(size for size, _ in found) / parameter.numel()
        total = torch.tensor(sum(value for _, value in found) / copies, dtype=torch.float64)
        torch.testing.assert_close(
            total, parameter.detach().sum(), rtol=1e-10, atol=1e-10, msg=name
        )


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
    micro_batches: int = 1,
) -> Iterator[tuple[int, nn.Module]]:
    """Each step, and the model after it."""
    torch.manual_seed(seed)
    model = MODELS[kind]().double()
    freeze(model, kind)
    optimizer, scheduler = adamw(model)
    for step in sorted(counted):
        places = list(itertools.product(sorted(counted[step]), range(num_ranks)))
        num_tokens = sum(len(some_of(torch.empty(3), *place)) for place in places)
        for number, rank in places:
            batch = batch_of(number, rank, step)
            if tokens:
                rows = some_of(batch, number, rank)
                loss = loss_of(model(rows), rows) / num_tokens
            else:
                arguments = [number % 3] if kind == "branches" else []
                parts = batch.chunk(micro_batches)
                losses = [loss_of(model(part, *arguments), part) for part in parts]
                loss = torch.stack(losses).sum() / (batch.numel() * len(places))
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield step, model
