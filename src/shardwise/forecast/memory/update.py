"""Temporaries of an optimizer's update on one rank.

Fused kernels need none. Other updates of torch's allocate tensors like the shards, such as roots of
second moments: with ``foreach`` those of all parameters at once, in a for-loop those of one.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from shardwise.forecast.configuration import Configuration
from shardwise.forecast.states import (
    hidden_matrices,
    is_quantized,
    owner_ranks,
    trained_layouts,
)
from shardwise.forecast.time.owned import SOAP_LARGEST_SIDE, Load, largest_part, returned_copies
from shardwise.optim.matrices import Matrices
from shardwise.plan.layout import Layout, ParameterExtent
from shardwise.plan.optimizers import OptimizerSpec
from shardwise.plan.options import UnitOptions
from shardwise.plan.plan import Plan

__all__ = ["update_bytes"]

_IN_LOOP = 2  # tensors of one parameter: the root, and its quotient
_FLOAT_BYTES = 4


def update_bytes(plan: Plan, configuration: Configuration, *, on_cpu: bool = False) -> int:
    """Return the temporaries of the update, with default options of the optimizer.

    Args:
        plan: the plan of one tensor-parallel rank's part of a pipeline stage.
        configuration: how the model is trained.
        on_cpu: whether owners of matrices compute on the CPU.
    """
    spec = configuration.states
    if spec.has_owners:
        return max(
            _owner_bytes(list(hidden_matrices(plan, own_ranks=own)), ranks, spec, on_cpu=on_cpu)
            for own, ranks in owner_ranks(plan).items()
        )
    brought = [one for unit in plan.units if unit.steps_on_device for one in unit.trainable_layouts]
    layouts = list(trained_layouts(plan, offloaded=False))
    if spec.kind == "blocks":
        return max(_block_bytes([*layouts, *brought], spec), default=0)
    if configuration.optimizer_loop == "fused" or not spec.temporaries:
        return 0
    if configuration.optimizer_loop == "for_loop":
        sizes = _local_bytes([*layouts, *brought])
        return _IN_LOOP * max(sizes, default=0)
    by_unit = brought + layouts * configuration.step_in_backward
    of_unit = max((layout.shard_bytes for layout in by_unit), default=0)
    together = layouts * (not configuration.step_in_backward)
    return spec.temporaries * max(of_unit, sum(layout.shard_bytes for layout in together))


def _local_bytes(layouts: list[Layout]) -> Iterator[int]:
    """Yield the most bytes that a rank holds of each parameter."""
    for layout in layouts:
        for extent in layout.extents:
            yield min(extent.parameter.num_bytes, layout.shard_bytes)


def _block_bytes(layouts: list[Layout], spec: OptimizerSpec) -> Iterator[int]:
    """Yield what `sw.optim.Adam8bit` allocates for each parameter while it encodes an average.

    Gradients are copied to float32 if they have another dtype. The averages, the root, and the
    decayed weights are in float32. To encode an average, it is scaled, and each element is searched
    for in the codebook, which gives an int64 and then a byte; rows that are not a multiple of a
    block are padded before.
    """
    block = spec.states[0].block
    for layout in layouts:
        is_copied = layout.itemsize != _FLOAT_BYTES
        for extent in layout.extents:
            parameter = extent.parameter
            size = min(parameter.num_elements, layout.shard_elements)
            if not is_quantized(parameter, spec):
                yield (3 + is_copied) * _FLOAT_BYTES * size  # the averages are not decoded
                continue
            row = prod(parameter.shape[1:]) or 1
            padded = -(-size // row) * -(-row // block) * block
            scaled = _FLOAT_BYTES * (1 + (row % block > 0)) + 8 + 1
            yield (4 + is_copied) * _FLOAT_BYTES * size + scaled * padded


def _owner_bytes(
    found: Sequence[tuple[Layout, ParameterExtent]],
    ranks: UnitOptions,
    spec: OptimizerSpec,
    *,
    on_cpu: bool,
) -> int:
    """Return the most memory that an owner among ``ranks`` needs for its batches of matrices.

    While it works on a batch, it holds the updates of the batch before, and what it exchanges for
    all three: the one before, this one, and the next (`MatrixExchange` in ``optim/exchange.py``).
    AdamW, which steps the other parameters, is fused.
    """
    is_muon = not spec.side_states
    itemsize = 2 if is_muon and not on_cpu else _FLOAT_BYTES
    sizes = sorted((extent.parameter.num_elements for _, extent in found), reverse=True)
    if not any(sizes):
        return 0
    # Elements that an owner receives of others, and sends back, relative to those of its matrices.
    held = sum(largest_part(layout, extent) for layout, extent in found) / sum(sizes)
    collected, returned = 1 - held, returned_copies(ranks) - held
    matrices = (Matrices(one.parameter.name, one.parameter.shape) for _, one in found)
    work = itemsize * max(_work_elements(one, is_muon=is_muon) for one in matrices)
    if collected or itemsize != _FLOAT_BYTES:  # the owner puts the parts of a matrix together
        work += itemsize * sizes[0]
    contributed = _FLOAT_BYTES * is_muon  # the direction, while SOAP sends the gradient
    if ranks.num_ranks == 1:
        return (contributed + itemsize) * sizes[0] + work
    peak = 0.0
    before = 0  # elements of the last batch
    batches = [*_batches(sizes[:: ranks.num_ranks], itemsize), 0]
    for batch, following in pairwise(batches):
        parts = (batch + following) * (2 * collected * itemsize + contributed * held)
        updates = before * itemsize * (1 + 2 * returned)  # with what is sent and received of them
        own = max(batch * itemsize + work, batch * itemsize * (1 + 2 * returned))
        peak = max(peak, parts + updates + own)
        before = batch
    return round(peak)


def _batches(sizes: Sequence[int], itemsize: int) -> list[int]:
    """Return the elements of an owner's batches, of matrices in descending order of their sizes."""
    num_batches = Load(num_jobs=len(sizes), elements=sum(sizes)).num_batches(itemsize)
    batches = [0] * num_batches
    for position, size in enumerate(sizes):
        batches[position * num_batches // len(sizes)] += size
    return batches


def _work_elements(matrices: Matrices, *, is_muon: bool) -> int:
    """Return the elements that an owner allocates to update a parameter, besides the result."""
    largest = 0
    for stack, m, n in matrices.shapes:
        if is_muon:  # an iterate, and two products over the smaller side
            elements = m * n + 2 * min(m, n) ** 2
        else:  # rotated moments; or covariances, and the improvement of a basis
            sides = [side for side in (m, n) if side <= SOAP_LARGEST_SIDE]
            basis = 4 * max(sides, default=0) ** 2
            elements = max(3 * m * n, m * m + n * n + basis)
        largest = max(largest, stack * elements)
    return largest
