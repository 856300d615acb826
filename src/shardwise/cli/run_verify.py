"""Runs `shardwise verify` on the ranks of a launcher, or on local ones."""

import os
import re
from dataclasses import dataclass
from math import prod

from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.diagnose.engines import splits_batch
from shardwise.diagnose.models import MODELS, VOCABULARY, Subject, next_token_loss, random_tokens
from shardwise.diagnose.subjects import find_engine, find_subjects
from shardwise.diagnose.verification import VerificationError
from shardwise.diagnose.verify import resolve_strategies, verify
from shardwise.errors import ConfigError, PlanError, ShardwiseError
from shardwise.launch.environment import RankEnv, read_rank_env
from shardwise.launch.local import check_num_ranks, run_on_local_ranks
from shardwise.launch.world import World, join_world
from shardwise.train.model import GPT, Block, Shape

__all__ = ["BUILT_IN", "VerifyOptions", "run_verify"]

NPROC = 2


def _gpt() -> nn.Module:
    return GPT(Shape(vocabulary=VOCABULARY, context=6, width=16, layers=2, heads=2))


BUILT_IN = {"gpt": Subject(_gpt, random_tokens, next_token_loss, Block)} | MODELS


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of the command; they are pickled to local ranks."""

    model: str | None  # None is every built-in model
    strategies: tuple[str, ...] | None  # None is all
    steps: int
    corrupt: str | None  # a parameter
    engine: str | None = None  # None is this one, with each strategy
    mesh: str | None = None  # such as "dp2,tp2", for an engine

    def check(self) -> None:
        """Find errors in the options before any rank is started.

        Raises:
            ConfigError: the model does not exist, or an option is not valid.
            PlanError: a strategy does not exist.
        """
        if self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: expected 1 or more")
        if self.corrupt is not None and self.model is None:
            raise ConfigError(f"--corrupt {self.corrupt}: name the MODEL that has this parameter")
        resolve_strategies(self.strategies)
        find_subjects(self.model, BUILT_IN)
        if self.engine is not None:
            find_engine(self.engine)
        self.dims()

    def dims(self) -> dict[str, int]:
        """The sizes of the mesh's dims by name; empty without one.

        Raises:
            ConfigError: it is malformed, or there is no engine to use it.
        """
        if self.mesh is None:
            return {}
        if self.engine is None:
            raise ConfigError(f"--mesh {self.mesh}: name the --engine that uses it")
        found = [re.fullmatch(r"([a-z_]+)([1-9][0-9]*)", dim) for dim in self.mesh.split(",")]
        sizes = {one[1]: int(one[2]) for one in found if one}
        if len(sizes) != len(found) or not any(map(splits_batch, sizes)):
            raise ConfigError(
                f"--mesh {self.mesh}: expected distinct names, each with a size, one of them "
                "beginning with dp, such as dp2,tp2"
            )
        return sizes


def run_verify(options: VerifyOptions, nproc: int | None = None) -> None:
    """Verify on the ranks of the launcher, or on ``nproc`` local ones (2 by default).

    Raises:
        VerificationError: the numbers of a strategy differ from those of one process.
        ConfigError, PlanError: the options are not valid.
        RankError: a local rank failed.
    """
    env = read_rank_env(os.environ)
    if env is not None:
        _join(options, env, nproc)
        return
    nproc = (prod(options.dims().values()) if options.mesh else NPROC) if nproc is None else nproc
    check_num_ranks(nproc, f"--nproc {nproc}")
    options.check()
    for error in run_on_local_ranks(nproc, _verify, options):
        if error is not None:
            raise error


@record
def _join(options: VerifyOptions, env: RankEnv, nproc: int | None) -> None:
    def check() -> None:
        env.check_nproc(nproc)
        options.check()

    with join_world(env) as world:
        world.check(check)
        error = _verify(world, options)
    # Rank 0 alone raises: a launcher stops all ranks when one fails, maybe before rank 0 printed.
    if error is not None and env.rank == 0:
        raise error


def _verify(world: World, options: VerifyOptions) -> ShardwiseError | None:
    """Verify, and return the error to raise, the same on every rank.

    It is returned because a rank that raises makes the launcher print a traceback.
    """
    differences = []
    console = Console(quiet=not world.is_first, soft_wrap=True, markup=False, highlight=False)
    try:
        engine = None if options.engine is None else find_engine(options.engine)
        mesh = _mesh(options, world)
        for subject in find_subjects(options.model, BUILT_IN):
            found = verify(
                subject.model_fn,
                subject.batch_fn,
                options.strategies,
                loss_fn=subject.loss_fn,
                units=subject.units,
                steps=options.steps,
                corrupt=options.corrupt,
                engine=engine,
                mesh=mesh,
            )
            console.print()
            if not found.ok:
                differences.append(found.explanation)
    except (ConfigError, PlanError) as error:
        return error
    return VerificationError("\n".join(differences)) if differences else None


def _mesh(options: VerifyOptions, world: World) -> DeviceMesh | None:
    """The mesh of ``--mesh``.

    Raises:
        ConfigError: it is of another number of ranks.
    """
    dims = options.dims()
    if not dims:
        return None
    if prod(dims.values()) != world.size:
        raise ConfigError(
            f"--mesh {options.mesh}: has {prod(dims.values())} ranks, and {world.size} were started"
        )
    return init_device_mesh(world.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
