"""``shardwise bench``."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="10M, 50M, 125M, or a CONFIG.toml, whose [model] is used."
        ),
    ] = "10M",
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of local CPU ranks.")] = 2,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="fp32 or bf16.")] = "fp32",
    vs: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Peers: ddp, fsdp1, fsdp2 (default: one row of each), zero-optimizer, deepspeed. "
            "ddp is the base of the ratios and always included.",
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
            help="Measurements: time (default), traffic, memory, units; each of the others starts "
            "processes for every engine.",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="All engines that are installed and suit the number of ranks, and all "
            "measurements, unless --vs, --ours or --measure choose; takes many minutes.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For results.json and bench.png (default: under runs/)."),
    ] = None,
) -> None:
    """Compare with DDP, FSDP1 and FSDP2 on this machine.

    The engines take turns in rounds, on the same model and data. The result is the median of the
    ratios to DDP, with the noise. No time is asserted, so the exit code does not depend on the
    figures.
    """
    from shardwise.bench.compare import run  # noqa: PLC0415 (imports torch)
    from shardwise.bench.options import BenchOptions  # noqa: PLC0415

    run(
        BenchOptions(
            size=size,
            ranks=ranks,
            dtype=dtype,
            vs=_words(vs),
            ours=_words(ours),
            rounds=rounds,
            sequence=sequence,
            batch=batch,
            measures=_words(measure),
            full=full,
            out=out,
        )
    )


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())
