"""Steps on one card beside the forecast for it: memory and time, without a network.

The forecast counts no workspaces of cuBLAS, which torch allocates with its allocator.
"""

from dataclasses import replace
from typing import Any, Literal

import torch

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.machines.hardware import accelerator_of_device
from shardwise.forecast.models.transformer import Shape
from tests.gpu.fake_group import SMALL, TOLERANCE, Work, shard_fsdp2, shard_ours
from tests.gpu.registry import Context, check

FORECAST = "forecast"
ROUNDS = 2
Case = tuple[Shape, int, int, Literal["none", "full"]]
CLUSTER = "1xH100"  # where there is no data for the device
OF_1B: dict[str, Any] = {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192}
OF_8B: dict[str, Any] = {"layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14_336}
GPT: dict[str, Any] = {"vocab": 50_304, "has_bias": True}
TIED: dict[str, Any] = GPT | {"tied_embeddings": True, "positions": 1024}
# Shape, sequences, their length, checkpointing.
CASES: dict[str, Case] = {
    "Llama-1B": (Shape(arch="llama", vocab=32_000, **OF_1B), 4, 2048, "none"),
    "Llama-1B, recomputed": (Shape(arch="llama", vocab=32_000, **OF_1B), 8, 2048, "full"),
    "8 blocks of Llama-8B": (Shape(arch="llama", vocab=32_000, **OF_8B), 4, 2048, "full"),
    "8 blocks of GPT-6.7B": (
        Shape(arch="gpt", layers=8, hidden=4096, heads=32, positions=2048, **GPT), 4, 2048, "full"
    ),
    "GPT-760M": (Shape(arch="gpt", layers=24, hidden=1536, heads=16, **TIED), 8, 1024, "none"),
    "GPT-125M": (Shape(arch="gpt", layers=12, hidden=768, heads=12, **TIED), 4, 1024, "none"),
}  # fmt: skip

for name, case in CASES.items():

    @check(FORECAST, name, {"seconds": 60.0, "kinds": ("cuda", "cpu")}, {"case": case})
    def _measure(context: Context, case: Case) -> None:
        shape, batch, sequence, checkpointing = case
        if context.kind != "cuda":
            shape, sequence = replace(shape, **SMALL), 64
        configuration = Configuration(
            shard_size=1,
            micro_batch=batch,
            sequence=sequence,
            checkpointing=checkpointing,
            reduce_dtype=torch.bfloat16,
            clips=False,
        )
        work = Work(context.device, shape, configuration)
        known = context.kind == "cuda" and accelerator_of_device(torch.cuda.get_device_name())
        time = work.step_time(f"1x{known.name}" if known else CLUSTER)
        turns = []
        for number in range(ROUNDS):
            turns.append(work.turn(shard_ours, profiles=number == 0))
            context.report(f"fsdp2, round {number}", work.turn(shard_fsdp2, profiles=False))
        found = min(turns, key=lambda turn: turn["seconds"])
        context.report("figures", found)
        context.report("forecast seconds", time.seconds)
        context.report("forecast mfu", time.mfu)
        context.report("forecast / measured time", time.seconds / found["seconds"])
        if context.kind == "cuda":
            certified = work.certificate().peak_bytes
            live = turns[0]["allocated_peak"] / certified
            context.report("live memory / certified", live)
            context.report("certified live bytes", certified)
            assert abs(live - 1) <= TOLERANCE, f"live memory is {live:.3f} of the certified"
