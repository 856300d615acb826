"""``python -m benchmarks.padding``: what each granularity costs in padding, block by block.

One transformer block is one unit, with parameters of float32. The padding is relative to the
parameters. *in one* is the best of one flat buffer, *common multiple* that of shards which are
whole numbers of every granule; *planned* is what `sw.fully_shard` does, in one buffer or two.

Shapes [out, in], from the configurations that are published with the weights: Llama-3-8B (hidden
4096, 32 heads, 8 key-value heads, intermediate 14336), Qwen2-7B (3584, 28, 4, 18944; biases on q,
k, v), GPT-OSS-20B (2880, 64 heads of 64, 8 key-value heads, 32 experts of intermediate 2880, fused
as [experts, in, out]).
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import lcm
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shardwise.plan.granularity import Granularity, block
from shardwise.plan.layout import Layout, ParameterSpec, lay_out, lay_out_in_buffers
from shardwise.plan.packing import pack
from shardwise.plan.padding import REPORT_THRESHOLD, explain_padding

Shapes = Mapping[str, tuple[int, ...]]

LLAMA_8B: Shapes = {
    "input_norm.weight": (4096,),
    "q.weight": (4096, 4096),
    "k.weight": (1024, 4096),
    "v.weight": (1024, 4096),
    "o.weight": (4096, 4096),
    "post_norm.weight": (4096,),
    "gate.weight": (14336, 4096),
    "up.weight": (14336, 4096),
    "down.weight": (4096, 14336),
}
QWEN2_7B: Shapes = {
    "input_norm.weight": (3584,),
    "q.weight": (3584, 3584),
    "q.bias": (3584,),
    "k.weight": (512, 3584),
    "k.bias": (512,),
    "v.weight": (512, 3584),
    "v.bias": (512,),
    "o.weight": (3584, 3584),
    "post_norm.weight": (3584,),
    "gate.weight": (18944, 3584),
    "up.weight": (18944, 3584),
    "down.weight": (3584, 18944),
}
GPT_OSS_20B: Shapes = {
    "input_norm.weight": (2880,),
    "sinks": (64,),
    "q.weight": (4096, 2880),
    "q.bias": (4096,),
    "k.weight": (512, 2880),
    "k.bias": (512,),
    "v.weight": (512, 2880),
    "v.bias": (512,),
    "o.weight": (2880, 4096),
    "o.bias": (2880,),
    "post_norm.weight": (2880,),
    "router.weight": (32, 2880),
    "router.bias": (32,),
    "experts.gate_up": (32, 2880, 5760),
    "experts.gate_up_bias": (32, 5760),
    "experts.down": (32, 2880, 2880),
    "experts.down_bias": (32, 2880),
}
BLOCKS: dict[str, Shapes] = {
    "Llama-3-8B": LLAMA_8B,
    "Qwen2-7B": QWEN2_7B,
    "GPT-OSS-20B": GPT_OSS_20B,
}
RANKS = (8, 64, 512, 1024)
GRANULARITIES: tuple[Granularity, ...] = ("element", "row", block(4), "tensor")
TURNS = 5  # of which the median time is told


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; paddings are relative to the parameters."""

    block: str
    granularity: str
    ranks: int
    planned: float
    buffers: int
    in_one: float
    common_multiple: float
    seconds: float
    way_out: str  # the best, and what it leaves; "" where little is to be saved


def main() -> None:
    """Parse the command line, plan, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.padding", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    figures = list(measure())
    Console(width=150).print(as_table(figures))
    if options.out is not None:
        lines = ",\n".join(json.dumps(asdict(figure)) for figure in figures)
        options.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def measure() -> Iterator[Figure]:
    """Plan every block by every granularity on every number of ranks."""
    for name, shapes in BLOCKS.items():
        for granularity in GRANULARITIES:
            specs = as_specs(shapes, granularity)
            for ranks in RANKS:
                yield figure(name, specs, ranks)


def figure(name: str, specs: list[ParameterSpec], ranks: int) -> Figure:
    """Plan one block, and compare."""
    seconds = []
    for _ in range(TURNS):
        pack.cache_clear()
        began = time.perf_counter()
        layouts = lay_out_in_buffers(specs, ranks)
        seconds.append(time.perf_counter() - began)
    elements = sum(spec.num_elements for spec in specs)
    suggestions = (
        explain_padding(layouts).suggestions if _padding(layouts) > REPORT_THRESHOLD else ()
    )
    return Figure(
        block=name,
        granularity=str(specs[0].granularity),
        ranks=ranks,
        planned=_padding(layouts),
        buffers=len(layouts),
        in_one=_padding((lay_out(specs, ranks),)),
        common_multiple=with_common_multiple(specs, ranks) * ranks / elements - 1,
        seconds=statistics.median(seconds),
        way_out=str(suggestions[0]) if suggestions else "",
    )


def as_specs(shapes: Shapes, granularity: Granularity) -> list[ParameterSpec]:
    """The parameters of a block."""
    return [
        ParameterSpec((name,), shape, "float32", 4, trainable=True, granularity=granularity)
        for name, shape in shapes.items()
    ]


def with_common_multiple(specs: list[ParameterSpec], ranks: int) -> int:
    """The length of shards that are whole numbers of every granule, whatever lies where."""
    granules = [min(spec.granule_elements, spec.num_elements) for spec in specs]
    multiple = lcm(4, *granules)
    elements = sum(spec.num_elements for spec in specs)
    return -(-elements // (ranks * multiple)) * multiple


def as_table(figures: list[Figure]) -> Table:
    """The figures, one line each, blocks apart."""
    table = Table("block", "granularity", title="padding, relative to the parameters")
    for heading in ("ranks", "planned", "buffers", "in one", "common multiple", "planned in"):
        table.add_column(heading, justify="right")
    table.add_column("the best way out, and what it leaves")
    for i, one in enumerate(figures):
        ends_block = i + 1 == len(figures) or figures[i + 1].granularity != one.granularity
        table.add_row(
            one.block,
            one.granularity,
            f"{one.ranks:,}",
            _percent(one.planned),
            str(one.buffers),
            _percent(one.in_one),
            _percent(one.common_multiple),
            f"{1000 * one.seconds:.1f} ms",
            one.way_out,
            end_section=ends_block,
        )
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 10 else f"{100 * share:,.0f} %"  # noqa: PLR2004


def _padding(layouts: tuple[Layout, ...]) -> float:
    elements = sum(layout.parameter_elements for layout in layouts)
    return sum(layout.num_elements for layout in layouts) / elements - 1


if __name__ == "__main__":
    main()
