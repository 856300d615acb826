"""``python -m benchmarks.padding``: the padding of each granularity, by model.

Each unit is one transformer block with float32 parameters. Padding is relative to the parameters.
*planned* is the padding of `sw.fully_shard`, in one or two flat buffers; *in one* that of the best
single flat buffer; *common multiple* that of shards whose length is a multiple of every granule.

Shapes are [out, in], from the configurations published with the weights.
"""

import statistics
import time
from collections.abc import Mapping
from math import lcm
from typing import Any

from benchmarks import make_parser, print_figures
from shardwise.features.padding import REPORT_THRESHOLD, explain_padding
from shardwise.plan.granularity import Granularity, block
from shardwise.plan.layout import Layout, ParameterSpec, lay_out, lay_out_in_buffers
from shardwise.plan.packing import pack

Shapes = Mapping[str, tuple[int, ...]]
RANKS = (8, 64, 512, 1024)
GRANULARITIES: tuple[Granularity, ...] = ("element", "row", block(4), "tensor")
TURNS = 5  # number of times that each plan is timed


def attention(hidden: int, queries: int, keys: int, *biases: str) -> Shapes:
    """Return the norms and the four projections of attention."""
    rows = {"q": queries, "k": keys, "v": keys, "o": hidden}
    shapes: dict[str, tuple[int, ...]] = {"input_norm.weight": (hidden,)}
    for name, size in rows.items():
        shapes[f"{name}.weight"] = (size, queries if name == "o" else hidden)
        if name in biases:
            shapes[f"{name}.bias"] = (size,)
    return shapes | {"post_norm.weight": (hidden,)}


def mlp(hidden: int, inner: int) -> Shapes:
    up, down = (inner, hidden), (hidden, inner)
    return {"gate.weight": up, "up.weight": up, "down.weight": down}


BLOCKS: dict[str, Shapes] = {
    "Llama-3-8B": {**attention(4096, 4096, 1024), **mlp(4096, 14336)},
    "Qwen2-7B": {**attention(3584, 3584, 512, "q", "k", "v"), **mlp(3584, 18944)},
    "GPT-OSS-20B": {  # 32 experts, fused as [experts, in, out]
        **attention(2880, 4096, 512, "q", "k", "v", "o"),
        "sinks": (64,),
        "router.weight": (32, 2880),
        "router.bias": (32,),
        "experts.gate_up": (32, 2880, 5760),
        "experts.gate_up_bias": (32, 5760),
        "experts.down": (32, 2880, 2880),
        "experts.down_bias": (32, 2880),
    },
}


def main() -> None:
    """Plan every block and print the padding."""
    options = make_parser("padding", __doc__).parse_args()
    rows = {
        f"{name}, {granularity}, {ranks:,} ranks": measure(as_specs(shapes, granularity), ranks)
        for name, shapes in BLOCKS.items()
        for granularity in GRANULARITIES
        for ranks in RANKS
    }
    columns = (
        ("planned", "planned", percent),
        ("buffers", "buffers", str),
        ("in one", "in_one", percent),
        ("common multiple", "common_multiple", percent),
        ("time to plan, ms", "seconds", lambda seconds: f"{1e3 * seconds:.1f}"),
        ("best suggestion, and its padding", "suggestion", str),
    )
    print_figures("padding, relative to the parameters", columns, rows, options.out)


def measure(specs: list[ParameterSpec], ranks: int) -> dict[str, Any]:
    """Plan one block; paddings are relative to the parameters."""
    seconds = []
    for _ in range(TURNS):
        pack.cache_clear()
        began = time.perf_counter()
        layouts = lay_out_in_buffers(specs, ranks)
        seconds.append(time.perf_counter() - began)
    elements = sum(spec.num_elements for spec in specs)
    planned = padding(layouts)
    suggestions = explain_padding(layouts).suggestions if planned > REPORT_THRESHOLD else ()
    return {
        "planned": planned,
        "buffers": len(layouts),
        "in_one": padding((lay_out(specs, ranks),)),
        "common_multiple": with_common_multiple(specs, ranks) * ranks / elements - 1,
        "seconds": statistics.median(seconds),
        "suggestion": str(suggestions[0]) if suggestions else "",
    }


def as_specs(shapes: Shapes, granularity: Granularity) -> list[ParameterSpec]:
    """Return the specs of a block's parameters."""
    return [
        ParameterSpec((name,), shape, "float32", 4, trainable=True, granularity=granularity)
        for name, shape in shapes.items()
    ]


def with_common_multiple(specs: list[ParameterSpec], ranks: int) -> int:
    """Return the length of shards that are a multiple of every granule."""
    granules = [min(spec.granule_elements, spec.num_elements) for spec in specs]
    multiple = lcm(8, *granules)
    elements = sum(spec.num_elements for spec in specs)
    return -(-elements // (ranks * multiple)) * multiple


def padding(layouts: tuple[Layout, ...]) -> float:
    elements = sum(layout.parameter_elements for layout in layouts)
    return sum(layout.num_elements for layout in layouts) / elements - 1


def percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 10 else f"{100 * share:,.0f} %"  # noqa: PLR2004


if __name__ == "__main__":
    main()
