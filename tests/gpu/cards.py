"""Several cards: NCCL between ranks, each on its own."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise._private import can_swap_storages
from tests.gpu.many_ranks import raise_on_one_rank
from tests.gpu.registry import Context, check
from tests.gpu.training import Pair, compare

CARDS = "cards"


def on_cards(ranks: int, **more: Any) -> dict[str, Any]:
    return {"ranks": ranks, "kinds": ("cuda",), **more}


def others_are_untouched(context: Context, body: Callable[[], object]) -> None:
    """Run ``body``; afterwards this process must have no context on another rank's card."""
    body()
    for other in range(torch.cuda.device_count()):
        has_context = torch._C._cuda_hasPrimaryContext(other)  # type: ignore[attr-defined]
        assert has_context == (other == context.device.index), f"cuda:{other}: {has_context}"


PROGRAMS: dict[str, dict[str, Any]] = {
    **{name: {"strategy": name} for name in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "hfsdp")},
    "granularity dim": {"granularity": "dim"},
    "optimizer in backward": {"in_backward": True},
    "offload": {"offload_policy": sw.CPUOffloadPolicy()},
}
for name, values in PROGRAMS.items():
    for ranks in (2, 4):

        @check(CARDS, f"{name}, {ranks} cards", on_cards(ranks), {"values": values})
        def _train(context: Context, values: dict[str, Any]) -> None:
            others_are_untouched(context, partial(compare, context, **values))


@check(CARDS, "a program that never sets its device", on_cards(2, group="none"))
def _own_device(context: Context) -> None:
    """As under torchrun with ``device_id``: the current device of every thread is cuda:0."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False
    )
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("never sets", store),  # type: ignore[attr-defined]
        rank=context.rank,
        world_size=context.num_ranks,
        device_id=context.device,
    )
    others_are_untouched(context, partial(compare, context))


@check(CARDS, "one rank raises in forward", on_cards(2), {"where": "forward"})
@check(CARDS, "one rank raises in backward", on_cards(2), {"where": "backward"})
def _raises(context: Context, where: str) -> None:
    raise_on_one_rank(context, where)


@check(CARDS, "registered memory", on_cards(2), {"symmetric": False})
@check(CARDS, "symmetric memory", on_cards(2), {"symmetric": True})
def _memory(context: Context, *, symmetric: bool) -> None:
    if not can_swap_storages():
        context.report("left out", "torch before 2.13 cannot give a tensor other memory")
        return
    pair = Pair(context)
    if symmetric:
        pair.model.set_symm_mem_for_comm()
    else:
        pair.model.set_allocate_memory_from_process_group_for_comm(True)
    for _ in range(3):
        pair.step()


@check(CARDS, "destroy", on_cards(2))
def _destroy(context: Context) -> None:
    compare(context)
    began = time.monotonic()
    dist.destroy_process_group()
    context.report("seconds", time.monotonic() - began)


@check(
    CARDS,
    "benchmarks.gpu",
    {"group": "none", "cards": 2, "kinds": ("cuda",), "seconds": 170.0,
     "modules": ("pydantic", "rich", "tomli_w", "transformers")},
)  # fmt: skip
def _benchmark(context: Context) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gpu.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--nproc"]
        command += [str(torch.cuda.device_count()), "--models", "llama-8b", "--rounds", "1"]
        clean = {
            k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
        }
        done = subprocess.run(
            [*command, "--out", str(out)], check=False, capture_output=True, text=True, env=clean
        )
        assert done.returncode == 0, done.stderr[-2000:]
        context.report("results", out.read_text(encoding="utf-8"))
