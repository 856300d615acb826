"""Runs `shardwise verify` on the ranks of a launcher, or on local ranks."""

import os
import re
from dataclasses import dataclass
from math import prod
from typing import Any

from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

from shardwise.errors import ConfigError, PlanError, ShardwiseError
from shardwise.forecast.options import parse_wire
from shardwise.launch.environment import RankEnv, read_rank_env
from shardwise.launch.local import check_num_ranks, default_num_ranks, run_on_local_ranks
from shardwise.launch.world import World, join_world
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.wire import UNQUANTIZED
from shardwise.train.model import GPT, Block, gpt_shape
from shardwise.verification.engines import splits_batch
from shardwise.verification.models import (
    MODELS,
    VOCABULARY,
    Subject,
    next_token_loss,
    random_tokens,
)
from shardwise.verification.result import VerificationError
from shardwise.verification.subjects import find_engine, find_optimizer, find_subjects
from shardwise.verification.verify import resolve_strategies, verify

__all__ = ["BUILT_IN", "VerifyOptions", "run_verify"]

_GRANULARITIES = ("element", "row", "tensor", "dim")


_GPT = gpt_shape(vocabulary=VOCABULARY, context=6, width=16, layers=2, heads=2)
BUILT_IN = {"gpt": Subject(lambda: GPT(_GPT), random_tokens, next_token_loss, Block)} | MODELS


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of the command, which are pickled and sent to local ranks."""

    model: str | None  # None: every built-in model
    strategies: tuple[str, ...] | None  # None: all
    steps: int
    corrupt: str | None  # name of a parameter
    engine: str | None = None  # None: shardwise, with each strategy
    mesh: str | None = None  # such as "dp2,tp2"; requires ``engine``
    optimizer: str | None = None  # None: AdamW
    wire: str | None = None  # such as "gather=int8,reduce=int4"
    tolerance: float | None = None  # None: the default of `verify`
    granularity: str | None = None  # None: the default, or what the optimizer needs

    def check(self) -> None:
        """Raise a ConfigError or a PlanError for an invalid option, before any rank is started."""
        if self.steps < 1:
            raise ConfigError(f"--steps {self.steps}: expected 1 or more")
        if self.corrupt is not None and self.model is None:
            raise ConfigError(f"--corrupt {self.corrupt}: name the MODEL that has this parameter")
        resolve_strategies(self.strategies)
        find_subjects(self.model, BUILT_IN)
        if self.engine is not None:
            find_engine(self.engine)
        if self.optimizer is not None:
            find_optimizer(self.optimizer)
        self.dims()
        self._check_sharding()

    def _check_sharding(self) -> None:
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ConfigError(f"--tolerance {self.tolerance}: expected 0 or more")
        for option in ("wire", "granularity"):
            if self.engine is not None and getattr(self, option) is not None:
                raise ConfigError(
                    f"--{option} {getattr(self, option)}: other engines do not use it; omit "
                    "--engine"
                )
        if self.granularity not in (None, *_GRANULARITIES):
            raise ConfigError(
                f"--granularity {self.granularity}: expected one of {', '.join(_GRANULARITIES)}"
            )
        if parse_wire(self.wire) != UNQUANTIZED and self.tolerance is None:
            raise ConfigError(
                f"--wire {self.wire}: quantized values differ from one process by up to 1/254 "
                "(int8), 1/16 (fp8) or 1/14 (int4) of the largest value in their block; pass "
                "--tolerance. With block=8 and --optimizer sgd, 0.5 is enough for int8 and fp8, "
                "and for int4 in reductions; in larger blocks, and with int4 in gathers, small "
                "gradients may be lost entirely"
            )

    def sharding(self) -> dict[str, Any]:
        """The arguments of `fully_shard` that the options set."""
        # 8-bit states do not support parameters that are cut by element.
        spec = OPTIMIZERS.get(self.optimizer or "")
        has_blocks = spec is not None and spec.kind == "blocks"
        granularity = self.granularity or ("row" if has_blocks else None)
        options: dict[str, Any] = {} if granularity is None else {"granularity": granularity}
        return options if self.wire is None else {**options, "wire": parse_wire(self.wire)}

    def dims(self) -> dict[str, int]:
        """The sizes of the mesh's dims by name; empty without a mesh."""
        if self.mesh is None:
            return {}
        if self.engine is None:
            raise ConfigError(f"--mesh {self.mesh}: name the --engine that uses it")
        matches = [re.fullmatch(r"([a-z_]+)([1-9][0-9]*)", dim) for dim in self.mesh.split(",")]
        sizes = {match[1]: int(match[2]) for match in matches if match}
        if len(sizes) != len(matches) or not any(map(splits_batch, sizes)):
            raise ConfigError(
                f"--mesh {self.mesh}: expected distinct names, each with a size, one of them "
                "beginning with dp, such as dp2,tp2"
            )
        return sizes


def run_verify(options: VerifyOptions, nproc: int | None = None) -> None:
    """Verify on the ranks of a launcher, or on local ranks: ``nproc``, or `default_num_ranks`."""
    env = read_rank_env(os.environ)
    if env is not None:
        _join(options, env, nproc)
        return
    if nproc is None:
        nproc = prod(options.dims().values()) if options.mesh else default_num_ranks()
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
    # Only rank 0 raises: a launcher stops all ranks when one fails, perhaps before rank 0 printed.
    if error is not None and env.rank == 0:
        raise error


def _verify(world: World, options: VerifyOptions) -> ShardwiseError | None:
    """Verify, and return the error to raise, which is the same on every rank.

    The error is returned because the launcher prints a traceback if a rank raises.
    """
    differences = []
    console = Console(quiet=not world.is_first, soft_wrap=True, markup=False, highlight=False)
    try:
        engine = None if options.engine is None else find_engine(options.engine)
        mesh = _mesh(options, world)
        optimizer = None if options.optimizer is None else find_optimizer(options.optimizer)
        if options.tolerance is not None:
            console.print(f"Relative errors up to {options.tolerance:g} count as equal.\n")
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
                optimizer_fn=optimizer,
                tolerance=options.tolerance,
                **options.sharding(),
            )
            console.print()
            if not found.ok:
                differences.append(found.explanation)
    except (ConfigError, PlanError) as error:
        return error
    return VerificationError("\n".join(differences)) if differences else None


def _mesh(options: VerifyOptions, world: World) -> DeviceMesh | None:
    dims = options.dims()
    if not dims:
        return None
    if prod(dims.values()) != world.size:
        raise ConfigError(
            f"--mesh {options.mesh}: has {prod(dims.values())} ranks, but {world.size} were started"
        )
    return init_device_mesh(world.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
