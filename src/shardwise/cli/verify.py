"""``shardwise verify``."""

from typing import Annotated

import typer


def verify(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="gpt, moe, encoder-decoder, conv or lora (default: all); or bert, gpt2, llama, "
            "mixtral, qwen2, t5 or vit of transformers (hf: all of them); or your own function, as "
            "package.module:function or file.py:function, which returns (model_fn, batch_fn, "
            "loss_fn, units) for sw.verify.",
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of local ranks (default: one for each GPU, or 2 on CPUs)."
        ),
    ] = None,
    strategies: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Strategies, such as fsdp,zero2 (default: all)."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Check one engine instead of shardwise's strategies: shardwise, fsdp2 or ddp, "
            "or a function (model, mesh, units) that returns the model to train, as "
            "package.module:function or file.py:function.",
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DIMS",
            help="With --engine: names and sizes of the mesh's dims, such as dp2,tp2. Dims whose "
            "names begin with dp, efsdp or ep split the batch. Over tp, shardwise and fsdp2 "
            "divide linear layers, and ranks of ddp are copies.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Number of optimizer steps to compare.")
    ] = 2,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Optimizer to compare: adamw (the default), sgd, muon, soap, adam8bit, another "
            "of torch's, or a function (parameters) that returns one, as package.module:function "
            "or file.py:function. adam8bit shards by row.",
        ),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Quantize what ranks send: options of sw.Wire, such as "
            "gather=int8,reduce=int4,block=8. Needs --tolerance.",
        ),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="ERROR",
            help="The largest relative error of a parameter that counts as equal (default: 1e-10).",
        ),
    ] = None,
    granularity: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Where parameters may be cut: element, row, tensor or dim."
        ),
    ] = None,
    corrupt: Annotated[
        str | None,
        typer.Option(
            metavar="PARAMETER",
            help="Corrupt the gradient of this parameter on one rank, to test the comparison.",
        ),
    ] = None,
) -> None:
    """Compare sharded training with one process: loss, gradients and updated parameters.

    Starts local ranks, or joins the ranks of a launcher such as torchrun. Exits with 0 if all
    numbers are equal, 1 if some differ.
    """
    from shardwise.cli.run_verify import VerifyOptions, run_verify  # noqa: PLC0415 (imports torch)

    names = None if strategies is None else tuple(map(str.strip, strategies.split(",")))
    options = VerifyOptions(
        model, names, steps, corrupt, engine, mesh, optimizer, wire, tolerance, granularity
    )
    run_verify(options, nproc)
