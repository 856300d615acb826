"""`shardwise verify`: which models, which strategies, on which ranks."""

import os
from dataclasses import dataclass

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.diagnose.verification import VerificationError
from shardwise.diagnose.verify import resolve_strategies, verify
from shardwise.errors import PlanError, ShardwiseError
from shardwise.launch.errors import ConfigError
from shardwise.launch.local_ranks import as_rank, check_gpus, check_nproc, on_local_ranks
from shardwise.launch.ranks import Place, Ranks, find_place
from shardwise.train.subjects import find_subjects

__all__ = ["Request", "run"]

NPROC = 2


@dataclass(frozen=True, slots=True)
class Request:
    """What to verify, in words that every rank can be told."""

    model: str | None  # None is every built-in one
    strategies: tuple[str, ...] | None  # None is all
    steps: int
    corrupt: str | None  # a parameter

    def check(self) -> None:
        """Refuse what would otherwise be refused on every rank, seconds later.

        Raises:
            ConfigError: there is no such model.
            PlanError: there is no such strategy.
        """
        if self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: expected 1 or more")
        if self.corrupt is not None and self.model is None:
            raise ConfigError(f"--corrupt {self.corrupt}: name the model that it is a parameter of")
        resolve_strategies(self.strategies)
        find_subjects(self.model)


def run(request: Request, nproc: int | None = None) -> None:
    """Verify on the ranks of the launcher, or on ``nproc`` local ones.

    Raises:
        VerificationError: some strategy gives other numbers than one process.
        ConfigError, PlanError: something that was asked for cannot be done.
        RankError: a rank that was started here failed.
    """
    place = find_place(os.environ)
    if place is None:
        launch(request, NPROC if nproc is None else nproc)
    else:
        join(request, place, nproc)


def launch(request: Request, nproc: int) -> None:
    """Start local ranks and wait for them; the first one shows what is found."""
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: expected 1 or more ranks")
    request.check()
    check_gpus(nproc, f"--nproc {nproc}")
    for error in on_local_ranks(nproc, judge, request):
        if error is not None:
            raise error


def join(request: Request, place: Place, nproc: int | None) -> None:
    """Be one of the ranks that a launcher started; the first one tells what is wrong for all."""
    try:
        check_nproc(nproc, place)
        _join(request, place)
    except (ConfigError, PlanError):
        if place.rank == 0:
            raise
        raise SystemExit(2) from None


@record
def _join(request: Request, place: Place) -> None:
    request.check()
    with as_rank(place) as ranks:
        error = judge(ranks, request)
    if error is not None and place.rank == 0:
        raise error  # alone: a launcher stops all ranks when one fails, maybe before this one spoke


def judge(ranks: Ranks, request: Request) -> ShardwiseError | None:
    """Verify, and return what has to be raised: it is the same on every rank, and no traceback."""
    differences = []
    console = Console(quiet=not ranks.is_first, soft_wrap=True, markup=False, highlight=False)
    try:
        for subject in find_subjects(request.model):
            found = verify(
                subject.model_fn,
                subject.batch_fn,
                request.strategies,
                loss_fn=subject.loss_fn,
                units=subject.units,
                steps=request.steps,
                corrupt=request.corrupt,
            )
            console.print()
            if not found.ok:
                differences.append(found.explanation)
    except (ConfigError, PlanError) as error:
        return error
    return VerificationError("\n".join(differences)) if differences else None
