"""Runs a program on the simulated devices of one or several ranks and reports problems."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import permutations, zip_longest

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.streams.install import simulated
from tests.streams.models import build
from tests.streams.programs import Program, digest, train
from tests.streams.simulation import Collective, Found, Problem, Simulation

__all__ = ["Seed", "Verdict", "check", "check_ranks", "differences_in_order"]

Seed = Callable[[Simulation], AbstractContextManager[None]]  # has a bug inside the context


def no_bug(_simulation: Simulation) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class Verdict:
    """The problems of one rank."""

    found: tuple[Found, ...]
    digest: int  # of the final shards
    collectives: tuple[Collective, ...]

    @property
    def problems(self) -> set[Problem]:
        return {one.problem for one in self.found}


def check(
    program: Program,
    rank: int = 0,
    num_ranks: int = 2,
    seed: Seed = no_bug,
) -> Verdict:
    """Run ``program`` as one rank of many, without the others.

    Each collective has the result that it would have if all ranks sent the same.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    simulation = Simulation()
    try:
        with simulated(simulation, exchanges=False), seed(simulation):
            model = train(program, simulation, build(program.name))
            bits = digest(model)
            del model
    finally:
        dist.destroy_process_group()
    return Verdict(tuple(simulation.found), bits, tuple(simulation.collectives))


def check_ranks(
    program: Program,
    num_ranks: int = 2,
    seed: Seed = no_bug,
    of: Sequence[int] = (0, 1),
) -> list[Verdict]:
    """Run `check` for some ranks, one after the other, and compare their collectives."""
    verdicts = {rank: check(program, rank, num_ranks, seed) for rank in of}
    return [_with_order(verdict, rank, verdicts) for rank, verdict in verdicts.items()]


def _with_order(verdict: Verdict, rank: int, verdicts: Mapping[int, Verdict]) -> Verdict:
    launched = {other: theirs.collectives for other, theirs in verdicts.items()}
    differences = differences_in_order(launched, of=rank)
    found = [Found(Problem.ORDER, difference) for difference in differences]
    return replace(verdict, found=(*verdict.found, *found))


def differences_in_order(
    launched: Mapping[int, Sequence[Collective]], of: int | None = None
) -> list[str]:
    """Describe where rank ``of`` and another rank launch different collectives."""
    pairs = ((one, other) for one, other in permutations(launched, 2) if of in (None, one))
    return [text for pair in pairs for text in _difference(*pair, launched)]


def _difference(one: int, other: int, launched: Mapping[int, Sequence[Collective]]) -> list[str]:
    """Describe the first difference, over all groups."""
    sequences = (
        [collective for collective in launched[rank] if {one, other} <= set(collective.ranks)]
        for rank in (one, other)
    )
    for number, (own, wanted) in enumerate(zip_longest(*sequences)):
        if own != wanted:
            return [f"collective {number} of ranks {one} and {other} is {own} and {wanted}"]
    return []
