"""``shardwise bench``."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="10M, 50M, 125M, or a CONFIG.toml whose [model] is meant."
        ),
    ] = "50M",
    ranks: Annotated[int, typer.Option(metavar="N", help="Local CPU ranks.")] = 2,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="fp32 or bf16.")] = "fp32",
    vs: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Some of ddp, fsdp1, fsdp2, zero-optimizer, deepspeed; all that are installed by "
            "default. ddp is the base and always there.",
        ),
    ] = None,
    ours: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Some of ddp, zero1, zero2, fsdp, hsdp, hfsdp (the default, as far as the ranks "
            "allow), fsdp-no-prefetch, fsdp-transaction.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds that count.")] = 12,
    sequence: Annotated[int, typer.Option(metavar="N", help="Tokens of a sequence.")] = 128,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences of a rank in a step.")] = 2,
    measure: Annotated[
        str,
        typer.Option(metavar="WHAT,WHAT", help="Some of time, traffic, memory, units."),
    ] = "time,traffic,memory,units",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="For results.json and bench.png; a new one under runs/."),
    ] = None,
) -> None:
    """Compare with DDP, FSDP1, FSDP2, ZeroRedundancyOptimizer and DeepSpeed on this machine.

    The engines take turns in rounds, on the same model and data; what is told is the median of
    ratios to DDP. Nothing is asserted: the exit code says only whether it ran.
    """
    from shardwise.bench.harness import run  # noqa: PLC0415 (torch takes seconds to import)
    from shardwise.bench.setting import Request  # noqa: PLC0415

    run(
        Request(
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
