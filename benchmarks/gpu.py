"""``python -m benchmarks.gpu``: a rank's steps on a GPU, of shardwise and of FSDP2.

A fake process group poses as 8 and as 64 ranks: **no network is in it**. Each gather is a copy on
the device and each reduction does nothing, so this shows what an engine costs a GPU, and not how it
scales. Each engine has processes of its own, which take turns; the figures are medians over them.

Models, in bfloat16 over float32 shards, with activation checkpointing and fused AdamW:

- *gpt-175b*: blocks of its shape, 12,288 wide with 96 heads, as many as fit;
- *llama-8b*: Llama-3.1-8B of `transformers`, whole;
- *tiny*: to test this script, on a CPU as well.

FLOP are those of all products of a step, those of recomputed blocks included; the peak of the GPU
is a product of two square matrices in bfloat16, in the same process. Allocator calls are requests
to torch's allocator in a step, and device allocations its requests to the driver.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import make_parser
from shardwise.bench import harness
from shardwise.bench.engines import ENGINES
from shardwise.bench.harness import Figures
from shardwise.bench.work import Work
from shardwise.train.model import GPT, Block, Shape

WARM_UP = 3  # steps
PRODUCT = {"cuda": 8192, "cpu": 256}  # the width of the matrices whose product is the peak
PRODUCTS = 20
LLAMA_VOCABULARY = 128_256
COMPARED = {"fsdp2": "fsdp2", "shardwise": "shardwise-fsdp"}  # rows of `shardwise bench`


def gpt(shape: Shape) -> Callable[[int], tuple[nn.Module, type[nn.Module]]]:
    """GPTs of that shape and of any number of blocks, all of which are recomputed."""

    def build(blocks: int) -> tuple[nn.Module, type[nn.Module]]:
        model = GPT(replace(shape, layers=blocks))
        model.checkpoint_every = 1
        return model, Block

    return build


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


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained; ``blocks`` are the units beside the root."""

    build: Callable[[int], tuple[nn.Module, type[nn.Module]]]  # of so many blocks
    blocks: int
    vocabulary: int
    context: int
    batch: int  # sequences of a rank in a step


GPT_175B = Shape(vocabulary=51_200, context=2048, width=12_288, layers=6, heads=96)
TINY = Shape(vocabulary=512, context=64, width=64, layers=2, heads=2)
MODELS = {
    "gpt-175b": Model(gpt(GPT_175B), 6, GPT_175B.vocabulary, context=2048, batch=2),
    "llama-8b": Model(llama_8b, 32, LLAMA_VOCABULARY, context=2048, batch=4),
    "tiny": Model(gpt(TINY), 2, TINY.vocabulary, TINY.context, batch=2),
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

    def __str__(self) -> str:
        return f"{self.model}, {self.blocks} blocks, {self.ranks} ranks: {self.engine}"

    def work(self) -> Work:
        model = MODELS[self.model]
        torch.manual_seed(0)
        with torch.device(self.device):
            net, block = model.build(self.blocks)
            batch = torch.randint(model.vocabulary, (model.batch, model.context + 1))
        return Work(lambda: net, block, lambda _: batch, next_token_loss, bf16=True)


def main(words: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = make_parser("gpu", __doc__, rounds=3)
    parser.add_argument("--models", default="gpt-175b,llama-8b", help="by comma")
    parser.add_argument("--ranks", default="8,64", help="posed as, by comma")
    parser.add_argument("--blocks", type=int, help="of each model, instead of its own number")
    parser.add_argument("--steps", type=int, default=5, help="that are timed in each process")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(words)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"unknown models {unknown}; expected some of {', '.join(MODELS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; --device cpu --models tiny tests this script")
    tasks = [
        Task(
            name,
            options.blocks or MODELS[name].blocks,
            engine,
            ranks,
            options.device,
            options.steps,
        )
        for name in names
        for ranks in map(int, options.ranks.split(","))
        for engine in COMPARED
    ]
    cases = {str(task): partial(measure_in_new_process, task) for task in tasks}
    rounds = harness.merge([harness.interleave(cases, options.rounds, title="processes")])
    rows = {name: harness.medians(rounds, name) for name in cases}
    columns = (
        ("tokens/s", "tokens_per_second", "{:,.0f}".format),
        ("TFLOP/s", "flops_per_second", lambda flops: f"{flops / 1e12:.3g}"),
        ("of a product's", "share_of_product", "{:.0%}".format),
        ("peak GB", "allocated_peak", gigabytes),
        ("reserved GB", "reserved_peak", gigabytes),
        ("kernels", "kernel_launches", "{:.0f}".format),
        ("allocator calls", "allocator_calls", "{:.0f}".format),
        ("device allocations", "device_allocations", "{:.1f}".format),
    )
    title = "one rank; no network is in it"
    tasks_by_name = {str(task): asdict(task) for task in tasks}
    processes = {name: [round_.cases[name] for round_ in rounds] for name in cases}
    document = {"tasks": tasks_by_name, "processes": processes}
    harness.publish(title, columns, rows, options.out, **document)


def gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f}"


def measure_in_new_process(task: Task, _number: int) -> Figures:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(measure, task).result()


def measure(task: Task) -> Figures:
    """One engine's model, on rank 0 of a world that is not there. On a CPU, no memory figures."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415

    dist.init_process_group("fake", rank=0, world_size=task.ranks, store=FakeStore())
    device, on_gpu = torch.device(task.device), task.device == "cuda"
    peak = product_flops(device)
    work = task.work()
    trainee, batch = ENGINES[COMPARED[task.engine]].start(work), work.batch(0, 0)
    step = partial(trainee.step, batch)
    for _ in range(WARM_UP):
        step()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = memory_figures(device)
    seconds = seconds_each(step, task.steps, device)
    after = memory_figures(device)
    counted = ("allocator_calls", "device_allocations")
    memory = {
        name: (value - before[name]) / task.steps if name in counted else value
        for name, value in after.items()
    }
    flops = count_flops(step)
    figures = {
        "tokens_per_second": batch.shape[0] * (batch.shape[1] - 1) / seconds,
        "flops": flops,  # in a step
        "flops_per_second": flops / seconds,
        "peak_flops_per_second": peak,
        "share_of_product": flops / seconds / peak,
        **memory,
        **({"kernel_launches": count_kernels(step)} if on_gpu else {}),
    }
    dist.destroy_process_group()
    return figures


def next_token_loss(net: nn.Module, tokens: Tensor) -> Tensor:
    """``tokens`` [batch, context + 1]."""
    output = net(tokens[:, :-1])
    logits = output if isinstance(output, Tensor) else output.logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def count_flops(step: Callable[[], object]) -> int:
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
    return 2 * width**3 / seconds_each(lambda: one @ one, PRODUCTS, device)


def seconds_each(action: Callable[[], object], times: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        action()
    synchronize(device)
    return (time.perf_counter() - began) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def memory_figures(device: torch.device) -> Figures:
    """Of torch's allocator until now."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    return {
        "allocated_peak": torch.cuda.max_memory_allocated(),
        "reserved_peak": torch.cuda.max_memory_reserved(),
        "allocator_calls": stats["allocation.all.allocated"],
        "device_allocations": stats["segment.all.allocated"],
    }


def count_kernels(step: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    names = [event.name for event in seen.events() or () if event.device_type == on_gpu]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


if __name__ == "__main__":
    main()
