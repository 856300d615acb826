"""What padding a granularity costs, which parameter forces it, and what would avoid it.

Every way out is planned, so the share that stands beside it is what it would really bring.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.plan.granularity import Granularity
from shardwise.plan.layout import Cast, Layout, ParameterExtent, ParameterSpec, lay_out_in_buffers
from shardwise.plan.units import UnitPlan

__all__ = ["REPORT_THRESHOLD", "Padding", "Suggestion", "explain_padding", "padding_report"]

REPORT_THRESHOLD = 0.05  # of the parameters' size
REPORT_THRESHOLD_BYTES = 1 << 20
UNIT_FACTORS = (2, 4, 8, 16)
_FINER: tuple[Granularity, ...] = ("row", "element")
MANY_PARAMETERS = 500  # units that would be larger are not planned, for that takes seconds


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change, and the padding that would be left, relative to the parameters."""

    change: str
    share: float

    def __str__(self) -> str:
        return f"{self.change}: {self.share:.1%}"


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding of the buffers of one unit and dtype: its size, its reasons, the ways out."""

    elements: int
    bytes: int
    share: float  # relative to the parameters
    world_size: int
    reasons: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]  # those that at least halve it, the best first

    def __str__(self) -> str:
        head = (
            f"padding {self.share:.1%} of the parameters ({self.elements:,} elements, "
            f"{self.bytes:,} bytes) on {self.world_size} ranks"
        )
        ways = [f"or {way}" for way in self.suggestions] or ["no way out was found"]
        return "\n  ".join([head, *self.reasons, *ways])


def explain_padding(layouts: Sequence[Layout]) -> Padding:
    """Why ``layouts``, those of one unit and dtype, have padding, and what would avoid it."""
    elements = sum(layout.padding_elements for layout in layouts)
    share = _share(layouts)
    return Padding(
        elements=elements,
        bytes=elements * layouts[0].itemsize,
        share=share,
        world_size=layouts[0].world_size,
        reasons=tuple(reason for layout in layouts for reason in _reasons(layout)),
        suggestions=tuple(_ways_out(layouts, share)),
    )


def padding_report(units: Iterable[UnitPlan]) -> str:
    """The paddings that are worth a word, units that are alike together; "" if there are none."""
    alike: dict[object, list[tuple[str, list[Layout]]]] = {}
    for unit in units:
        for layouts in _by_kind(unit):
            specs = [extent.parameter for layout in layouts for extent in layout.extents]
            key = tuple((spec.shape, spec.dtype, spec.granularity) for spec in specs)
            alike.setdefault(key, []).append((unit.label, layouts))
    told = []
    for (label, layouts), *others in alike.values():
        if _is_worth_a_word(layouts):
            more = f" and {len(others)} like it" if others else ""
            told.append(f"{label}{more}: {explain_padding(layouts)}")
    return "\n".join(told)


# -- reasons -------------------------------------------------------------------------------------


def _reasons(layout: Layout) -> Iterator[str]:
    """What the law demands of S beyond what the parameters take; one parameter a granule."""
    shard, needed = layout.shard_elements, -(-layout.parameter_elements // layout.world_size)
    if not layout.padding_elements:
        return
    forced: dict[int, list[ParameterExtent]] = {}
    for extent in layout.extents:
        granule = min(extent.parameter.granule_elements, extent.parameter.num_elements)
        if granule > max(1, needed) or (granule > 1 and layout.boundaries_inside(extent) > 1):
            forced.setdefault(granule, []).append(extent)
    for granule, extents in sorted(forced.items(), reverse=True):
        ranks = layout.boundaries_inside(extents[0]) + 1
        why = (
            f"lies on {ranks} ranks, so shards are multiples of its granule, {granule:,} elements"
            if ranks > 2  # noqa: PLR2004 (the law)
            else f"has granules of {granule:,} elements, and a shard has to hold one"
        )
        more = f" (and {len(extents) - 1} more)" if len(extents) > 1 else ""
        yield f"{_shown(extents[0].parameter)}{more} {why}"
    yield f"shards have {shard:,} elements, {needed:,} would hold the parameters"


def _shown(spec: ParameterSpec) -> str:
    return f"{spec.name} {list(spec.shape)} by {spec.granularity}"


# -- ways out ------------------------------------------------------------------------------------


def _ways_out(layouts: Sequence[Layout], share: float) -> list[Suggestion]:
    """The changes that at least halve the padding, each planned; the best first."""
    specs = [extent.parameter for layout in layouts for extent in layout.extents]
    world_size = layouts[0].world_size
    if share == 0 or not sum(spec.num_elements for spec in specs):
        return []
    kinds = (_finer, _all_finer, _larger_units, _smaller_groups)
    found = [_least_change(kind(specs, world_size)) for kind in kinds]
    ways = {way.change: way for way in found if way is not None and way.share <= share / 2}
    return sorted(ways.values(), key=lambda way: way.share)


def _least_change(ways: Iterator[Suggestion]) -> Suggestion | None:
    """The first way that leaves no padding worth a word, or else the best one."""
    best: Suggestion | None = None
    for way in ways:
        if way.share < REPORT_THRESHOLD:
            return way
        best = way if best is None or way.share < best.share else best
    return best


def _finer(specs: Sequence[ParameterSpec], world_size: int) -> Iterator[Suggestion]:
    """A finer granularity for the parameters of one granule, the coarsest first."""
    for granule in sorted({spec.granule_elements for spec in specs} - {1}, reverse=True):
        names = [spec.name for spec in specs if spec.granule_elements == granule]
        yield from _with_finer(specs, names, world_size)


def _all_finer(specs: Sequence[ParameterSpec], world_size: int) -> Iterator[Suggestion]:
    yield from _with_finer(specs, [s.name for s in specs if s.granule_elements > 1], world_size)


def _with_finer(
    specs: Sequence[ParameterSpec], names: Sequence[str], world_size: int
) -> Iterator[Suggestion]:
    for granularity in _FINER:
        finer = [replace(s, granularity=granularity) if s.name in names else s for s in specs]
        if sum(s.granule_elements for s in finer) >= sum(s.granule_elements for s in specs):
            continue
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        change = f"granularity {granularity!r} for {shown}"
        yield Suggestion(change, _share(lay_out_in_buffers(finer, world_size)))


def _larger_units(specs: Sequence[ParameterSpec], world_size: int) -> Iterator[Suggestion]:
    for factor in UNIT_FACTORS:
        if factor * len(specs) > MANY_PARAMETERS:
            return
        several = [
            replace(spec, names=(f"{i}.{spec.name}",)) for i in range(factor) for spec in specs
        ]
        share = _share(lay_out_in_buffers(several, world_size))
        yield Suggestion(f"units of {factor} such modules", share)


def _smaller_groups(specs: Sequence[ParameterSpec], world_size: int) -> Iterator[Suggestion]:
    sizes = [size for size in range(world_size // 2, 1, -1) if world_size % size == 0]
    for size in sizes:
        mesh = f"({world_size // size}, {size})"
        change = f"strategy 'hsdp' on a mesh of {mesh}, groups of {size} ranks"
        yield Suggestion(change, _share(lay_out_in_buffers(specs, size)))


def _share(layouts: Sequence[Layout]) -> float:
    parameters = sum(layout.parameter_elements for layout in layouts)
    padding = sum(layout.padding_elements for layout in layouts)
    return padding / parameters if parameters else 0.0


def _by_kind(unit: UnitPlan) -> list[list[Layout]]:
    """Layouts of one dtype and trainability together."""
    kinds: dict[tuple[str, Cast, bool], list[Layout]] = {}
    for layout in unit.layouts:
        kind = (layout.dtype, layout.cast, layout.extents[0].parameter.trainable)
        kinds.setdefault(kind, []).append(layout)
    return list(kinds.values())


def _is_worth_a_word(layouts: Sequence[Layout]) -> bool:
    """Whether padding is more than rounding: in share, and in bytes."""
    num_bytes = sum(layout.padding_elements * layout.itemsize for layout in layouts)
    return num_bytes >= REPORT_THRESHOLD_BYTES and _share(layouts) >= REPORT_THRESHOLD
