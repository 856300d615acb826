"""``shardwise bench``."""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import split_names


def bench(
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="10M, 50M, 125M, or a CONFIG.toml with the [model] to use."
        ),
    ] = "10M",
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of local CPU ranks.")] = 2,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="fp32 or bf16.")] = "fp32",
    vs: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Peers: ddp, fsdp1, fsdp2 (default: one row of each), zero-optimizer, deepspeed. "
            "ddp is the base of the ratios and is always included.",
        ),
    ] = None,
    ours: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Strategies: zero2, fsdp, fsdp-dim with FSDP2's placements (default: these), ddp, "
            "zero1, hsdp, hfsdp, fsdp-no-prefetch, fsdp-wire, fsdp-muon, fsdp-adam8bit, "
            "fsdp-outer, fsdp-transaction.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Number of measured rounds.")] = 8,
    sequence: Annotated[int, typer.Option(metavar="N", help="Tokens per sequence.")] = 128,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences per rank and step.")] = 2,
    measure: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Measurements: time (default), traffic, memory, units. Each one but time starts "
            "new processes for every engine.",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Use all engines that are installed and support the number of ranks, and all "
            "measurements, unless --vs, --ours or --measure are given. Takes many minutes.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to write results.json and bench.png (default: under runs/)."
        ),
    ] = None,
) -> None:
    """Compare with DDP, FSDP1 and FSDP2 on CPU ranks of this machine.

    `python -m benchmarks.gpu`, in the repository of shardwise, compares on GPUs.

    The engines alternate in rounds, on the same model and data. The result is the median of the
    ratios to DDP, with the noise. The exit code does not depend on the figures.
    """
    from shardwise.bench.compare import run  # noqa: PLC0415 (imports torch)
    from shardwise.bench.options import BenchOptions  # noqa: PLC0415

    run(
        BenchOptions(
            size=size,
            ranks=ranks,
            dtype=dtype,
            vs=None if vs is None else split_names(vs),
            ours=None if ours is None else split_names(ours),
            rounds=rounds,
            sequence=sequence,
            batch=batch,
            measures=None if measure is None else split_names(measure),
            full=full,
            out=out,
        )
    )
