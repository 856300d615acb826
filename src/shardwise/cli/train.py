"""``shardwise train``."""

import os
import time
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG.toml]",
            help="The configuration of the run (default: a small GPT on the standard library).",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the file."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of local ranks (default: shard.nproc or, if that is not set, one for each "
            "GPU, or 2 on CPUs).",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Start a lighthouse and N replicas on this machine, each with --nproc ranks; "
            "replicas that die are started again.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Memory budget per rank, such as 24GB, for which to choose the strategy, "
            "micro-batch and checkpointing.",
        ),
    ] = None,
) -> None:
    """Train a GPT or a Hugging Face model, sharded over ranks.

    Starts local ranks, or joins the ranks of a launcher such as torchrun (if RANK and WORLD_SIZE
    are set). After SIGINT, SIGTERM or SIGUSR1, the run saves a checkpoint and stops; run the same
    command to resume.
    """
    from shardwise.train.config import read_config  # noqa: PLC0415
    from shardwise.train.run import num_local_ranks, run  # noqa: PLC0415 (imports torch)

    settled = read_config(config, settings or [])
    if replicas is not None:
        from shardwise.cli import main  # noqa: PLC0415 (it imports this module)
        from shardwise.launch.local import check_num_ranks  # noqa: PLC0415
        from shardwise.launch.replicas import run_replicas  # noqa: PLC0415

        name = f"{settled.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        directory = settled.run.directory or f"runs/{name}"
        options = {"--nproc": nproc, "--memory": memory}
        words = ["train"] if config is None else ["train", str(config)]
        words += [word for text in settings or [] for word in ("--set", text)]
        words += [str(word) for pair in options.items() if pair[1] is not None for word in pair]
        num_ranks = num_local_ranks(settled, nproc)
        check_num_ranks(num_ranks, f"--nproc {num_ranks}")
        run_replicas(main, words, replicas, num_ranks, directory)
        return
    if memory is not None:
        from shardwise.launch.environment import read_rank_env  # noqa: PLC0415
        from shardwise.train.within import within  # noqa: PLC0415

        env = read_rank_env(os.environ)
        num_ranks = num_local_ranks(settled, nproc) if env is None else env.world_size
        settled = within(settled.with_ranks(num_ranks), memory)
    run(settled, nproc)
