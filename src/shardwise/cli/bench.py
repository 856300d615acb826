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
    ] = "50M",
    ranks: Annotated[int, typer.Option(metavar="N", help="Number of local CPU ranks.")] = 2,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="fp32 or bf16.")] = "fp32",
    vs: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Peers: ddp, fsdp1, fsdp2, zero-optimizer, deepspeed (default: all that are "
            "installed). ddp is the base of the ratios and always included.",
        ),
    ] = None,
    ours: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Strategies: ddp, zero1, zero2, fsdp, fsdp-dim (with FSDP2's placements), hsdp, "
            "hfsdp (default: those that the number of ranks allows), fsdp-no-prefetch, "
            "fsdp-transaction.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Number of measured rounds.")] = 12,
    sequence: Annotated[int, typer.Option(metavar="N", help="Tokens per sequence.")] = 128,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences per rank and step.")] = 2,
    measure: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="Measurements: time, traffic, memory, units."),
    ] = "time,traffic,memory,units",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For results.json and bench.png (default: under runs/)."),
    ] = None,
) -> None:
    """Compare with DDP, FSDP1, FSDP2, ZeroRedundancyOptimizer and DeepSpeed on this machine.

    The engines take turns in rounds, on the same model and data. The result is the median of the
    ratios to DDP. No time is asserted, so the exit code does not depend on the figures.
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
            measures=_words(measure) or (),
            out=out,
        )
    )


def _words(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(word.strip() for word in text.split(",") if word.strip())
