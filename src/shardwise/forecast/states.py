"""Bytes of the optimizer states on one rank."""

from collections.abc import Collection, Iterator
from math import prod

from shardwise.forecast.configuration import Configuration
from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec
from shardwise.plan.optimizers import ASSUMED, OPTIMIZERS, OptimizerSpec
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan

__all__ = ["hidden_matrices", "state_bytes", "stepped_bytes", "trained_layouts"]


def hidden_matrices(plan: Plan) -> Iterator[tuple[Layout, ParameterExtent]]:
    """Yield the matrices that have owners, in the order of the model's parameters."""
    for unit in plan.units:
        if unit.has_child_units:
            continue
        found = {
            extent.parameter.name: (layout, extent)
            for layout in unit.trainable_layouts
            for extent in layout.extents
        }
        for spec in unit.parameters:
            if len(spec.shape) > 1 and spec.name in found:
                yield found[spec.name]


def state_bytes(plan: Plan, configuration: Configuration, *, offloaded: bool) -> int:
    """Return the bytes of the states on the host if ``offloaded``, otherwise on the device.

    Owners of matrices are assumed to be balanced, so the result is a mean over ranks.
    """
    spec = configuration.states
    hidden = {one.parameter.name for _, one in hidden_matrices(plan)} if spec.has_owners else set()
    layouts = trained_layouts(plan, offloaded=offloaded)
    return round(sum(_bytes_of_layout(plan, layout, spec, hidden) for layout in layouts))


def stepped_bytes(unit: UnitPlan, configuration: Configuration) -> int:
    """Return the bytes of the trained shards of ``unit`` and of their states.

    The optimizer has no owners of matrices.
    """
    spec = configuration.states
    return round(
        sum(
            layout.shard_bytes + _bytes_of_layout(None, layout, spec, set())
            for layout in unit.trainable_layouts
        )
    )


def _bytes_of_layout(
    plan: Plan | None, layout: Layout, spec: OptimizerSpec, hidden: Collection[str]
) -> float:
    """Return the bytes of a layout's states; ``hidden`` matrices, of a ``plan``, have owners."""
    if spec.kind == "elements":
        return sum(one.num_bytes(layout.shard_elements, layout.itemsize) for one in spec.states)
    total = 0.0
    for extent in layout.extents:
        if plan is None or not spec.has_owners:
            total += _bytes_of(layout, extent.parameter, spec)
        elif extent.parameter.name not in hidden:
            total += _bytes_of(layout, extent.parameter, OPTIMIZERS[ASSUMED])
        else:
            ranks = plan.num_ranks if spec.side_states else layout.world_size
            total += _matrix_bytes(layout, extent.parameter, spec) / ranks
    return total


def _bytes_of(layout: Layout, parameter: ParameterSpec, spec: OptimizerSpec) -> float:
    """Return the bytes of a parameter's states on one rank, as a mean over ranks."""
    size, shape, itemsize = parameter.num_elements, parameter.shape, layout.itemsize
    if spec.kind == "factored":
        return _factored_bytes(layout, shape)
    states = spec.states
    if spec.kind == "blocks" and (len(shape) < 2 or size < spec.min_elements):  # noqa: PLR2004
        states = OPTIMIZERS[ASSUMED].states
    row = prod(shape[1:])
    return sum(one.num_bytes(size, itemsize, row) for one in states) / layout.world_size


def _matrix_bytes(layout: Layout, parameter: ParameterSpec, spec: OptimizerSpec) -> int:
    """Return the bytes of a hidden matrix's states on all ranks together."""
    shape = parameter.shape
    stack, m, n = (1, shape[0], prod(shape[1:])) if len(shape) != 3 else shape  # noqa: PLR2004
    elements = len(spec.states) * m * n + spec.side_states * (m * m + n * n)
    return stack * elements * layout.itemsize


def _factored_bytes(layout: Layout, shape: tuple[int, ...]) -> int:
    """Return Adafactor's means: per row and column of a matrix, or per element of a vector."""
    if len(shape) < 2:  # noqa: PLR2004 - a vector has no columns
        return prod(shape) * layout.itemsize // layout.world_size
    rows, columns = prod(shape[:-1]), shape[-1]
    return (-(-rows // layout.world_size) + columns) * layout.itemsize


def trained_layouts(plan: Plan, *, offloaded: bool) -> Iterator[Layout]:
    """Yield the layouts whose states are on the host if ``offloaded``, otherwise on the device."""
    for unit in plan.units:
        for layout in unit.trainable_layouts:
            if layout.is_offloaded == offloaded:
                yield layout
