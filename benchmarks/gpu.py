"""``python -m benchmarks.gpu``: a rank's steps on a GPU, of shardwise beside FSDP2.

A fake process group poses as 8 and as 64 ranks: **no network is in it**. Each gather is a copy on
the device and each reduction is nothing, so this tells what an engine costs a GPU, and not how it
scales. Each engine has processes of its own, which take turns; the figures are medians over them.

Models, in bfloat16 over float32 shards, with activation checkpointing and fused AdamW:

- *gpt-175b*: blocks of its shape, 12,288 wide with 96 heads, as many as fit;
- *llama-8b*: Llama-3.1-8B of `transformers`, whole;
- *tiny*: to see that this runs, on a CPU as well.

FLOP are those of all products of a step, those of recomputed blocks included; the peak of the GPU
is a product of two square matrices in bfloat16, in the same process. Allocator calls are what
torch's allocator was asked for in a step, and device allocations what it asked the driver for.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, multiprocessing, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import shardwise as sw
from shardwise.train.model import GPT, Block, Shape

WARM_UP = 3  # steps
WIDTH = 132  # of the table, in characters
PRODUCT = {"cuda": 8192, "cpu": 256}  # the width of the matrices whose product is the peak
PRODUCTS = 20
LLAMA_VOCABULARY = 128_256


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained; ``blocks`` are the units beside the root."""

    build: Callable[[int], tuple[nn.Module, type[nn.Module]]]  # of so many blocks
    blocks: int
    vocabulary: int
    context: int
    batch: int  # sequences of a rank in a step


def gpt(shape: Shape, batch: int) -> Model:
    """A GPT of that shape, all of whose blocks are recomputed."""

    def build(blocks: int) -> tuple[nn.Module, type[nn.Module]]:
        model = GPT(replace(shape, layers=blocks))
        model.checkpoint_every = 1
        return model, Block

    return Model(build, shape.layers, shape.vocabulary, shape.context, batch)


def llama_8b(blocks: int) -> tuple[nn.Module, type[nn.Module]]:
    """Llama-3.1-8B, if there are 32 blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (takes seconds)
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=LLAMA_VOCABULARY,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=blocks,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, LlamaDecoderLayer


MODELS = {
    "gpt-175b": gpt(Shape(vocabulary=51_200, context=2048, width=12_288, layers=6, heads=96), 2),
    "llama-8b": Model(llama_8b, 32, LLAMA_VOCABULARY, context=2048, batch=4),
    "tiny": gpt(Shape(vocabulary=512, context=64, width=64, layers=2, heads=2), 2),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One engine on one model, in a process of its own."""

    model: str
    blocks: int
    engine: str
    ranks: int
    device: str
    steps: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one process; bytes and counts are 0 on a CPU."""

    tokens_per_second: float
    flops: int  # in a step
    flops_per_second: float
    peak_flops_per_second: float  # of the device
    allocated_peak: int  # bytes
    reserved_peak: int
    kernel_launches: int  # in a step
    allocator_calls: float  # in a step
    device_allocations: float  # in a step


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--models", default="gpt-175b,llama-8b", help="by comma")
    parser.add_argument("--ranks", type=numbers, default="8,64", help="posed as, by comma")
    parser.add_argument("--blocks", type=int, help="of each model, instead of its own number")
    parser.add_argument("--steps", type=int, default=5, help="that are timed in each process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each engine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args(words)
    names = options.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        parser.error(f"unknown models {unknown}; expected some of {', '.join(MODELS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --models tiny shows that this runs")
    tasks = [
        Task(name, options.blocks or MODELS[name].blocks, engine, n, options.device, options.steps)
        for name in names
        for n in options.ranks
        for engine in ENGINES
    ]
    found = measure_all(tasks, options.rounds)
    Console(width=max(WIDTH, Console().width)).print(as_table(found))
    if options.out is not None:
        write(options.out, options.device, found, words)


def numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def measure_all(tasks: Sequence[Task], rounds: int) -> dict[Task, list[Measured]]:
    """Each task in ``rounds`` processes, which take turns."""
    found: dict[Task, list[Measured]] = {task: [] for task in tasks}
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    for turn in range(rounds):
        for task in tasks if turn % 2 == 0 else tasks[::-1]:
            process = context.Process(target=measure, args=(task, queue))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{task.engine} on {task.model} failed with {process.exitcode}")
            found[task].append(queue.get())
    return found


def measure(task: Task, queue: "multiprocessing.SimpleQueue[Measured]") -> None:
    """One process: one engine's model, on rank 0 of a world that is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", rank=0, world_size=task.ranks, store=FakeStore())
    device, model = torch.device(task.device), MODELS[task.model]
    peak = product_flops(device)
    torch.manual_seed(0)
    with device:
        net, block = model.build(task.blocks)
        tokens = torch.randint(model.vocabulary, (model.batch, model.context + 1))
    net = ENGINES[task.engine](net, block)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss_of(net, tokens).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = allocations(device)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(task.steps):
        step()
    synchronize(device)
    seconds = (time.perf_counter() - began) / task.steps
    calls, from_driver = (
        (n - m) / task.steps for n, m in zip(allocations(device), before, strict=True)
    )
    allocated = torch.cuda.max_memory_allocated() if on_gpu else 0
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
    flops = count_flops(step)
    queue.put(
        Measured(
            tokens_per_second=model.batch * model.context / seconds,
            flops=flops,
            flops_per_second=flops / seconds,
            peak_flops_per_second=peak,
            allocated_peak=allocated,
            reserved_peak=reserved,
            kernel_launches=count_kernels(step) if on_gpu else 0,
            allocator_calls=calls,
            device_allocations=from_driver,
        )
    )
    dist.destroy_process_group()


def loss_of(net: nn.Module, tokens: Tensor) -> Tensor:
    """Of the next token; ``tokens`` [batch, context + 1]."""
    given = net(tokens[:, :-1])
    logits = given if isinstance(given, Tensor) else given.logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


# -- the engines ---------------------------------------------------------------------------------


def in_shardwise(net: nn.Module, block: type[nn.Module]) -> nn.Module:
    policy = sw.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    return sw.fully_shard(net, units=block, mp_policy=policy)


def in_fsdp2(net: nn.Module, block: type[nn.Module]) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for module in [m for m in net.modules() if isinstance(m, block)]:
        fully_shard(module, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    return net


ENGINES: dict[str, Callable[[nn.Module, type[nn.Module]], nn.Module]] = {
    "fsdp2": in_fsdp2,
    "shardwise": in_shardwise,
}


# -- counting ------------------------------------------------------------------------------------


def count_flops(step: Callable[[], None]) -> int:
    """Of all products of a step; on a CPU without those of fused attention."""
    with FlopCounterMode(display=False) as counter:
        step()
    total: int = counter.get_total_flops()
    return total


def product_flops(device: torch.device) -> float:
    """FLOP a second of the product of two matrices in bfloat16."""
    width = PRODUCT[device.type]
    one = torch.randn(width, width, dtype=torch.bfloat16, device=device)
    for _ in range(WARM_UP):
        one @ one
    synchronize(device)
    began = time.perf_counter()
    for _ in range(PRODUCTS):
        one @ one
    synchronize(device)
    return 2 * width**3 * PRODUCTS / (time.perf_counter() - began)


def allocations(device: torch.device) -> tuple[int, int]:
    """What torch's allocator was asked for until now, and what it asked the driver for."""
    if device.type != "cuda":
        return 0, 0
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["segment.all.allocated"]


def count_kernels(step: Callable[[], None]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    names = [event.name for event in seen.events() or () if event.device_type == on_gpu]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- telling -------------------------------------------------------------------------------------


def medians(found: Sequence[Measured]) -> dict[str, float]:
    """Of each figure, over processes."""
    return {
        name: statistics.median(asdict(one)[name] for one in found) for name in asdict(found[0])
    }


def as_table(found: dict[Task, list[Measured]]) -> Table:
    """A line for each engine, model and number of ranks."""
    table = Table("model", "ranks", "engine", title="one rank; no network is in it")
    for heading in (
        "tokens/s", "TFLOP/s", "of a product's", "peak GB", "reserved GB",
        "kernels", "allocator calls", "device allocations",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for task, processes in found.items():
        own = medians(processes)
        table.add_row(
            f"{task.model}, {task.blocks} blocks",
            str(task.ranks),
            task.engine,
            f"{own['tokens_per_second']:,.0f}",
            f"{own['flops_per_second'] / 1e12:.3g}",
            f"{own['flops_per_second'] / own['peak_flops_per_second']:.0%}",
            f"{own['allocated_peak'] / 1e9:.2f}",
            f"{own['reserved_peak'] / 1e9:.2f}",
            f"{own['kernel_launches']:.0f}",
            f"{own['allocator_calls']:.0f}",
            f"{own['device_allocations']:.1f}",
        )
    return table


def write(
    out: Path, device: str, found: dict[Task, list[Measured]], words: Sequence[str] | None
) -> None:
    """All processes' figures, and their medians."""
    given = sys.argv[1:] if words is None else words
    results: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *given]),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "tasks": [
            {**asdict(task), "median": medians(own), "processes": [asdict(one) for one in own]}
            for task, own in found.items()
        ],
    }
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
