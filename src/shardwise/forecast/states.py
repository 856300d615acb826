"""Bytes of the optimizer states on one rank."""

from collections.abc import Iterator, Mapping
from math import prod

from shardwise.forecast.configuration import Configuration
from shardwise.optim.matrices import Matrices
from shardwise.plan.layout import Layout, ParameterExtent, ParameterSpec
from shardwise.plan.optimizers import ASSUMED, OPTIMIZERS, OptimizerSpec
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan
from shardwise.plan.units import UnitPlan

__all__ = [
    "enclosing_units",
    "hidden_matrices",
    "is_quantized",
    "owner_ranks",
    "state_bytes",
    "stepped_bytes",
    "trained_layouts",
]


def enclosing_units(plan: Plan) -> set[int]:
    """Return the indices of the units around blocks, such as the root.

    A block is not one of them if the only units in it are experts, which have their own ranks.
    """
    return {one.parent for one in plan.units if one.parent is not None and not one.has_own_ranks}


def hidden_matrices(
    plan: Plan, *, own_ranks: bool = False
) -> Iterator[tuple[Layout, ParameterExtent]]:
    """Yield the matrices that have owners, in the order of the model's parameters.

    Args:
        plan: the plan of the model.
        own_ranks: yield those of the units with their own ranks (experts), whose owners are among
            these, and not those of all others.
    """
    enclosing = enclosing_units(plan)
    for index, unit in enumerate(plan.units):
        if index in enclosing or unit.has_own_ranks != own_ranks:
            continue
        found = {
            extent.parameter.name: (layout, extent)
            for layout in unit.trainable_layouts
            for extent in layout.extents
        }
        for spec in unit.parameters:
            if len(spec.shape) > 1 and spec.name in found:
                yield found[spec.name]


def owner_ranks(plan: Plan) -> dict[bool, UnitOptions]:
    """Return options with the ranks among which owners are: of experts (True) and of the rest."""
    return {unit.has_own_ranks: unit.options for unit in plan.units}


def state_bytes(plan: Plan, configuration: Configuration, *, offloaded: bool) -> int:
    """Return the bytes of the states on the host if ``offloaded``, otherwise on the device.

    Owners of matrices are assumed to be balanced, so the result is a mean over ranks.
    """
    spec = configuration.states
    ranks_of = {  # the ranks that share the states of a hidden matrix
        extent.parameter.name: ranks.num_ranks if spec.side_states else layout.world_size
        for own_ranks, ranks in (owner_ranks(plan) if spec.has_owners else {}).items()
        for layout, extent in hidden_matrices(plan, own_ranks=own_ranks)
    }
    layouts = trained_layouts(plan, offloaded=offloaded)
    return round(sum(_bytes_of_layout(layout, spec, ranks_of) for layout in layouts))


def stepped_bytes(unit: UnitPlan, configuration: Configuration) -> int:
    """Return the bytes of the trained shards of ``unit`` and of their states.

    The optimizer has no owners of matrices.
    """
    layouts, spec = unit.trainable_layouts, configuration.states
    return round(sum(one.shard_bytes + _bytes_of_layout(one, spec, {}) for one in layouts))


def _bytes_of_layout(layout: Layout, spec: OptimizerSpec, ranks_of: Mapping[str, int]) -> float:
    """Return the bytes of a layout's states; ``ranks_of`` has the matrices with owners."""
    if spec.kind == "elements":
        return sum(one.num_bytes(layout.shard_elements, layout.itemsize) for one in spec.states)
    total = 0.0
    for parameter in (extent.parameter for extent in layout.extents):
        if parameter.name in ranks_of:
            total += _matrix_bytes(layout, parameter, spec) / ranks_of[parameter.name]
        else:
            total += _bytes_of(layout, parameter, spec)
    return total


def _bytes_of(layout: Layout, parameter: ParameterSpec, spec: OptimizerSpec) -> float:
    """Return the bytes of a parameter's states on one rank, as a mean over ranks."""
    size, shape, itemsize = parameter.num_elements, parameter.shape, layout.itemsize
    if spec.kind == "factored":
        return _factored_bytes(layout, shape)
    has_own = not spec.has_owners and (spec.kind != "blocks" or is_quantized(parameter, spec))
    states = spec.states if has_own else OPTIMIZERS[ASSUMED].states
    row = prod(shape[1:])
    return sum(one.num_bytes(size, itemsize, row) for one in states) / layout.world_size


def is_quantized(parameter: ParameterSpec, spec: OptimizerSpec) -> bool:
    """Whether the states of ``parameter`` are in blocks: not those of vectors and small ones."""
    is_large = parameter.num_elements >= spec.min_elements and len(parameter.shape) > 1
    return is_large and spec.states[0].block > 0


def _matrix_bytes(layout: Layout, parameter: ParameterSpec, spec: OptimizerSpec) -> int:
    """Return the bytes of a hidden matrix's states on all ranks together."""
    elements = sum(
        stack * (len(spec.states) * m * n + spec.side_states * (m * m + n * n))
        for stack, m, n in Matrices(parameter.name, parameter.shape).shapes
    )
    return elements * layout.itemsize


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
