"""Bytes of the optimizer states on one rank."""

from collections.abc import Collection, Iterator
from math import prod

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.owned import hidden_matrices
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan

__all__ = ["state_bytes", "trained_layouts"]

# Blocks of the 8-bit optimizers have one float32 scale each.
_BLOCK_ELEMENTS = 256
# State per element: number of values of the parameter's dtype, and additional bytes.
_STATES = {
    "adamw": (2, 0.0),
    "adamw8bit": (0, 2 * (1 + 4 / _BLOCK_ELEMENTS)),
    "lion": (1, 0.0),
    "sgd": (0, 0.0),
    "sgd_momentum": (1, 0.0),
}


def state_bytes(plan: Plan, configuration: Configuration, *, offloaded: bool) -> int:
    """Return the bytes of the states on the host if ``offloaded``, otherwise on the device."""
    total, hidden = 0, {extent.parameter.name for _, extent in hidden_matrices(plan)}
    for layout in trained_layouts(plan, offloaded=offloaded):
        match configuration.optimizer:
            case "adafactor":
                total += sum(_factored_bytes(layout, one.parameter.shape) for one in layout.extents)
            case "muon" | "soap":
                total += _matrix_optimizer_bytes(plan, layout, configuration.optimizer, hidden)
            case other:
                copies, num_bytes = _STATES[other]
                total += copies * layout.shard_bytes + round(num_bytes * layout.shard_elements)
    return total


def _matrix_optimizer_bytes(
    plan: Plan, layout: Layout, optimizer: str, hidden: Collection[str]
) -> int:
    """Return the bytes of Muon's momentum or SOAP's states, and of AdamW's for other parameters."""
    total = 0.0
    for one in layout.extents:
        shape, here = one.parameter.shape, one.parameter.num_bytes / layout.world_size
        if one.parameter.name not in hidden:  # vectors and embeddings: AdamW
            total += 2 * here
        elif optimizer == "muon":
            total += here
        else:  # SOAP's two moments, and a covariance and its basis per side; balanced over ranks
            stack, m, n = (1, shape[0], prod(shape[1:])) if len(shape) != 3 else shape  # noqa: PLR2004
            total += 2 * stack * (m * n + m * m + n * n) * layout.itemsize / plan.num_ranks
    return round(total)


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
