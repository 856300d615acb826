"""Explain the padding that a granularity costs: which parameters cause it, and what reduces it.

Each suggestion is laid out, so the share that it states is exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.plan.granularity import WholeBlocks, Word
from shardwise.plan.layout import Cast, Layout, ParameterExtent, ParameterSpec, lay_out_in_buffers
from shardwise.plan.units import UnitPlan

__all__ = ["REPORT_THRESHOLD", "Padding", "Suggestion", "explain_padding", "padding_report"]

REPORT_THRESHOLD = 0.05  # relative to the parameters
REPORT_THRESHOLD_BYTES = 1 << 20
UNIT_FACTORS = (2, 4, 8, 16)
MAX_PARAMETERS = 500  # larger units are not laid out, because that takes seconds
_FINER: tuple[Word, ...] = ("row", "element")


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change and the padding that it would leave, relative to the parameters."""

    change: str
    share: float

    def __str__(self) -> str:
        return f"{self.change}: {self.share:.1%}"


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding in the buffers of one unit and dtype."""

    elements: int
    bytes: int
    share: float  # relative to the parameters
    world_size: int
    reasons: tuple[str, ...]
    suggestions: tuple[Suggestion, ...]  # that at least halve the padding, the best first

    def __str__(self) -> str:
        head = (
            f"padding {self.share:.1%} of the parameters ({self.elements:,} elements, "
            f"{self.bytes:,} bytes) on {self.world_size} ranks"
        )
        advice = [f"reduce it by {each}" for each in self.suggestions] or ["no change reduces it"]
        return "\n  ".join([head, *self.reasons, *advice])


def explain_padding(layouts: Sequence[Layout]) -> Padding:
    """Explain the padding of ``layouts``, which belong to one unit and dtype."""
    elements = sum(layout.padding_elements for layout in layouts)
    return Padding(
        elements=elements,
        bytes=elements * layouts[0].itemsize,
        share=_share(layouts),
        world_size=layouts[0].world_size,
        reasons=tuple(reason for layout in layouts for reason in _reasons(layout)),
        suggestions=tuple(_suggestions(layouts)),
    )


def padding_report(units: Iterable[UnitPlan]) -> str:
    """Explain padding above the thresholds, once for equal units; "" if there is none."""
    equal: dict[object, list[tuple[str, list[Layout]]]] = {}
    for unit in units:
        for layouts in _by_kind(unit):
            key = tuple((spec.shape, spec.dtype, spec.granularity) for spec in _specs(layouts))
            equal.setdefault(key, []).append((unit.label, layouts))
    lines = []
    for (label, layouts), *others in equal.values():
        num_bytes = sum(layout.padding_elements * layout.itemsize for layout in layouts)
        if num_bytes >= REPORT_THRESHOLD_BYTES and _share(layouts) >= REPORT_THRESHOLD:
            more = f" and {len(others)} equal units" if others else ""
            lines.append(f"{label}{more}: {explain_padding(layouts)}")
    return "\n".join(lines)


# -- reasons -------------------------------------------------------------------------------------


def _reasons(layout: Layout) -> Iterator[str]:
    """Describe the parameters that make shards longer than needed, one for each granule size."""
    shard, needed = layout.shard_elements, -(-layout.parameter_elements // layout.world_size)
    if not layout.padding_elements:
        return
    forced: dict[int, list[ParameterExtent]] = {}
    for extent in layout.extents:
        granule = min(extent.parameter.granule_elements, extent.parameter.num_elements)
        if granule > max(1, needed) or (granule > 1 and layout.boundaries_inside(extent) > 1):
            forced.setdefault(granule, []).append(extent)
    for granule, extents in sorted(forced.items(), reverse=True):
        spec, num_boundaries = extents[0].parameter, layout.boundaries_inside(extents[0])
        why = (
            f"spans {num_boundaries + 1} ranks, so the shard length is a multiple of its granule, "
            f"{granule:,} elements"
            if num_boundaries > 1
            else f"has granules of {granule:,} elements, and a shard must hold at least one"
        )
        more = f" (and {len(extents) - 1} more)" if len(extents) > 1 else ""
        yield f"{spec.name} {list(spec.shape)} by {spec.granularity}{more} {why}"
    yield f"shards have {shard:,} elements; {needed:,} would hold the parameters"


# -- suggestions ---------------------------------------------------------------------------------


def _suggestions(layouts: Sequence[Layout]) -> list[Suggestion]:
    """The changes that at least halve the padding, the best first."""
    specs, world_size, share = _specs(layouts), layouts[0].world_size, _share(layouts)
    if share == 0:
        return []
    coarse = [spec.name for spec in specs if spec.granule_elements > 1]
    granules = sorted({spec.granule_elements for spec in specs} - {1}, reverse=True)
    coarsest_first = [
        [spec.name for spec in specs if spec.granule_elements == granule] for granule in granules
    ]
    kinds = (
        (finer for names in coarsest_first for finer in _finer(specs, names, world_size)),
        _finer(specs, coarse, world_size),
        _larger_units(specs, world_size),
        _smaller_groups(specs, world_size),
    )
    found = [best for kind in kinds if (best := _least_change(kind)) is not None]
    halved = {s.change: s for s in found if s.share <= share / 2}
    return sorted(halved.values(), key=lambda suggestion: suggestion.share)


def _least_change(suggestions: Iterable[Suggestion]) -> Suggestion | None:
    """The first suggestion that leaves padding below the threshold, or else the best one."""
    best: Suggestion | None = None
    for suggestion in suggestions:
        if best is None or suggestion.share < best.share:
            best = suggestion
        if suggestion.share < REPORT_THRESHOLD:
            break
    return best


def _finer(
    specs: Sequence[ParameterSpec], names: Sequence[str], world_size: int
) -> Iterator[Suggestion]:
    for granularity in _FINER:
        finer = [_with_granularity(s, granularity) if s.name in names else s for s in specs]
        if sum(s.granule_elements for s in finer) < sum(s.granule_elements for s in specs):
            shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            share = _share(lay_out_in_buffers(finer, world_size))
            yield Suggestion(f"granularity {granularity!r} for {shown}", share)


def _with_granularity(spec: ParameterSpec, granularity: Word) -> ParameterSpec:
    in_blocks = isinstance(spec.granularity, WholeBlocks)
    return replace(spec, granularity=WholeBlocks(granularity) if in_blocks else granularity)


def _larger_units(specs: Sequence[ParameterSpec], world_size: int) -> Iterator[Suggestion]:
    for factor in UNIT_FACTORS:
        if factor * len(specs) > MAX_PARAMETERS:
            return
        copies = [replace(s, names=(f"{i}.{s.name}",)) for i in range(factor) for s in specs]
        share = _share(lay_out_in_buffers(copies, world_size))
        yield Suggestion(f"units of {factor} such modules", share)


def _smaller_groups(specs: Sequence[ParameterSpec], world_size: int) -> Iterator[Suggestion]:
    for size in range(world_size // 2, 1, -1):
        if world_size % size == 0:
            mesh = f"({world_size // size}, {size})"
            change = f"strategy 'hsdp' on a mesh of {mesh}, groups of {size} ranks"
            yield Suggestion(change, _share(lay_out_in_buffers(specs, size)))


def _share(layouts: Sequence[Layout]) -> float:
    parameters = sum(layout.parameter_elements for layout in layouts)
    padding = sum(layout.padding_elements for layout in layouts)
    return padding / parameters if parameters else 0.0


def _specs(layouts: Sequence[Layout]) -> list[ParameterSpec]:
    return [extent.parameter for layout in layouts for extent in layout.extents]


def _by_kind(unit: UnitPlan) -> list[list[Layout]]:
    """The layouts of ``unit``, grouped by dtype, cast and trainability."""
    kinds: dict[tuple[str, Cast, bool], list[Layout]] = {}
    for layout in unit.layouts:
        kind = (layout.dtype, layout.cast, layout.trainable)
        kinds.setdefault(kind, []).append(layout)
    return list(kinds.values())
