"""C13, `sw.join`: ranks with unequal numbers of batches compute what one process computes."""

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    ExponentialLR,
    ReduceLROnPlateau,
)
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.covering import covered_first, pairwise
from tests.models import CASES, LIKE_OTHERS, WIDTH, Block, Case, build
from tests.ranks import on_ranks
from tests.runtime.one_process import (
    adamw,
    assert_close,
    assert_equal_models,
    comm_of,
    full,
    options_of,
    rank,
    runtime_of,
    world_size,
)

Batches = list[list[list[Tensor]]]  # of every rank: its steps, and their micro-batches


def draw(case: Case, seed: object, steps: int, micro: int) -> Batches:
    """Batches of random size: 0 to ``steps`` steps per rank, of 1 to ``micro`` micro-batches."""
    numbers = random.Random(repr(seed))
    torch.manual_seed(numbers.randrange(1 << 30))
    return [
        [
            [case.batch(numbers.randint(1, 4)) for _ in range(numbers.randint(1, micro))]
            for _ in range(numbers.randint(0, steps))
        ]
        for _ in range(world_size())
    ]


def of_sizes(*sizes: list[int]) -> Batches:
    """Batches of `Stack` for each rank: the number of micro-batches in each of its steps."""
    torch.manual_seed(sum(map(len, sizes)))
    case = CASES["stack"]
    return [[[case.batch(2) for _ in range(micro)] for micro in steps] for steps in sizes]


class Alone:
    """Trains in one process with the batches of all ranks."""

    def __init__(self, name: str = "stack", clip: float | None = None) -> None:
        self.case, self.model, self.clip = CASES[name], build(name), clip
        self.prepare()

    def prepare(self) -> None:
        self.optimizer = adamw(self.model.parameters())
        self.scheduler = ExponentialLR(self.optimizer, 0.9)

    def train(self, batches: Batches) -> None:
        for number in range(max(map(len, batches))):
            computing = [steps[number] for steps in batches if number < len(steps)]
            for batch in (one for micro in computing for one in micro):
                loss = self.case.loss(self.model(batch.clone())) / len(computing)
                loss.backward()  # type: ignore[no-untyped-call]
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()


class Joined(Alone):
    """Trains with the batches of this rank."""

    model: sw.FSDPModule

    def __init__(self, name: str = "stack", clip: float | None = None, **options: Any) -> None:
        self.case, self.clip = CASES[name], clip
        model = sw.fully_shard(build(name), **{"units": self.case.units, **options})
        self.model = model
        self.prepare()

    def train(self, batches: Batches) -> None:
        with sw.join(self.model, self.optimizer, self.scheduler):
            for micro in batches[rank()]:
                self.accumulate(micro)
                if self.clip is not None:
                    sw.clip_grad_norm_(self.model.parameters(), self.clip)
                self.update()

    def run(self, batches: Iterable[list[Tensor]], *stepped: Any) -> None:
        with sw.join(self.model, *stepped):
            for micro in batches:
                self.accumulate(micro)
                self.update()

    def accumulate(self, micro: list[Tensor]) -> None:
        for number, batch in enumerate(micro, start=1):
            self.model.set_requires_gradient_sync(number == len(micro))
            loss = self.case.loss(self.model(batch))
            loss.backward()  # type: ignore[no-untyped-call]


def assert_equal(joined: Joined, alone: Alone) -> None:
    assert_equal_models(joined.model, alone.model, 0)
    assert joined.scheduler.state_dict() == alone.scheduler.state_dict()


def compare(joined: Joined, alone: Alone, batches: Batches) -> None:
    """Train both with the batches of all ranks."""
    alone.train(batches)
    joined.train(batches)
    joined.optimizer.zero_grad()
    assert_equal(joined, alone)


STRATEGIES = ("fsdp", "zero1", "zero2", "ddp", "hsdp", "hfsdp")
ROWS = [
    row
    for row in pairwise(STRATEGIES, (0, 1, 2), ((5, 1), (3, 3)), (None, 0.1), (2, 3, 4))
    if row[-1] == 4 or row[0] not in ("hsdp", "hfsdp")
]


@on_ranks()
@pytest.mark.parametrize(
    ("strategy", "prefetch", "steps", "clip", "world_size"), covered_first(ROWS, strength=1)
)
def test_unequal_numbers_of_batches(
    strategy: str, prefetch: int, steps: tuple[int, int], clip: float | None
) -> None:
    seed = (strategy, prefetch, world_size())
    alone, joined = Alone(clip=clip), Joined(clip=clip, prefetch=prefetch, **options_of(strategy))
    for number in range(2):
        batches = draw(alone.case, (seed, number), *steps)
        compare(joined, alone, batches)


@on_ranks(2, thorough=(3, 4))
@pytest.mark.parametrize(
    ("seed", "name"),
    covered_first([(seed, name) for name in CASES for seed in range(3)], leave=LIKE_OTHERS),
)
def test_every_model(seed: int, name: str) -> None:
    numbers = random.Random(f"{seed} {name} {world_size()}")
    strategy, prefetch = numbers.choice(STRATEGIES[:4]), numbers.choice((0, 1, 2))
    alone, joined = Alone(name), Joined(name, prefetch=prefetch, strategy=strategy)
    batches = draw(alone.case, (seed, name), *numbers.choice([(5, 1), (3, 3)]))
    for _ in range(2):
        compare(joined, alone, batches)


@on_ranks(2)
def test_a_rank_leaves_in_the_middle_of_a_step() -> None:
    alone, joined = Alone(), Joined()
    [[first], [second]] = batches = of_sizes([5], [7])
    alone.train([[first[:3]], [second[:3]]])
    alone.train([[first[3:]], [second[3:6]]])  # the rest of the first rank counts
    with sw.join(joined.model, joined.optimizer, joined.scheduler):
        for number, batch in enumerate(batches[rank()][0], start=1):
            joined.model.set_requires_gradient_sync(number % 3 == 0)
            joined.case.loss(joined.model(batch)).backward()  # type: ignore[no-untyped-call]
            if number % 3 == 0:
                joined.update()
    joined.optimizer.zero_grad()
    assert_equal(joined, alone)


class InRows(Joined):
    """Reduces gradients over the rows of a mesh until the last micro-batch."""

    def accumulate(self, micro: list[Tensor]) -> None:
        for number, batch in enumerate(micro, start=1):
            self.model.set_requires_all_reduce(number == len(micro))
            self.case.loss(self.model(batch)).backward()  # type: ignore[no-untyped-call]


class BeforeBackwards(Joined):
    """Runs all forwards before the backwards, which follow one by one, or in one."""

    is_reversed = False
    is_one = False

    def accumulate(self, micro: list[Tensor]) -> None:
        losses = [self.case.loss(self.model(batch)) for batch in micro]
        if self.is_one:
            losses = [torch.stack(losses).sum()]
        for loss in reversed(losses) if self.is_reversed else losses:
            loss.backward()  # type: ignore[no-untyped-call]


class Reversed(BeforeBackwards):
    is_reversed = True


class InOneBackward(BeforeBackwards):
    is_one = True


class SetToZero(Joined):
    """Keeps the tensors of gradients, and sets them to zero between forward and backward."""

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def accumulate(self, micro: list[Tensor]) -> None:
        for batch in micro:
            loss = self.case.loss(self.model(batch))
            self.optimizer.zero_grad(set_to_none=False)
            loss.backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_gradients_that_are_set_to_zero_unnoticed() -> None:
    joined = SetToZero(granularity="dim")  # with a fused optimizer
    error = sw.StepError if rank() == 1 else sw.PeerAborted
    with pytest.raises(error, match="set_to_none=True" if rank() == 1 else "rank 1 gave up"):
        joined.train(of_sizes([1], [1] * 4))


class EverySecondBackward(Alone):
    """One of two optimizers steps every second time, and its gradients are kept until then."""

    def prepare(self) -> None:
        super().prepare()
        parameters = list(self.model.parameters())
        self.optimizer = adamw(iter(parameters[:2]))
        self.other = adamw(iter(parameters[2:]))
        self.scheduler = ExponentialLR(self.optimizer, 0.9)
        self.count = 0

    def update(self) -> None:
        super().update()
        self.count += 1
        if self.count % 2 == 0:
            self.other.step()
            self.other.zero_grad()


class JoinedEverySecondBackward(EverySecondBackward, Joined):
    def train(self, batches: Batches) -> None:
        self.run(batches[rank()], self.optimizer, self.other, self.scheduler)


class InBackward(Joined):
    """Steps units in backward."""

    def prepare(self) -> None:
        super().prepare()
        sw.optimizer_in_backward(self.model, self.optimizer)

    def update(self) -> None:
        self.scheduler.step()


class BuiltBefore(Joined):
    """Builds the optimizer before it shards the model."""

    def __init__(self, name: str) -> None:
        self.case, self.clip = CASES[name], None
        model: Any = build(name)
        self.model = model
        self.prepare()
        sw.fully_shard(model, units=self.case.units)


class Recomputed(Joined):
    """Computes the whole model again in backward."""

    is_reentrant = False

    def accumulate(self, micro: list[Tensor]) -> None:
        for batch in micro:
            output = checkpoint(self.model, batch.requires_grad_(), use_reentrant=self.is_reentrant)
            self.case.loss(output).backward()  # type: ignore[no-untyped-call]


# What is left to the other loops: models that `test_every_model` has, or another model.
MORE_LOOPS = (
    "one rank has batches, unused and reused",
    "one rank has batches, stack",
    "BeforeBackwards, stack",
    "Reversed, stack",
    "InOneBackward, checkpointed",
)
LOOPS: dict[str, tuple[type[Joined], str, list[list[int]], dict[str, Any]]] = {
    "no rank has batches": (Joined, "stack", [[], []], {}),
    **{
        f"one rank has batches, {name}": (Joined, name, [[], [1] * 3, []], {"clip": 0.1})
        for name in ("checkpointed inside", "unused and reused", "stack")
    },
    **{
        f"{unused} for unused": (Joined, "stack", [[1], [1] * 3], {"unused": unused})
        for unused in ("none", "zeros", "error")
    },
    "dim": (Joined, "unused and reused", [[2, 1, 1], [], [3]], {"granularity": "dim"}),
    "offload": (
        Joined,
        "unused and reused",
        [[2, 1, 1], [], [3]],
        {"offload_policy": sw.CPUOffloadPolicy()},
    ),
    **{
        f"in rows, {strategy}": (
            InRows,
            "stack",
            [[3, 1], [], [2], [1, 2, 2]],
            {"strategy": strategy, "sharding_factor": 2},
        )
        for strategy in ("hsdp", "hfsdp")
    },
    **{
        f"{kind.__name__}, {name}": (kind, name, [[2], [2] * 3], {})
        for kind in (BeforeBackwards, Reversed, InOneBackward)
        for name in ("stack", "checkpointed")
    },
    "set to zero": (SetToZero, "unused and reused", [[1, 1], [1] * 5], {}),
    "another optimizer keeps gradients": (
        JoinedEverySecondBackward,
        "stack",
        [[1, 1], [1] * 6],
        {"granularity": "dim"},
    ),
    "steps in backward": (InBackward, "stack", [[1] * 3, [1] * 5], {}),
    "an optimizer from before": (BuiltBefore, "stack", [[1], [1] * 3], {}),
    "a checkpoint of the whole model": (Recomputed, "stack", [[1], [1] * 3], {}),
}


@on_ranks()
@pytest.mark.parametrize(
    ("loop", "world_size"),
    [
        pytest.param(loop, len(sizes), marks=pytest.mark.thorough if loop in MORE_LOOPS else ())
        for loop, (_, _, sizes, _) in LOOPS.items()
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_other_loops(loop: str) -> None:
    kind, name, sizes, options = LOOPS[loop]
    alone = EverySecondBackward if issubclass(kind, EverySecondBackward) else Alone
    compare(kind(name, **options), alone(name, options.get("clip")), of_sizes(*sizes))


@on_ranks(2)
def test_a_reentrant_checkpoint_of_the_whole_model_is_refused() -> None:
    alone, joined = Alone(), Recomputed()
    joined.is_reentrant = True
    with pytest.raises(sw.StepError, match="use_reentrant=False"):  # in the first step
        joined.train(of_sizes([1], [1] * 3))
    joined.is_reentrant = False
    compare(joined, alone, of_sizes([1], [1] * 3))


class CallsItsBase(torch.optim.SGD):
    """torch calls the hooks of its step twice."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)


@on_ranks(2)
@pytest.mark.parametrize("clears", ["all", "own", "own, to zeros"])
def test_several_optimizers(clears: str) -> None:
    """The first one steps every second time, or they take turns and clear their own gradients."""
    alone, joined = Alone(), Joined()

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        first, *rest = model.parameters()
        return [CallsItsBase([first], lr=0.1, momentum=0.9), adamw(iter(rest))]

    def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], number: int) -> None:
        if clears == "all":
            for optimizer in optimizers[number % 2 :]:
                optimizer.step()
            model.zero_grad()
        else:  # the gradients of the other one add up
            optimizers[number % 2].step()
            optimizers[number % 2].zero_grad(set_to_none=clears == "own")

    ours, theirs = optimizers(joined.model), optimizers(alone.model)
    batches = of_sizes([1], [1] * 5)
    for number in range(5):
        computing = [steps[number][0] for steps in batches if number < len(steps)]
        losses = [alone.case.loss(alone.model(batch)) for batch in computing]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        update(alone.model, theirs, number)
    with sw.join(joined.model, *ours):
        for number, micro in enumerate(batches[rank()]):
            joined.accumulate(micro)
            update(joined.model, ours, number)
    assert_equal_models(joined.model, alone.model, 0)


class WithMuon(Joined):
    def prepare(self) -> None:
        groups = sw.optim.parameter_groups(self.model)
        self.optimizer = sw.optim.Muon(groups, lr=0.02)
        self.scheduler = ExponentialLR(self.optimizer, 0.9)


@on_ranks(3)
def test_an_optimizer_with_collectives() -> None:
    """Muon on ranks with unequal batches equals Muon on one rank of each step's batches."""
    joined, equal = WithMuon(), WithMuon()
    batches = of_sizes([1, 1], [1] * 4, [1])
    joined.train(batches)
    with sw.join(equal.model, equal.optimizer, equal.scheduler):
        for number in range(4):  # the mean gradient of a step, on every rank
            computing = [steps[number][0] for steps in batches if number < len(steps)]
            losses = [equal.case.loss(equal.model(batch)) for batch in computing]
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
            equal.update()
    for own, other in zip(joined.model.parameters(), equal.model.parameters(), strict=True):
        assert_close(own.detach(), full(other.detach()), "Muon")


@on_ranks(3)
@pytest.mark.parametrize("accumulate", ["shards", "whole"])
def test_the_mean_over_all_tokens(accumulate: Any) -> None:
    alone, joined = Alone(), Joined()
    batches = draw(alone.case, accumulate, 4, 3)
    for number in range(max(map(len, batches))):
        parts = [one for steps in batches for one in (steps[number] if number < len(steps) else [])]
        loss = sum(alone.model(x).square().sum() for x in parts) / sum(map(len, parts))
        loss.backward()
        alone.update()
    losses = []
    with sw.join(joined.model, joined.optimizer, joined.scheduler):
        for micro in batches[rank()]:
            losses.append(
                sw.backward(
                    joined.model,
                    micro,
                    lambda x: joined.model(x).square().sum(),
                    len,
                    accumulate=accumulate,
                )
            )
            joined.update()
    assert_equal(joined, alone)


# -- collectives -----------------------------------------------------------------------------------


def num_collectives(model: nn.Module) -> int:
    comm = comm_of(model)
    return sum(queue.sent[0] for queue in (comm.gather, comm.reduce))


@on_ranks(2)
def test_one_exchange_per_step_and_none_outside() -> None:
    joined = Joined(clip=0.1)

    def steps(number: int) -> int:
        before = num_collectives(joined.model)
        for micro in of_sizes([1] * number, [1] * number)[rank()]:
            joined.accumulate(micro)
            sw.clip_grad_norm_(joined.model.parameters(), 0.1)
            joined.update()
        return num_collectives(joined.model) - before

    steps(2)
    without = steps(5)
    with sw.join(joined.model, joined.optimizer, joined.scheduler):
        inside = steps(5)
    assert inside == without + 5
    assert steps(5) == without


@on_ranks(2)
@pytest.mark.parametrize("clips", [False, True])
def test_exchanges_while_a_rank_has_run_out(clips: bool) -> None:
    """One for each forward, backward, clipping and step, and no others."""
    joined = Joined(clip=0.1 if clips else None)
    counts = []
    with sw.join(joined.model, joined.optimizer, joined.scheduler):
        for micro in of_sizes([1] * 9, [1] * 4)[rank()]:
            joined.accumulate(micro)
            if clips:
                sw.clip_grad_norm_(joined.model.parameters(), 0.1)
            joined.update()
            counts.append(num_collectives(joined.model))
    if rank() == 0:
        steps = [after - before for before, after in itertools.pairwise(counts)]
        assert len(set(steps[:3])) == 1  # one exchange each
        assert steps[4:] == [steps[0] + (3 if clips else 2)] * 4


@on_ranks(2)
def test_exchanges_of_an_evaluation() -> None:
    model, counts = Joined().model, []
    with sw.join(model, training=False), torch.no_grad():
        for _ in range(8 if rank() == 0 else 3):
            model(torch.ones(2, WIDTH, dtype=torch.float64))
            counts.append(num_collectives(model))
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert steps[4:] == steps[:1] * len(steps[4:])  # one, as while all ranks compute


# -- evaluation ------------------------------------------------------------------------------------


@on_ranks()
@pytest.mark.parametrize(
    ("mode", "prefetch", "world_size"),
    covered_first(itertools.product((torch.no_grad, torch.inference_mode), (0, 2), (2, 3))),
)
def test_evaluation(mode: Any, prefetch: int) -> None:
    model = sw.fully_shard(build("stack"), units=Block, prefetch=prefetch)
    alone = build("stack")
    torch.manual_seed(rank())
    for _ in range(2):
        with mode(), sw.join(model, training=False):
            for _ in range((2 * rank() + 1) % 5):
                batch = torch.randn(3, WIDTH, dtype=torch.float64)
                assert_close(model(batch), alone(batch), "output")


# -- errors ----------------------------------------------------------------------------------------


@on_ranks(2)
@pytest.mark.parametrize("raising", [0, 1])  # alone with batches at the end, or the first to raise
def test_a_rank_that_raises(raising: int) -> None:
    joined = Joined()
    batches = of_sizes([1] * 4, [1] * 2)

    def data() -> Iterator[list[Tensor]]:
        yield from batches[rank()][: 3 if raising == 0 else 1]
        if rank() == raising:
            raise ValueError("no more data")
        yield from batches[rank()]

    mine = data() if rank() == raising or raising == 1 else batches[rank()]
    with pytest.raises(ValueError if rank() == raising else sw.PeerAborted, match="no more data"):
        joined.run(mine, joined.optimizer, joined.scheduler)
    alone, again = Alone(), Joined()
    alone.train(batches)
    again.train(batches)
    assert_equal(again, alone)
    joined.optimizer.zero_grad()
    joined.train(batches)  # the model is usable


class InShards(Joined):
    """Reduces the gradients of every micro-batch."""

    def accumulate(self, micro: list[Tensor]) -> None:
        for batch in micro:
            self.case.loss(self.model(batch)).backward()  # type: ignore[no-untyped-call]


class Raising(Joined):
    """Raises in the third forward, or in its backward."""

    num_forwards = 0
    is_in_backward = False

    def accumulate(self, micro: list[Tensor]) -> None:
        for batch in micro:
            self.num_forwards += 1
            if self.num_forwards == 3 and not self.is_in_backward:
                layer = self.model.get_submodule("layers.1")
                once = layer.register_forward_pre_hook(self.trip)
                try:
                    self.model(batch)
                finally:
                    once.remove()
            output = self.model(batch)
            if self.num_forwards == 3:
                output.register_hook(self.trip)
            self.case.loss(output).backward()  # type: ignore[no-untyped-call]

    @staticmethod
    def trip(*_: Any) -> None:
        raise ValueError("it hurts")


@on_ranks(3)
@pytest.mark.parametrize(
    ("strategy", "is_in_backward"),
    covered_first(itertools.product(("fsdp", "ddp"), (False, True))),
)
def test_a_rank_that_raises_beside_shadows(strategy: str, is_in_backward: bool) -> None:
    joined = Raising(strategy=strategy)
    joined.is_in_backward = is_in_backward
    batches = of_sizes([], [1] * 4, [1])
    with pytest.raises(ValueError if rank() == 1 else sw.PeerAborted, match="it hurts"):
        joined.run(batches[rank()], joined.optimizer, joined.scheduler)
    assert all(parameter.grad is None for parameter in joined.model.parameters())
    joined.num_forwards = 3  # raises no more
    joined.run(batches[2 - rank()], joined.optimizer, joined.scheduler)


@on_ranks(4)
def test_errors_group_ranks() -> None:
    joined = InShards()
    batches = of_sizes([2, 2], [2, 2], [3, 3], [2, 2])[rank()]
    what = r"ranks 0-1, 3: runs a forward of .* after 1 steps; rank 2: runs .* after 0 steps\."
    with pytest.raises(sw.StepError, match=what):
        joined.run(batches, joined.optimizer, joined.scheduler)


@on_ranks(2)
@pytest.mark.parametrize("is_in_step", [False, True])
def test_a_rank_without_batches_that_raises(is_in_step: bool) -> None:
    joined = Joined()
    if rank() == 1 and is_in_step:
        joined.optimizer.register_step_pre_hook(Raising.trip)
    elif rank() == 1:
        parameter = next(joined.model.parameters())
        parameter.register_post_accumulate_grad_hook(Raising.trip)  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError if rank() == 1 else sw.PeerAborted, match="it hurts"):
        joined.run(of_sizes([1] * 3, [])[rank()], joined.optimizer, joined.scheduler)


@on_ranks(2)
def test_an_optimizer_that_join_does_not_know() -> None:
    with pytest.raises(sw.StepError, match=r"AdamW steps inside sw\.join"):
        Joined().run(of_sizes([1], [1])[rank()])


@on_ranks(2)
def test_a_schedule_that_join_does_not_know() -> None:
    alone, joined = Alone(), Joined()
    batches = of_sizes([1], [1] * 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        joined.run(batches[rank()], joined.optimizer)
    texts = [str(one.message) for one in caught if "inside sw.join" in str(one.message)]
    assert len(texts) == (rank() == 0)
    assert all("if a scheduler does that, pass it" in text for text in texts)
    alone.train(batches)
    assert_equal_models(joined.model, alone.model, 0)  # the rates are those of the other rank


@on_ranks(2)
def test_chained_schedulers() -> None:
    alone, joined = Alone(), Joined()
    members = {}
    for one in (alone, joined):
        members[one] = [ExponentialLR(one.optimizer, 0.5), ConstantLR(one.optimizer, 0.3, 2)]
        one.scheduler = ChainedScheduler(members[one])  # type: ignore[assignment]
    batches = of_sizes([1], [1] * 4)
    alone.train(batches)
    with (
        pytest.raises(sw.PlanError, match="the schedulers in the"),
        sw.join(joined.model, joined.optimizer, joined.scheduler),
    ):
        pass
    joined.run(batches[rank()], joined.optimizer, *members[joined])
    assert_equal_models(joined.model, alone.model, 0)
    rates = [one.optimizer.param_groups[0]["lr"] for one in (joined, alone)]
    assert rates[0] == rates[1]
    assert [one.last_epoch for one in members[joined]] == [4, 4]


class ClippedByTorch(Joined):
    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        super().update()


class Scaled(Joined):
    def update(self) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(self.optimizer)
        super().update()


@on_ranks(2)
@pytest.mark.parametrize("kind", [ClippedByTorch, Scaled])
@pytest.mark.parametrize("steps", [1, 3])  # of rank 0, and one without batches at first
def test_an_operation_that_join_does_not_know(kind: type[Joined], steps: int) -> None:
    joined = kind()
    error = sw.StepError if rank() == 1 or steps > 1 else sw.PeerAborted
    before = full(next(joined.model.parameters()).detach())
    with pytest.raises(error, match=r"clip with sw\.clip_grad_norm_"):
        joined.run(of_sizes([1] * (steps - 1), [1] * 3)[rank()], joined.optimizer, joined.scheduler)
    sw.clip_grad_norm_(joined.model.parameters(), 1.0)  # not refused any more
    assert torch.equal(full(next(joined.model.parameters()).detach()), before)  # in the first step


@on_ranks(2)
@pytest.mark.parametrize(
    "name", ["save", "load", "full_tensors", "publish", "sleep", "full_tensor", "norm"]
)
def test_other_operations_of_all_ranks(name: str, tmp_path: Path) -> None:
    joined = Joined()
    model = joined.model
    weight = model.get_submodule("layers.0").get_parameter("up.weight")
    operations: dict[str, Callable[[], object]] = {
        "save": lambda: sw.save(tmp_path / "saved", model=model),
        "load": lambda: sw.load(tmp_path / "saved", model=model),
        "full_tensors": lambda: list(sw.full_tensors(model)),
        "publish": lambda: sw.publish(model, tmp_path / "published"),
        "sleep": lambda: sw.sleep(model),
        "full_tensor": lambda: full(weight.detach()),
        "norm": lambda: float(weight.norm()),
    }

    def run() -> None:
        with sw.join(model):
            if rank() == 0:  # the other rank has no batches
                joined.accumulate(of_sizes([1])[0][0])
                operations[name]()

    error = sw.StepError if rank() == 0 else sw.PeerAborted
    with pytest.raises(error, match=r"inside sw\.join.* after the block"):
        run()


class RaisingIfNotFinite(Joined):
    """Goes on after a step with gradients that are not finite."""

    def update(self) -> None:
        with contextlib.suppress(sw.StepError):
            sw.clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()


@on_ranks(2)
def test_gradients_that_are_not_finite() -> None:
    alone, joined = Alone(clip=1.0), RaisingIfNotFinite()
    batches = of_sizes([], [1] * 3)
    alone.train([[batches[1][0]]])
    alone.train([[batches[1][2]]])
    batches[1][1][0][:] = torch.inf
    joined.run(batches[rank()], joined.optimizer, joined.scheduler)
    assert_equal(joined, alone)


def _clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def _drop_first(model: nn.Module) -> None:
    next(model.parameters()).grad = None


def _scale_last(model: nn.Module) -> None:
    gradient = list(model.parameters())[-1].grad
    assert gradient is not None
    gradient.mul_(0.5)


def _replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None if parameter.grad is None else parameter.grad * 2


class Editing(Joined):
    """Changes gradients, before it clips."""

    edit: Callable[[nn.Module], None]
    clips = False

    def update(self) -> None:
        if runtime_of(self.model).scheduler.call_observer.all_compute:  # type: ignore[union-attr]
            return super().update()
        self.edit(self.model)
        if self.clips:
            sw.clip_grad_norm_(self.model.parameters(), 1.0)
        return super().update()


@on_ranks(2)
@pytest.mark.parametrize(
    ("edit", "clips"),
    covered_first(
        itertools.product((_clip_values, _drop_first, _scale_last, _replace), (False, True))
    ),
)
def test_gradients_that_the_loop_changes(edit: Callable[[nn.Module], None], clips: bool) -> None:
    joined = Editing()
    joined.edit, joined.clips = staticmethod(edit), clips
    error = sw.StepError if rank() == 1 else sw.PeerAborted
    with pytest.raises(error, match=r"the gradient of \S+ was changed between backward and"):
        joined.run(of_sizes([1], [1] * 3)[rank()], joined.optimizer, joined.scheduler)


class Skipping(Joined):
    """Drops the gradients of every second step."""

    num_steps = 0

    def update(self) -> None:
        self.num_steps += 1
        if self.num_steps % 2:
            super().update()
        else:
            self.optimizer.zero_grad()


@on_ranks(2)
def test_steps_that_are_skipped() -> None:
    alone, joined = Alone(), Skipping()
    batches = of_sizes([], [1] * 5)
    for number in (0, 2, 4):
        alone.train([[batches[1][number]]])
    joined.run(batches[rank()], joined.optimizer, joined.scheduler)
    assert_equal(joined, alone)


class Hooked(Joined):
    """Halves gradients in hooks."""

    def prepare(self) -> None:
        super().prepare()
        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)  # type: ignore[no-untyped-call]

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


@on_ranks(2)
def test_gradients_that_hooks_change() -> None:
    alone, joined = Alone(), Hooked()
    for parameter in alone.model.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)
    batches = of_sizes([1], [1] * 3)
    compare(joined, alone, batches)


class Alternating(nn.Module):
    """Leaves out a layer in every second forward; the first one comes with or without it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block().double() for _ in range(3))
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        for number, layer in enumerate(self.layers):
            if number != 1 or self.number % 2:
                x = layer(x)
        return x


@on_ranks(2)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("steps", [0, 1])  # of the rank without batches
def test_a_path_that_alternates(number: int, steps: int) -> None:
    model = sw.fully_shard(Alternating(number), units=Block)
    optimizer = adamw(model.parameters())

    def run() -> None:
        with sw.join(model, optimizer):
            for _ in range(4 if rank() == 1 else steps):
                batch = torch.ones(2, WIDTH, dtype=torch.float64)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    error = sw.StepError if rank() == 1 else sw.PeerAborted
    with pytest.raises(error, match="in another order than the last one did"):
        run()


@on_ranks(2)
def test_a_path_that_changed_before_a_rank_ran_out() -> None:
    """The last recording counts."""
    model = sw.fully_shard(Alternating(0), units=Block)
    optimizer = adamw(model.parameters())
    with sw.join(model, optimizer):
        for number in range(4 if rank() == 1 else 2):
            model.number = min(number, 1)
            batch = torch.ones(2, WIDTH, dtype=torch.float64)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class WithTeacher(Joined):
    """Runs a forward without gradients before each micro-batch."""

    def accumulate(self, micro: list[Tensor]) -> None:
        for number, batch in enumerate(micro, start=1):
            with torch.no_grad():
                self.model(batch)
            self.model.set_requires_gradient_sync(number == len(micro))
            self.case.loss(self.model(batch)).backward()  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_errors_say_which_forward() -> None:
    joined = WithTeacher()
    what = (
        r"rank 0: runs a forward of \S+ without gradients after 0 steps; "
        r"rank 1: .* with gradients"
    )
    with pytest.raises(sw.StepError, match=what):
        joined.run(of_sizes([2], [1])[rank()], joined.optimizer, joined.scheduler)


class WithoutBackward(Joined):
    """Runs a forward without backward, after which only the last rank has batches."""

    def accumulate(self, micro: list[Tensor]) -> None:
        loss = self.case.loss(self.model(micro[0]))
        loss.backward()  # type: ignore[no-untyped-call]

    def run(self, batches: Iterable[list[Tensor]], *stepped: Any) -> None:
        with sw.join(self.model, *stepped):
            for micro in batches:
                self.accumulate(micro)
                self.update()
            self.model(torch.zeros(1, WIDTH, dtype=torch.float64))
            if rank() == 1:
                for steps in of_sizes([1], [1]):
                    self.accumulate(steps[0])
                    self.update()


@on_ranks(2)
def test_a_forward_without_backward_does_not_count() -> None:
    alone, joined = Alone(), WithoutBackward()
    batches = of_sizes([1], [1])
    alone.train(batches)
    for steps in batches:
        alone.train([steps])
    joined.run(batches[rank()], joined.optimizer, joined.scheduler)
    assert_equal(joined, alone)


@on_ranks(2)
def test_gradients_from_before_the_block_count() -> None:
    alone, joined = Alone(), Joined()
    (first,), (second,) = of_sizes([2], [3])
    mine = (first, second)[rank()]
    joined.model.set_requires_gradient_sync(False)
    joined.case.loss(joined.model(mine[0])).backward()  # type: ignore[no-untyped-call]
    with sw.join(joined.model, joined.optimizer, joined.scheduler):
        for number, batch in enumerate(mine[1:], start=2):
            if rank() == 0:
                break  # counts, and computes no more
            joined.model.set_requires_gradient_sync(number == len(mine))
            joined.case.loss(joined.model(batch)).backward()  # type: ignore[no-untyped-call]
        else:
            joined.update()
    alone.train([[first[:1]], [second]])
    assert_equal(joined, alone)


@on_ranks(2)
def test_a_second_model_in_a_block_of_its_own() -> None:
    first, second = Joined(), Joined()
    with sw.join(first.model), pytest.raises(sw.StepError, match="one model at a time"):
        second.run([])
    second.run([])


@on_ranks(2)
def test_gathered_inside_the_block() -> None:
    model = Joined().model
    with sw.join(model), pytest.raises(sw.StepError, match="gathered"), sw.gathered(model):
        pass


@on_ranks(2)
def test_learning_rates_that_the_loop_sets() -> None:
    alone, joined = Alone(), Joined()
    batches = of_sizes([1], [1] * 3)
    for number in range(3):
        alone.optimizer.param_groups[0]["lr"] = 0.01 * number
        alone.train([steps[number : number + 1] for steps in batches])
    joined.optimizer = adamw(joined.model.parameters())  # without a schedule
    with sw.join(joined.model, joined.optimizer):
        for number, micro in enumerate(batches[rank()]):
            joined.optimizer.param_groups[0]["lr"] = 0.01 * number
            joined.accumulate(micro)
            joined.optimizer.step()
            joined.optimizer.zero_grad()
    assert_equal_models(joined.model, alone.model, 0)


@on_ranks(1)
def test_what_is_refused() -> None:
    joined = Joined()
    model, optimizer = joined.model, joined.optimizer
    with (
        pytest.raises(sw.PlanError, match="steps nothing"),
        sw.join(model, optimizer, training=False),
    ):
        pass
    other = adamw(iter([*model.parameters(), nn.Parameter(torch.zeros(5))]))
    with pytest.raises(sw.PlanError, match=r"shape \(5,\), which .*manage"), sw.join(model, other):
        pass
    ignoring: Any = build("stack")
    sw.fully_shard(ignoring, units=Block, ignored_params={ignoring.norm.weight})
    other = adamw(ignoring.parameters())
    with pytest.raises(sw.PlanError, match=r"norm\.weight.*ignored"), sw.join(ignoring, other):
        pass
    plateau = ReduceLROnPlateau(optimizer)
    with pytest.raises(sw.PlanError, match="ReduceLROnPlateau"), sw.join(model, optimizer, plateau):
        pass
    with sw.join(model), pytest.raises(sw.StepError, match="in another"), sw.join(model):
        pass
    with (
        sw.join(model, optimizer),
        pytest.raises(sw.StepError, match="inside sw"),
        sw.transaction(model, optimizer),
    ):
        pass
    with (
        pytest.raises(sw.StepError, match="a backward inside"),
        sw.join(model, training=False),
    ):
        joined.accumulate(of_sizes([1])[0][0])
    with pytest.raises(sw.PlanError, match="converted"), sw.join(model):
        model.float()


@on_ranks(2)
@pytest.mark.parametrize("steps", [2, 3])
def test_buffers_that_each_forward_changes(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    sw.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        with sw.join(model, optimizer):
            for _ in range(2 if rank() == 0 else steps):
                model(torch.ones(2, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    if steps == 2:
        run()
        return
    error = sw.StepError if rank() == 0 else sw.PeerAborted
    with pytest.raises(error, match=r"buffers of 0 .* give all ranks as many"):
        run()


@on_ranks(2)
def test_a_join_inside_a_transaction() -> None:
    alone, joined = Alone(), Joined()
    batches = of_sizes([1], [1] * 3)
    with sw.transaction(joined.model, joined.optimizer):
        joined.train(batches)
    alone.train(batches)
    assert_equal(joined, alone)


# -- torch's own -----------------------------------------------------------------------------------


@on_ranks(3, thorough=(2,))
def test_numbers_of_torch_join() -> None:
    """DistributedDataParallel in torch's `Join`, dividing by the ranks that compute."""
    theirs = DistributedDataParallel(build("stack"))
    ours = sw.fully_shard(build("stack"), units=Block)
    make = partial(torch.optim.SGD, lr=0.1)
    batches = of_sizes(*([1] * (1 + 2 * n) for n in range(world_size())))[rank()]
    theirs_optimizer, ours_optimizer = make(theirs.parameters()), make(ours.parameters())
    with theirs.join(divide_by_initial_world_size=False):
        for [batch] in batches:
            theirs(batch).square().mean().backward()
            theirs_optimizer.step()
            theirs_optimizer.zero_grad()
    with sw.join(ours, ours_optimizer):
        for [batch] in batches:
            ours(batch).square().mean().backward()
            ours_optimizer.step()
            ours_optimizer.zero_grad()
    for own, other in zip(ours.parameters(), theirs.module.parameters(), strict=True):
        assert_close(own.detach(), other.detach(), "parameter")
