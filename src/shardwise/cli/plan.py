"""``shardwise plan``."""

import sys
import time
from collections.abc import Callable, Iterator
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import check_outputs, split_names
from shardwise.errors import ConfigError
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.spelling import expected_one_of

if TYPE_CHECKING:
    import torch

    from shardwise.forecast.search.candidates import Degree
    from shardwise.forecast.view.planning import Planned

WIDTH = 100  # in characters, which the tables need
QUIET_SECONDS = 2.0  # minimum time before the first line of progress, and between lines
_DTYPES = ("bfloat16", "float16", "float32")
_SEQUENCE = 4096  # tokens
_DEFAULT = "default: that of the TOML file, otherwise"
_DEGREE = typer.Option(metavar="N", help="Ranks on this axis, or auto to try several.")


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A built-in name such as llama-3-8b, the config.json of a Hugging Face model, the "
            "TOML file of shardwise train, or package.module:function or file.py:function that "
            "builds a module. Frozen parameters and those in bfloat16 count as they are.",
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            metavar="COUNTxGPU",
            help="Such as 64xH100, or 64xA100-40GB/8:1600 (GPUs per node:Gbit/s).",
        ),
    ] = "8xH100",
    seq: Annotated[
        int | None, typer.Option(metavar="N", help=f"Tokens per sequence ({_DEFAULT} {_SEQUENCE}).")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(metavar="N", help=f"Sequences per step ({_DEFAULT} 8 per GPU).")
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="tokens/s, memory or cost.")
    ] = "tokens/s",
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="Strategies to try (default: all).")
    ] = None,
    micro_batch: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="Sequences per forward (default: divisors up to 64)."),
    ] = None,
    checkpointing: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Kinds of activation checkpointing to try: none, full, products (keeps results of "
            "matrix products and attention) or selective (keeps every second product); by default "
            "the first three.",
        ),
    ] = None,
    offload: Annotated[
        bool, typer.Option(help="Offload to host memory if nothing fits otherwise.")
    ] = True,
    tensor: Annotated[str | None, _DEGREE] = None,
    pipeline: Annotated[str, _DEGREE] = "1",
    chunks: Annotated[
        str,
        typer.Option(
            metavar="N", help="Parts of the model per pipeline stage (interleaved), or auto."
        ),
    ] = "1",
    context: Annotated[str, _DEGREE] = "1",
    expert: Annotated[str, _DEGREE] = "1",
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"One of {', '.join(OPTIMIZERS)}, or module:Class ({_DEFAULT} adamw).",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help=f"Compute dtype: bfloat16, float16 or float32 ({_DEFAULT} bfloat16).",
        ),
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile.")
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Train adapters on a frozen base: r=16,targets=q_proj+v_proj,dora=true (targets: "
            "all-linear), or the adapter_config.json of peft.",
        ),
    ] = None,
    qlora: Annotated[
        bool, typer.Option("--qlora", help="Adapters on a base with 4-bit weights (NF4).")
    ] = False,
    float8: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="8-bit products in linear layers of blocks, by how operands are scaled: "
            "tensorwise, rowwise, delayed or mxfp8.",
        ),
    ] = "none",
    float8_gather: Annotated[
        bool, typer.Option("--float8-gather", help="Gather their weights in 8 bits, too.")
    ] = False,
    wire: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS", help="Quantize what ranks send, such as gather=int8,reduce=int4."
        ),
    ] = None,
    outer: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Replicas that train independently (DiLoCo), such as replicas=2,every=32,"
            "dtype=int4,delay=2.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens to train on, such as 300B or 1T.")
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="Price of a GPU-hour.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where the time and the memory of a step go.")
    ] = False,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Show what ranks write and read for a checkpoint.")
    ] = False,
    storage: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            min=0,
            help="Speed of a node's file system, for --checkpoint (default: 2).",
        ),
    ] = None,
    scaling: Annotated[
        bool, typer.Option(help="Also predict the throughput on up to 16,384 GPUs.")
    ] = True,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page with pictures.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write a trace for https://ui.perfetto.dev."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a file for shardwise train.")
    ] = None,
) -> None:
    """Find the best way to train a model on a cluster, without using a GPU.

    Predicts the memory per GPU and the time per step for every strategy, micro-batch and kind of
    checkpointing that divides the batch. Ranks the configurations that fit, prints how much memory
    the others lack, and prints the call of fully_shard for the best one.
    """
    check_outputs(html, trace, config)
    if price is not None and (tokens is None or not isfinite(price)):
        raise ConfigError(f"--price {price:g}: expected a number, with --tokens N")
    _check_checkpoint(storage, expert, is_planned=checkpoint)
    from rich.console import Console  # noqa: PLC0415 (torch takes seconds)

    from shardwise.forecast.forecast import Forecaster  # noqa: PLC0415
    from shardwise.forecast.machines.find import machine_of  # noqa: PLC0415
    from shardwise.forecast.options import number_of  # noqa: PLC0415
    from shardwise.forecast.search.candidates import Goal  # noqa: PLC0415
    from shardwise.forecast.time.saving import Storage  # noqa: PLC0415
    from shardwise.forecast.view import terminal  # noqa: PLC0415
    from shardwise.forecast.view.estimate import settings_of  # noqa: PLC0415
    from shardwise.forecast.view.planning import make_planned  # noqa: PLC0415
    from shardwise.forecast.view.text import Budget  # noqa: PLC0415
    from shardwise.train.model_files import ModelFiles  # noqa: PLC0415

    machine = machine_of(cluster)
    files = ModelFiles.of(model, config, _changes(seq, dtype))
    own: dict[str, Any] = {}
    if files.settings is None:
        own["sequence"] = _SEQUENCE if seq is None else seq
        own["compute_dtype"] = _dtype("bfloat16" if dtype is None else dtype)
    # shardwise train divides layers as transformers does.
    is_whole = config is None and files.settings is None
    settings = settings_of(
        files.model,
        files.settings,
        optimizer=optimizer,
        wire=wire,
        outer=outer,
        lora=lora,
        qlora=qlora,
        compiled=compiled,
        sequence_parallel=is_whole,
        split_vocabulary=is_whole,
        float8=float8,
        float8_gather=float8_gather,
        **own,
    )
    goal = Goal(
        global_batch=files.global_batch or 8 * machine.cluster.num_devices
        if global_batch is None
        else global_batch,
        settings=settings,
        objective=objective,  # type: ignore[arg-type]
        strategies=_names("strategy", strategy),
        micro_batches=tuple(
            _positive_int("micro-batch", text) for text in _names("micro-batch", micro_batch)
        ),
        checkpointing=_names("checkpointing", checkpointing),  # type: ignore[arg-type]
        offload=("none", "optimizer", "parameters") if offload else ("none",),
        tensor=files.tensor if tensor is None else _degree("tensor", tensor),
        pipeline=_degree("pipeline", pipeline),
        chunks=_degree("chunks", chunks),
        context=_degree("context", context),
        expert=_degree("expert", expert),
    )
    forecaster = Forecaster(files.model, machine)
    planned = make_planned(
        forecaster,
        goal,
        Budget(None if tokens is None else number_of("tokens", tokens), price),
        files.toml_of,
        Progress(),
        scaling=scaling and not cluster.endswith(".json"),
    )
    console = Console(width=max(WIDTH, Console().width))
    terminal.show(console, planned)
    if explain:
        terminal.explain(console, planned)
    if checkpoint:
        speed = 2.0 if storage is None else storage
        nodes = Storage(per_node=speed * 1e9, ranks_per_node=machine.cluster.devices_per_node)
        configuration = planned.winner.configuration
        saved = forecaster.checkpoint(configuration)
        num_parts = configuration.tensor * configuration.pipeline
        terminal.show_checkpoint(console, saved, nodes, num_parts=num_parts)
    _write(planned, html, trace, None if planned.config_problem else config)
    if config is not None:
        if planned.config_problem:
            raise ConfigError(f"--config {config}: {planned.config_problem}")
        files.write_model(settings.sequence)
    if not planned.winner.fits:
        raise ConfigError(planned.shortage)


def _changes(seq: int | None, dtype: str | None) -> Iterator[str]:
    """Yield the changes of a TOML file by options, as of ``--set``."""
    if seq is not None:
        yield f"model.context={seq}"
    if dtype is not None:
        yield f"precision.compute={dtype}"


def _names(option: str, text: str | None) -> tuple[str, ...]:
    """Split at commas; return () if the option is not given."""
    names = () if text is None else split_names(text)
    if text is not None and not names:
        raise ConfigError(f"--{option} {text!r}: expected one or more names")
    return names


def _dtype(name: str) -> "torch.dtype":
    import torch  # noqa: PLC0415

    if name not in _DTYPES:
        raise ConfigError(f"--dtype {name}: {expected_one_of(_DTYPES, name)}")
    found: torch.dtype = getattr(torch, name)
    return found


def _write(planned: "Planned", html: Path | None, trace: Path | None, config: Path | None) -> None:
    from shardwise.forecast.view.page import render_plan  # noqa: PLC0415
    from shardwise.report.trace import write_trace  # noqa: PLC0415

    if html is not None:
        html.write_text(render_plan(planned), encoding="utf-8")
    if trace is not None:
        write_trace([planned.recording], trace)
    if config is not None:
        config.write_text(planned.config, encoding="utf-8")
    for path in (html, trace, config):
        if path is not None:
            typer.echo(f"{path}: written")


class Progress:
    """Prints progress of long operations on stderr, at most one line every two seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._printed_at = clock()

    def __call__(self, message: str) -> None:
        if self._clock() - self._printed_at >= QUIET_SECONDS:
            self._printed_at = self._clock()
            print(f"{message} ...", file=sys.stderr, flush=True)  # noqa: T201


def _check_checkpoint(storage: float | None, expert: str, *, is_planned: bool) -> None:
    if storage is not None and not is_planned:
        raise ConfigError(f"--storage {storage:g}: expected --checkpoint")
    if storage is not None and not 0 < storage < inf:
        raise ConfigError(f"--storage {storage:g}: expected a number above 0")
    if is_planned and expert != "1":
        raise ConfigError(
            f"--expert {expert}: checkpoints can be planned only for models with one mesh, and "
            "experts have their own; omit --checkpoint"
        )


def _degree(option: str, text: str) -> "Degree":
    return "auto" if text == "auto" else _positive_int(option, text)


def _positive_int(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{option} {text}: expected an integer of 1 or more")
    return int(text)
