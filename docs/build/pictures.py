"""The drawings of the documentation: ``python -m docs.build.pictures`` writes docs/*.svg.

They are made of the engine's own layouts, schedules and strategies. So does ``make gallery``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path

import torch
from docs.build.drawing import FAINT, INK, RANKS, Drawing
from torch import nn

from shardwise.forecast.time.replay import Costs, Part, Program, replay
from shardwise.plan.granularity import Granularity
from shardwise.plan.layout import Layout, ParameterSpec, lay_out
from shardwise.plan.plan import Plan, make_plan
from shardwise.plan.strategy import PRESETS, AxisPlacement
from shardwise.recording.format import RecordedEvent
from shardwise.schedule.events import COMPUTE, Event, EventKind

DOCS = Path(__file__).parents[2] / "docs"
EMPTY, EDGE = "#eef0f3", "#8a94a3"
NUM_BLOCKS = 4


def main() -> None:
    """Draw all of them."""
    for name, draw in PICTURES.items():
        draw().save(DOCS / name)


# -- sharding.svg: who keeps what of four units, at three moments of a step ------------------------

CELL_WIDTH, CELL_HEIGHT, CELL_STEP, RANK_STEP, MOMENT_STEP = 44, 48, 52, 228, 136
MOMENTS = (
    ("Between steps", "each rank keeps 1/2 of every unit", -1, -1),
    ("Forward of unit 1", "unit 1 is gathered, unit 2 is on its way", 1, 2),
    ("Backward of unit 1", "its gradients are reduced into shards", 1, 0),
)


def sharding() -> Drawing:
    """Two ranks, four units: shards between steps, and what is gathered in forward and backward.

    The moments are below each other, so that a phone shows all of them without scrolling.
    """
    drawing = Drawing(
        460,
        444,
        "Two ranks, four units. Between steps each rank keeps half of every unit. In forward the "
        "unit that computes and the next one are whole on both ranks. In backward its gradients "
        "are reduced into shards while the unit before it is gathered.",
    )
    for rank in range(2):
        middle = 16 + rank * RANK_STEP + 1.5 * CELL_STEP + CELL_WIDTH / 2
        drawing.text(middle, 28, f"rank {rank}", bold=True)
    for number, (title, subtitle, computes, arrives) in enumerate(MOMENTS):
        top = 58 + number * MOMENT_STEP
        drawing.text(16, top, title, size=15, anchor="start", bold=True)
        drawing.text(444, top, subtitle, size=13, anchor="end", color=FAINT)
        for rank, unit in product(range(2), range(4)):
            x = 16 + rank * RANK_STEP + unit * CELL_STEP
            _unit(drawing, x, top + 14, rank, unit == computes, unit == arrives)
            drawing.text(x + CELL_WIDTH / 2, top + 80, f"unit {unit}", size=12, color=FAINT)
    return drawing


def _unit(drawing: Drawing, x: float, y: float, rank: int, computes: bool, arrives: bool) -> None:
    half = CELL_WIDTH / 2
    drawing.rect(x, y, CELL_WIDTH, CELL_HEIGHT, EMPTY)
    for owner in range(2):
        if owner == rank or computes or arrives:
            opacity = 1 if computes or owner == rank else 0.45
            drawing.rect(x + owner * half, y, half, CELL_HEIGHT, RANKS[owner], fill_opacity=opacity)
    outline: dict[str, str | float] = (
        {"stroke": INK, "stroke_width": 3}
        if computes
        else {
            "stroke": EDGE,
            "stroke_width": 1,
        }
    )
    if arrives:
        outline["stroke_dasharray"] = "5 4"
    drawing.rect(x, y, CELL_WIDTH, CELL_HEIGHT, "none", **outline)


# -- buffer.svg: the flat buffer of a unit, cut by element and by row ------------------------------

ELEMENT, LEFT = 27, 60
PARAMETER_COLORS = {"W1": "#cfe0f3", "W2": "#fbe3c8", "b": "#d6ecdf"}


def buffer() -> Drawing:
    """The flat buffer of three parameters on two ranks, and where each rank's shard ends."""
    drawing = Drawing(
        860,
        330,
        "The flat buffer of the parameters W1, W2 and b in rank order. By element, each of two "
        "ranks owns 13 elements, and W1 is cut inside its fifth row. By row, two elements of "
        "padding before W1 have its fourth row end with the shard of rank 0.",
    )
    rows: tuple[tuple[str, Granularity, Granularity], ...] = (
        ('granularity="element": a parameter may be cut anywhere', "element", "element"),
        ('W1 by "row", W2 by "tensor": two elements of padding', "row", "tensor"),
    )
    for number, (title, first, second) in enumerate(rows):
        _buffer(drawing, 44 + number * 150, title, _layout(first, second))
    return drawing


def _layout(first: Granularity, second: Granularity) -> Layout:
    def spec(name: str, shape: tuple[int, ...], granularity: Granularity) -> ParameterSpec:
        return ParameterSpec((name,), shape, "float32", 4, True, granularity)

    parameters = [spec("W1", (5, 3), first), spec("W2", (2, 4), second), spec("b", (3,), "element")]
    return lay_out(parameters, 2, alignment=1)


def _buffer(drawing: Drawing, top: float, title: str, layout: Layout) -> None:
    drawing.text(LEFT, top, title, anchor="start", bold=True)
    owners = {
        extent.offset + index: (extent.parameter, index)
        for extent in layout.extents
        for index in range(extent.parameter.num_elements)
    }
    for place in range(layout.num_elements):
        x = LEFT + place * ELEMENT
        if place not in owners:
            drawing.rect(x, top + 14, ELEMENT, 34, "#ffffff", stroke=EDGE, stroke_dasharray="3 3")
            continue
        parameter, index = owners[place]
        drawing.rect(x, top + 14, ELEMENT, 34, PARAMETER_COLORS[parameter.name], stroke=EDGE)
        drawing.text(x + ELEMENT / 2, top + 35, str(index), size=11.5)
    for extent in layout.extents:
        shape = list(extent.parameter.shape)
        drawing.text(
            LEFT + extent.offset * ELEMENT,
            top + 64,
            f"{extent.parameter.name} {shape}",
            size=12.5,
            anchor="start",
            color=FAINT,
        )
    for rank in range(layout.world_size):
        x, width = LEFT + rank * layout.shard_elements * ELEMENT, layout.shard_elements * ELEMENT
        drawing.rect(x + 1, top + 74, width - 2, 20, RANKS[rank])
        words = f"shard of rank {rank}: {layout.shard_elements} elements"
        drawing.text(x + width / 2, top + 88.5, words, size=12.5, color="#ffffff")


# -- schedule.svg: the events of a step on a clock -------------------------------------------------

LANES = {"compute": 60, "gather": 104, "reduce": 148}
LANE_HEIGHT, CURVE_TOP, CURVE_BOTTOM = 32, 220, 300
# Of compute, by kind and by whether the unit is a block; the root has one small layer in front.
SECONDS = {
    (EventKind.FORWARD, False): 0.6,
    (EventKind.FORWARD, True): 1.0,
    (EventKind.BACKWARD, False): 0.0,
    (EventKind.BACKWARD, True): 2.0,
}
TRANSFER_SECONDS = {EventKind.GATHER: 0.7, EventKind.REDUCE: 0.9}
LANE_COLORS = {
    "forward": "#cfe0f3",
    "backward": "#a9c8ea",
    "gather": "#d6ecdf",
    "reduce": "#fbe3c8",
}


def timeline() -> Drawing:
    """One step of a root with four blocks: compute, gathers and reductions on a clock."""
    drawing = Drawing(
        860,
        330,
        "The timeline of a step in three rows. While a unit computes, the next one is gathered and "
        "the gradients of the one before it are reduced. Below, the memory of gathered units, "
        "which never exceeds the root and two blocks.",
    )
    plan = _small_plan()
    events = _replayed(plan)
    scale = (drawing.width - 90) / max(
        one.spans[0][1] if one.spans else one.ended for one in events
    )
    labels = ["root", *map(str, range(NUM_BLOCKS))]
    drawing.text(80, 34, "time →", anchor="start", size=12.5, color=FAINT)
    for lane, top in LANES.items():
        drawing.text(72, top + 21, lane, anchor="end", bold=True)
    for kind, unit, began, ended in _bars(events):
        lane = kind if kind in LANES else "compute"
        x, width = 80 + began * scale, (ended - began) * scale
        drawing.rect(x, LANES[lane], width, LANE_HEIGHT, LANE_COLORS[kind], stroke=EDGE, rx=3)
        drawing.text(x + width / 2, LANES[lane] + 21, labels[unit], size=12.5)
    turn = min(one.began for one in events if one.event is EventKind.BACKWARD)
    x = 80 + turn * scale
    drawing.line(x, 42, x, 186)
    drawing.text(x - 6, 50, "forward", anchor="end", size=12, color=FAINT)
    drawing.text(x + 6, 50, "backward", anchor="start", size=12, color=FAINT)
    _memory(drawing, events, scale)
    return drawing


def _small_plan() -> Plan:
    with torch.device("meta"):
        blocks = (nn.Linear(8, 8, bias=False) for _ in range(NUM_BLOCKS))
        model = nn.Sequential(nn.Embedding(8, 8), *blocks)
    return make_plan(model, world_size=2, units=nn.Linear)


def _replayed(plan: Plan) -> Sequence[RecordedEvent]:
    """A step with durations that were made up: a backward takes twice as long as a forward."""
    order = [(EventKind.FORWARD, unit) for unit in range(NUM_BLOCKS + 1)]
    order += [(EventKind.BACKWARD, unit) for unit in (0, *range(NUM_BLOCKS, 0, -1))]
    parts = tuple(Part(kind, unit, SECONDS[kind, unit > 0]) for kind, unit in order)
    costs = Costs(lambda kind, _unit: TRANSFER_SECONDS[kind])
    return replay(plan.units, [Program((parts,))], costs, prefetch=plan.prefetch).events[0]


def _bars(events: Sequence[RecordedEvent]) -> Iterator[tuple[str, int, float, float]]:
    """Kind, unit, begin and end of what is drawn."""
    for one in events:
        if one.event in COMPUTE and (seconds := SECONDS[one.event, one.unit > 0]):
            yield one.event.value, one.unit, one.ended, one.ended + seconds
    free_at: defaultdict[EventKind, float] = defaultdict(float)  # the streams, which have an order
    for one in events:
        for launched, ended in one.spans:
            began = max(launched, free_at[one.event])
            free_at[one.event] = ended
            yield one.event.value, one.unit, began, ended


def _memory(drawing: Drawing, events: Sequence[RecordedEvent], scale: float) -> None:
    """The bytes of gathered units as a curve."""
    drawing.text(72, CURVE_TOP + 30, "gathered", anchor="end", bold=True)
    drawing.text(72, CURVE_TOP + 46, "memory", anchor="end", bold=True)
    held = [(0.0, 0)]
    for one in events:
        if change := Event(one.event, one.unit, one.bytes).gathered_change:
            held.append((one.ended, held[-1][1] + change))
    held.append((max(one.ended for one in events), held[-1][1]))
    peak = max(size for _, size in held)
    unit = (CURVE_BOTTOM - CURVE_TOP) / peak
    for (began, size), (ended, _) in pairwise(held):
        if size and ended > began:
            x, height = 80 + began * scale, size * unit
            drawing.rect(x, CURVE_BOTTOM - height, (ended - began) * scale, height, "#d6ecdf")
    drawing.line(80, CURVE_BOTTOM, drawing.width - 10, CURVE_BOTTOM)


# -- strategies.svg: what a rank keeps -------------------------------------------------------------

KINDS = ("parameters", "gradients", "optimizer")
BAR_WIDTH, COLUMN = 170, 200


def strategies() -> Drawing:
    """What one of four ranks keeps from forward to backward under each preset."""
    names = list(PRESETS)
    drawing = Drawing(
        760,
        80 + 46 * len(names),
        "For each strategy, which part of parameters, gradients and optimizer state one of four "
        "ranks keeps: all of them with ddp, and a quarter of each with fsdp.",
    )
    for column, kind in enumerate(KINDS):
        title = "optimizer state" if kind == "optimizer" else kind
        drawing.text(120 + column * COLUMN, 34, title, anchor="start", bold=True)
    for row, name in enumerate(names):
        y = 52 + row * 46
        drawing.text(104, y + 19, name, anchor="end", bold=True)
        for column, kind in enumerate(KINDS):
            x = 120 + column * COLUMN
            share = _share(getattr(PRESETS[name], kind))
            drawing.rect(x, y, BAR_WIDTH, 28, EMPTY, stroke=EDGE)
            drawing.rect(x, y, BAR_WIDTH * share, 28, RANKS[0])
            drawing.text(
                x + 8 if share == 1 else x + BAR_WIDTH * share + 8,
                y + 19,
                "whole" if share == 1 else f"1/{round(1 / share)}",
                anchor="start",
                size=12.5,
                color="#ffffff" if share == 1 else INK,
            )
    words = "one of 4 ranks; hsdp and hfsdp on a mesh of 2 x 2"
    drawing.text(120, drawing.height - 12, words, anchor="start", size=12.5, color=FAINT)
    return drawing


def _share(placements: Sequence[AxisPlacement | str]) -> float:
    """On four ranks: one axis of four, or two of two."""
    sizes = {1: (4,), 2: (2, 2)}[len(placements)]
    share = 1.0
    for placement, size in zip(placements, sizes, strict=True):
        if placement == AxisPlacement.SHARD:
            share /= size
    return share


PICTURES: dict[str, Callable[[], Drawing]] = {
    "sharding.svg": sharding,
    "buffer.svg": buffer,
    "schedule.svg": timeline,
    "strategies.svg": strategies,
}

if __name__ == "__main__":
    main()
