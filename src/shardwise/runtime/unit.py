"""Units: parameters that are gathered and freed together, and their gradients.

A unit has one `FlatParameters` per layout: the persistent ``shard`` [S] that the parameters view,
and buffers that have memory only while they are used::

    between steps   shard [S]   p = ShardedTensor(run of shard)
    in use          buffer [world_size * S], dense parameters view it    <- all-gather of shards
    gathered again  part [world_size * S / subgroup]                     -> all-gather in subgroup
    in backward     gradients [world_size * S], one extent per parameter -> reduce-scatter
    after it        gradient shard [S]   p.grad = ShardedTensor(run of it)
"""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from shardwise.comm.api import SMALL_BYTES, Work
from shardwise.comm.communicator import Collectives, Communicator
from shardwise.comm.device import copy_
from shardwise.comm.quantized import quantized_gather
from shardwise.errors import StepError
from shardwise.plan.layout import Layout
from shardwise.plan.options import UnitSettings
from shardwise.plan.units import UnitPlan
from shardwise.runtime.codecs import GatheredBuffer, HostCodec, RunCodec, SlotCodec
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.memory import Pools
from shardwise.runtime.offload import HostOffloader
from shardwise.runtime.parameters import FSDPParameter, reclaim_locals
from shardwise.tensor.mesh import DataParallelMesh

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FlatParameters", "Unit"]

SMALL_UNIT_BYTES = SMALL_BYTES  # for each rank; shared memory needs one more message


class FlatParameters:
    """The parameters of one layout."""

    # Of parameters whose classes define what is gathered. Set by `features.extensions`.
    extension_codec: ClassVar[Callable[..., SlotCodec]]

    def __init__(
        self,
        layout: Layout,
        mesh: DataParallelMesh,
        pools: Pools,
        plan: UnitPlan,
        settings: UnitSettings,
        offloader: HostOffloader | None = None,
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.is_whole = not layout.needs_gather  # the shard is the buffer: nothing to gather
        self.parameters: list[FSDPParameter] = []  # in the order of the layout's extents
        self._plan = plan
        self._blocks = plan.gather_blocks(layout)
        is_small = layout.gathered_bytes <= SMALL_UNIT_BYTES * layout.world_size
        # Ranks outside the unit could reuse shared memory while some of its ranks still read it.
        is_private = plan.subgroup or plan.has_own_ranks or is_small or self._blocks
        self._pool = pools.own if is_private else pools.gathered
        self._part: Tensor | None = None  # [world_size * S / subgroup]
        self.codec: SlotCodec
        if layout.is_extended:
            precision = plan.options.precision
            self.codec = self.extension_codec(self.parameters, mesh, pools.own, precision)
        elif offloader is None:
            self.codec = RunCodec(layout, mesh.rank, self._pool, pools.own)
        else:
            self.codec = HostCodec(layout, mesh.rank, self._pool, pools.own, offloader)
        self.held: GatheredBuffer | None = None  # of `sw.gathered`, between steps
        self.gradients: Gradients | None = None
        if layout.trainable:
            self.gradients = Gradients(
                layout,
                self.parameters,
                mesh,
                pools,
                plan,
                settings,
                offloader if plan.offloads_gradients else None,
            )

    @property
    def gathered_bytes(self) -> int:
        """Bytes of gathered parameters now, including those that `sw.gathered` holds."""
        buffers = (self.codec.buffer, self.held)
        return sum(one.num_bytes for one in buffers if one is not None and one.is_acquired)

    def launch_gather(self, collectives: Collectives, label: str) -> Work:
        part, buffer = self._part, self.codec.buffer
        if part is None:
            self.reclaim_locals()
        buffer.acquire()
        if part is not None:
            subgroup = self.mesh.subgroup(self._plan.subgroup)
            own = buffer.flat.view(subgroup.size, -1)[subgroup.index]
            return collectives.all_gather(buffer.flat, subgroup, label, partial(copy_, own, part))
        fill, shards = self.codec.fill(buffer.slot_of(self.mesh.rank)), self.mesh.shards
        if self._blocks is not None:
            return quantized_gather(collectives, self._blocks, buffer.flat, shards, label, fill)
        return collectives.all_gather(buffer.flat, shards, label, fill, buffer.shared_buffer())

    def finish_gather(self) -> None:
        """Make the gathered values visible in the dense parameters, after the collective."""
        FSDPParameter.allow_reads(self.parameters)
        self.codec.buffer.unpack()

    def use_sharded(self) -> list[str]:
        """Put the sharded parameters back; the names of those that a program has replaced."""
        assigned = [parameter.name for parameter in self.parameters if parameter.use_sharded()]
        if self.is_whole:
            self.restore_views()
        return assigned

    def restore_views(self) -> list[str]:
        """Let dense parameters whose memory was replaced view the buffer again; their names.

        Their values are kept if the buffer is the shard, and lost otherwise.
        """
        pairs = zip(self.parameters, self.codec.buffer.views, strict=False)
        return [one.name for one, view in pairs if one.restore(view, keeps_values=self.is_whole)]

    def lost_changes(self) -> list[str]:
        """The names of gathered parameters that were changed in place, before they are freed."""
        replaced = self.restore_views()
        can_compare = self.codec.buffer.is_acquired and self.codec.buffer.views
        # Only after a change: on an accelerator, comparing values waits for the device.
        return replaced + [
            parameter.name
            for parameter in self.parameters
            if parameter.forget_changes() and not (can_compare and parameter.is_as_gathered())
        ]

    def free(self) -> None:
        """Free the gathered parameters, if there are any."""
        if self.codec.buffer.is_acquired:
            self.codec.buffer.release()

    def launch_subgroup_part(self, collectives: Collectives, label: str) -> Work | None:
        """Make the part of the parameters that a gather within the subgroup begins with.

        With a two-level gather it is gathered over the column, before `launch_gather`; otherwise it
        is copied from the buffer, after a gather over all ranks.
        """
        if not self.codec.can_split:
            return None  # all ranks gather these parameters again
        buffer, size = self.codec.buffer, self.layout.num_elements // self._plan.subgroup
        name = f"part for {self.layout.extents[0].parameter.name}"
        self._part = part = self._pool.allocate_tensor(size, buffer.flat.dtype, name)
        if not self._plan.two_level_gather:
            subgroup = self.mesh.subgroup(self._plan.subgroup)
            buffer.pack()
            copy_(part, buffer.flat.view(subgroup.size, -1)[subgroup.index])
            return None
        self.reclaim_locals()
        column = self.mesh.column
        own = part.view(column.size, -1)[column.index]
        fill = self.codec.fill(own)
        if self._blocks is not None:
            return quantized_gather(collectives, self._blocks, part, column, label, fill)
        return collectives.all_gather(part, column, label, fill)

    def free_subgroup_part(self) -> None:
        if self._part is not None:
            part, self._part = self._part, None
            self._pool.free(part.untyped_storage())

    def reclaim_locals(self) -> None:
        """Adopt parameters of this layout that were replaced."""
        reclaim_locals(self.parameters)


class Unit:
    """The parameters of a `UnitPlan`, gathered and freed together."""

    def __init__(
        self, plan: UnitPlan, flats: Sequence[FlatParameters], settings: UnitSettings
    ) -> None:
        self.plan = plan
        self.settings = settings
        self.flats = tuple(flats)
        self.parameters = tuple(one for flat in flats for one in flat.parameters)
        self.gradients = tuple(one for flat in flats if (one := flat.gradients) is not None)
        self.expects_gradients = False
        self._gathered_flats = [flat for flat in flats if not flat.is_whole]
        self._gathering: list[Work] = []
        self._reducing: list[Work] = []
        self._is_unsharded = False  # modules hold the dense parameters

    @property
    def mesh(self) -> DataParallelMesh:
        """The ranks of a unit that has parameters, as numbered in collectives."""
        return self.flats[0].mesh

    # -- parameters ------------------------------------------------------------------------------

    def launch_gather(self, collectives: Collectives) -> tuple[Work, ...]:
        label, first = f"gather {self.plan.label}", len(self._gathering)
        for flat in self._gathered_flats:  # one is in flight even if the next launch raises
            self._gathering.append(flat.launch_gather(collectives, label))
        return tuple(self._gathering[first:])

    def launch_subgroup_part(self, collectives: Collectives) -> tuple[Work, ...]:
        label, first = f"keep {self.plan.label}", len(self._gathering)
        for flat in self._gathered_flats:
            if (work := flat.launch_subgroup_part(collectives, label)) is not None:
                self._gathering.append(work)
        return tuple(self._gathering[first:])

    def free_subgroup_part(self) -> None:
        for flat in self.flats:
            flat.free_subgroup_part()

    def await_gather(self, comm: Communicator) -> None:
        self._await_all(self._gathering, comm)
        for flat in self._gathered_flats:
            flat.finish_gather()

    def use_unsharded(self) -> None:
        """Put the dense parameters into the modules."""
        if not self._is_unsharded:
            self._is_unsharded = True  # in part, if one of them raises
            for flat in self.flats:
                if flat.is_whole:  # the gather has done it for the others
                    flat.reclaim_locals()
            for parameter in self.parameters:
                parameter.use_unsharded()

    def use_sharded(self) -> list[str]:
        """Put the sharded parameters back; the names of those that a program has replaced."""
        if not self._is_unsharded:
            return []
        replaced = [name for flat in self.flats for name in flat.use_sharded()]
        self._is_unsharded = False  # only now: an interrupt may have been raised in between
        return replaced

    def free(self, comm: Communicator) -> None:
        """Wait for a gather in flight, and free the parameters. Raises if one was changed."""
        self._await_all(self._gathering, comm)
        changed = self.use_sharded()
        changed += [name for flat in self.flats for name in flat.lost_changes()]
        for flat in self.flats:
            flat.free()
        for flat in self._gathered_flats:
            FSDPParameter.forbid_reads(flat.parameters)
        self.refuse(changed)

    def refuse(self, changed: Sequence[str]) -> None:
        """Raise a StepError if ``changed``, names of dense parameters, is not empty."""
        if changed:
            raise StepError(
                f"{', '.join(changed)}: changed in place or assigned while gathered, but the "
                f"change is lost as {self.plan.label} returns to its shards; change the sharded "
                "parameter between steps, or the whole one in sw.gathered(model, write_back=True)"
            )

    def gather_apart(self, works: Iterable[Work]) -> None:
        """Launch ``works``, which gather the parameters for use between steps."""
        for work in works:  # one is in flight even if the next launch raises
            self._gathering.append(work)

    def await_apart(self, comm: Communicator) -> None:
        """Wait for `gather_apart`. Then the caller puts the parameters into the modules."""
        self._await_all(self._gathering, comm)
        self._is_unsharded = True

    # -- gradients -------------------------------------------------------------------------------

    def accept(self, flat: FlatParameters, position: int) -> None:
        """Take the gradient that autograd has put on a dense parameter."""
        assert flat.gradients is not None
        parameter = flat.parameters[position]
        if parameter.dense.grad is None:
            return
        if not self.expects_gradients:
            parameter.dense.grad = None
            raise StepError(
                f"{parameter.name}: received a gradient, but {self.plan.label} is not part of this "
                "backward; was a tensor kept from a forward that raised, or from another model?"
            )
        flat.gradients.accept(position)

    def take_gradients(self) -> None:
        """Take the gradients of all dense parameters, outside of a backward."""
        self.expects_gradients = True
        for flat in self.flats:
            for position in range(len(flat.parameters) if flat.gradients is not None else 0):
                self.accept(flat, position)
        self.end_backward()

    def launch_reduce(self, collectives: Collectives) -> tuple[Work, ...]:
        """Reduce the gradients over the row, and also over the column if the settings say so."""
        label, first = f"reduce {self.plan.label}", len(self._reducing)
        for one in self.gradients:  # one is in flight even if the next launch raises
            frozen = "".join(parameter.frozen for parameter in one.parameters)
            self._reducing.append(one.launch_reduce(collectives, label + frozen))
        self.expects_gradients = False
        return tuple(self._reducing[first:])

    def end_backward(self) -> None:
        """Accumulate gradients that await a later reduction."""
        for gradients in self.gradients:
            gradients.end_backward()
        self.expects_gradients = False

    def expect_changes(self) -> None:
        """Prepare for shards that were changed since the last step."""
        for flat in self.flats:
            flat.codec.note_changes()

    def collect(self, comm: Communicator) -> None:
        self._await_all(self._reducing, comm)
        for gradients in self.gradients:
            gradients.collect()

    # -- after an exception ----------------------------------------------------------------------

    def quiesce(self, until: float) -> bool:
        """Wait until time ``until`` for communication to end or fail. Returns whether it has."""
        works = (*self._gathering, *self._reducing)
        for work in works:
            work.wait(max(0.0, until - time.monotonic()))
        return all(work.done for work in works)

    def reset(self) -> None:
        """Return to shards from any state, with no communication in flight."""
        self._gathering, self._reducing = [], []
        self.expects_gradients = False
        self.use_sharded()
        for flat in self.flats:
            flat.restore_views()
        for parameter in self.parameters:
            parameter.forget_changes()
            parameter.dense.grad = None
        for gradients in self.gradients:
            gradients.discard()
        for flat in self.flats:
            flat.free()
            flat.free_subgroup_part()
            flat.held = None

    def _await_all(self, works: list[Work], comm: Communicator) -> None:
        for work in works:
            comm.wait(work)
        works.clear()
