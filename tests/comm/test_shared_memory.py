"""Ranks of one host gather into shared memory, but never into memory that a rank still uses."""

import gc
import itertools
import os
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.api import Work
from shardwise.comm.communicator import Communicator, communicator
from shardwise.features.host_collectives import HostCollectives
from shardwise.host import handshake
from shardwise.host.peers import Descriptor
from shardwise.host.point_to_point import RankLostError
from shardwise.host.shared_memory import (
    _MAX_SEGMENTS,
    Place,
    SharedMemory,
)
from shardwise.plan.layout import Layout, ParameterSpec, lay_out
from shardwise.plan.strategy import PRESETS
from shardwise.runtime import unit
from shardwise.runtime.buffers import FlatBuffer
from shardwise.runtime.memory import Pools
from shardwise.tensor.mesh import resolve_mesh
from shardwise.watch.monitor import Patience
from tests.covering import leaving
from tests.models import WIDTH, Block, build
from tests.ranks import on_ranks
from tests.runtime.one_process import assert_equal_training, rank, runtime_of, world_size
from tests.versions import needs_swap
from tests.waiting import eventually
from tests.watching import watch_of

CPU = torch.device("cpu")


# -- between processes ---------------------------------------------------------------------------


@needs_swap
@on_ranks(2, 3)
def test_a_gathered_unit_is_in_memory_once() -> None:
    buffers = Buffers(1000, 30_000)
    for turn in range(4):
        for number in range(2):
            buffers.gather(number, 10.0 * turn)
            assert buffers.is_shared(number)
        for number in range(2):
            buffers.free(number)
    common = buffers.pools.gathered.shared
    assert isinstance(common, SharedMemory)
    # The files of all ranks but the first are empty: no page was touched.
    taken = [os.fstat(segment.file.number).st_blocks for segment in common._own.values()]
    assert taken
    assert (sum(taken) > 0) == (rank() == 0)


@needs_swap
@pytest.mark.parametrize("keeping", [0, 1, 2])
@on_ranks(3)
def test_memory_that_one_rank_still_uses_is_not_written_to(keeping: int) -> None:
    buffers = Buffers(5000, 5000)
    for number in (0, 1, 0, 1):  # until the arena is planned
        buffers.gather(number, 10.0)
        buffers.free(number)
    for _ in range(2):
        buffers.gather(0, 10.0)
        was = buffers.all[0].flat.data_ptr()
        if rank() != keeping:
            buffers.free(0)
        buffers.gather(1, 20.0)
        if rank() == 0 != keeping:
            assert buffers.all[1]._memory is not None
            assert buffers.all[1]._memory.data_ptr() == was, "memory that this rank has freed"
        if rank() == keeping:
            buffers.check(0, 10.0)
            buffers.free(0)
        assert not buffers.is_shared(1)
        buffers.free(1)
        buffers.gather(1, 30.0)
        assert buffers.is_shared(1), "all ranks use the same buffers again"
        buffers.free(1)


@needs_swap
@pytest.mark.parametrize("seed", leaving(range(1, 4), range(4)))
@on_ranks(3)
def test_ranks_that_free_at_different_times(seed: int) -> None:
    """Each rank knows which buffers the others free, and gathers only those that all have freed."""
    chance = random.Random(seed)
    sizes = [chance.choice([1, 700, 5000, 5000, 20_000]) for _ in range(6)]
    buffers = Buffers(*sizes)
    held: list[dict[int, float]] = [{} for _ in range(world_size())]
    num_shared = num_apart = 0
    for turn in range(150):
        together = {n for n in range(len(sizes)) if chance.random() < 0.5}
        is_odd = chance.random() < 0.3
        for who, one in enumerate(held):
            some = {n for n in range(len(sizes)) if chance.random() < 0.5} if is_odd else together
            for number in some & set(one):
                value = one.pop(number)
                if who == rank():
                    buffers.check(number, value)
                    buffers.free(number)
        pause = chance.choice([0.0, 0.0, 0.002]) * (chance.randrange(world_size()) == rank())
        free = [n for n in range(len(sizes)) if not any(n in one for one in held)]
        for number in free[: chance.randint(0, 2)]:
            time.sleep(pause)
            buffers.gather(number, 100.0 * turn)
            apart = len({tuple(sorted(one)) for one in held}) > 1
            num_apart += apart
            num_shared += not apart
            moves = apart or rank() > 0
            assert (buffers.all[number]._private is not None) == moves
            for one in held:
                one[number] = 100.0 * turn
            for other, value in held[rank()].items():
                buffers.check(other, value)
    assert num_shared > 10
    assert num_apart > 10


@needs_swap
@on_ranks(2)
def test_a_late_rank_is_waited_for_before_anything_is_written() -> None:
    buffers = Buffers(5000, 5000)
    buffers.gather(0, 10.0)
    if rank() == 0:
        buffers.free(0)
        pending = buffers.launch(1, 20.0)
        assert not pending.wait(0.1)
        dist.barrier()
    else:
        time.sleep(0.05)
        buffers.check(0, 10.0)
        dist.barrier()
        buffers.check(0, 10.0)
        buffers.free(0)
        pending = buffers.launch(1, 20.0)
    buffers.comm.wait(pending)
    buffers.check(1, 20.0)
    assert buffers.is_shared(1)


@needs_swap
@on_ranks(3)
def test_a_rank_that_cannot_fill_its_slot_is_named() -> None:
    buffers = Buffers(1000, 1000)
    buffer = buffers.all[0]
    for odd in (0, 2):
        buffer.acquire()
        error = ZeroDivisionError if rank() == odd else sw.PeerAborted
        fill = _raise if rank() == odd else (lambda: None)
        gather = buffers.comm.gather
        pending = gather.all_gather(
            buffer.flat, gather.world, "gather", fill, buffer.shared_buffer()
        )
        with pytest.raises(error) as caught:
            buffers.comm.wait(pending)
        assert rank() == odd or f"rank {odd}" in str(caught.value)
        buffer.release()
        buffers.comm.watch.recover()
        buffers.gather(1, 10.0)
        assert buffers.is_shared(1)
        buffers.free(1)


@needs_swap
@on_ranks(3)
def test_a_rank_that_has_lost_another_one_is_not_named_as_the_reason() -> None:
    buffers = Buffers(1000)
    buffers.all[0].acquire()
    gather = buffers.comm.gather
    with mock.patch.object(
        HostCollectives, "_agree_on_memory", autospec=True, side_effect=_agree_and_lose_rank_2
    ):
        flat, shared = buffers.all[0].flat, buffers.all[0].shared_buffer()
        pending = gather.all_gather(flat, gather.world, "gather", lambda: None, shared)
        pending.wait()
    assert isinstance(pending.error, sw.PeerLost)
    buffers.all[0].release()


_agree_on_memory = HostCollectives._agree_on_memory


def _agree_and_lose_rank_2(*args: Any) -> bool:
    agrees = _agree_on_memory(*args)
    if rank() == 0:
        raise RankLostError("rank 0 lost rank 2")
    return agrees


@needs_swap
@on_ranks(3)
def test_ranks_recover_after_some_did_not_take_part() -> None:
    buffers = Buffers(1000, 1000)
    watch = watch_of(buffers.comm)
    usual, watch.patience = watch.patience, Patience(poll_seconds=0.05)
    for away in ({0}, {1}, {0, 2}):
        buffers.gather(1, 10.0)
        if rank() in away:
            buffers.comm.watch.abort(ValueError("it hurts"))
        else:
            pending = buffers.launch(0, 20.0)
            with pytest.raises(sw.PeerAborted):
                buffers.comm.wait(pending)
        buffers.comm.watch.recover()
        buffers.check(1, 10.0)
        if rank() not in away:
            buffers.free(0)
        buffers.free(1)
        buffers.gather(0, 30.0)
        assert buffers.is_shared(0)
        buffers.free(0)
    watch.patience = usual


@pytest.mark.parametrize("forbidden", [{0}, {1}, {0, 1, 2}])
@on_ranks(3)
def test_training_where_ranks_may_not_create_files(forbidden: set[int]) -> None:
    error = PermissionError("not permitted")
    effect = error if rank() in forbidden else os.memfd_create
    with mock.patch.object(os, "memfd_create", side_effect=effect):
        assert_equal_training("gpt")


@on_ranks(4)
def test_units_that_a_subgroup_gathers_again_are_not_shared() -> None:
    model = build("stack")
    sw.fully_shard(model, units=Block, reshard_after_forward=2)
    flats = [flat for unit in runtime_of(model).units for flat in unit.flats]
    assert any(flat._plan.subgroup for flat in flats)
    for flat in flats:
        assert (flat._pool.shared is None) == bool(flat._plan.subgroup)


@needs_swap
@on_ranks(2)
def test_small_units_are_sent_inline() -> None:
    with mock.patch.object(unit, "SMALL_UNIT_BYTES", 4096):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in (8, 45, 46, 100)))
        sw.fully_shard(model, units=nn.Linear)
        assert_equal_training("gpt")
    flats = [flat for one in runtime_of(model).units for flat in one.flats]
    # 45 * 45 floats on 2 ranks are 4050 bytes each.
    assert [flat._pool.shared is None for flat in flats] == [True, True, False, False]


@needs_swap
@on_ranks(2)
def test_more_units_than_files() -> None:
    num_units = 3 * _MAX_SEGMENTS
    buffers = Buffers(*range(10, 10 + num_units))
    for turn in range(3):
        in_shared = []
        for number in range(num_units):
            buffers.gather(number, 100.0 * turn)
            in_shared.append(buffers.is_shared(number))
        assert sum(in_shared) == (_MAX_SEGMENTS if turn == 0 else num_units), (
            "the second turn uses an arena"
        )
        for number in range(num_units):
            buffers.check(number, 100.0 * turn)
            buffers.free(number)


@needs_swap
@on_ranks(3)
def test_memory_is_freed_with_the_model() -> None:
    gc.collect()
    model = build("stack")
    before = _num_mapped()
    sw.fully_shard(model, units=Block)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(4, WIDTH).double()).sum().backward()
        optimizer.step()
    assert _num_mapped() - before == (1 if rank() == 0 else 2), "its own file, and that of rank 0"
    del model, optimizer
    gc.collect()
    assert eventually(lambda: _num_mapped() == before)


# -- in one process ------------------------------------------------------------------------------


def _open(
    there: SharedMemory, here: SharedMemory, address: int, num_bytes: int
) -> torch.UntypedStorage:
    """Open memory of ``here`` in ``there``, which stands for another process."""
    place, descriptor = here.locate(address, 0)
    return there.open(Descriptor(os.dup(descriptor)), place, num_bytes)


def test_a_place_is_opened_with_its_message_and_file() -> None:
    here, there = SharedMemory(), SharedMemory()
    storages = [here.allocate(size) for size in (4096, 1 << 20, 64)]
    for storage in storages:
        own = _bytes(storage)
        other = _bytes(_open(there, here, own[32:].data_ptr(), 16))
        own[32:48] = 7
        assert other.tolist() == [7] * 16
        other.fill_(9)
        assert own[32:48].tolist() == [9] * 16
        assert not own[48:].any(), "the rest is unchanged"


def test_freed_memory_is_not_kept() -> None:
    gc.collect()  # otherwise memory of other tests might be freed in between
    here, there = SharedMemory(), SharedMemory()
    first = here.allocate(4096)
    _open(there, here, first.data_ptr(), 64)
    descriptors = _num_descriptors()
    del first
    assert _num_descriptors() == descriptors - 2, "of the file and of its mmap"
    second = here.allocate(4096)
    _open(there, here, second.data_ptr(), 64)
    assert len(there._opened) == 1, "the first one is older than any that is left"


@pytest.mark.parametrize(("offset", "num_bytes"), [(0, 4097), (4096, 1), (-8, 8)])
def test_a_place_outside_of_its_file_is_refused(offset: int, num_bytes: int) -> None:
    """Access beyond the end of a file would kill the process."""
    here = SharedMemory()
    storage = here.allocate(4096)
    place, descriptor = here.locate(storage.data_ptr(), 0)
    assert Place.unpack(place.pack()) == place
    wrong = place._replace(offset=offset)
    with pytest.raises(ConnectionError, match="are not in a file of 4096"):
        SharedMemory().open(Descriptor(os.dup(descriptor)), wrong, num_bytes)


def test_a_recycled_descriptor_is_another_file() -> None:
    """Files are identified by inode, since the number of a descriptor may be reused."""
    here, there = SharedMemory(), SharedMemory()
    first = here.allocate(4096)
    place, descriptor = here.locate(first.data_ptr(), 0)
    file = Descriptor(os.dup(descriptor))
    _bytes(there.open(file, place, 64)).fill_(1)
    del first, file
    second = here.allocate(4096)
    _bytes(_open(there, here, second.data_ptr(), 64)).fill_(2)
    assert _bytes(second)[:64].tolist() == [2] * 64


def test_few_files_are_open_however_much_is_allocated() -> None:
    gc.collect()
    here, there = SharedMemory(), SharedMemory()
    before = _num_descriptors()
    kept = [here.allocate(4096) for _ in range(3 * _MAX_SEGMENTS)]
    places = [here.locate(storage.data_ptr(), 0)[0] for storage in kept]
    assert [place.number > 0 for place in places] == [n < _MAX_SEGMENTS for n in range(len(kept))]
    first = kept[0]  # stays the oldest one
    for _ in range(3 * _MAX_SEGMENTS):
        kept = []
        kept.append(here.allocate(4096))
        _open(there, here, kept[0].data_ptr(), 64)
    assert len(there._opened) <= _MAX_SEGMENTS
    assert _num_descriptors() - before <= 3 * _MAX_SEGMENTS + 4
    assert here.locate(first.data_ptr(), 0)[0].number == 1


def test_an_open_place_outlives_its_owner() -> None:
    here, there = SharedMemory(), SharedMemory()
    storage = here.allocate(4096)
    _bytes(storage).fill_(5)
    other = _bytes(_open(there, here, storage.data_ptr(), 4096))
    del storage, here, there
    assert other.tolist() == [5] * 4096


def test_ranks_agree_on_which_ranks_share() -> None:
    rows = ["0000", "1000", "1000", "0000"]  # 0, 1, 2 are connected, but not 1 with 2
    host = handshake.Host({}, False, [bytes(map(int, row)) for row in rows])
    sharing = [pair for pair in itertools.combinations(range(4), 2) if host.can_share(pair)]
    assert sharing == [(0, 1), (0, 2)]
    assert host.can_share((2, 0)), "in any order"
    assert not host.can_share((0, 1, 2))


def test_without_files_memory_is_private() -> None:
    memory = SharedMemory()
    with mock.patch.object(os, "memfd_create", side_effect=OSError(24, "Too many open files")):
        storage = memory.allocate(4096)
    assert storage.nbytes() == 4096
    assert not memory.locate(storage.data_ptr(), 0)[0].number


# -- in a rank -----------------------------------------------------------------------------------


class Buffers:
    """Flat buffers of one model, each gathered separately."""

    def __init__(self, *sizes: int) -> None:
        self.pools = Pools(CPU)
        self.comm: Communicator = communicator(resolve_mesh(None, PRESETS["fsdp"]).world, CPU)
        self.comm.watch.recover()  # an earlier test may have ended in an error
        self.all = [
            FlatBuffer(_layout(number, size), self.pools.gathered)
            for number, size in enumerate(sizes)
        ]

    def launch(self, number: int, value: float) -> Work:
        """Rank r fills its slot with ``value + r``."""
        buffer = self.all[number]
        buffer.acquire()
        own = buffer.slot_of(rank())
        own_value = value + rank()

        def fill() -> None:
            own.fill_(own_value)

        shared = buffer.shared_buffer()
        assert shared is not None
        gather = self.comm.gather
        return gather.all_gather(buffer.flat, gather.world, f"gather {number}", fill, shared)

    def gather(self, number: int, value: float) -> None:
        self.comm.wait(self.launch(number, value))
        self.check(number, value)

    def check(self, number: int, value: float) -> None:
        buffer = self.all[number]
        for other in range(world_size()):
            slot = buffer.slot_of(other)
            assert torch.equal(slot, torch.full_like(slot, value + other)), (number, other)

    def is_shared(self, number: int) -> bool:
        """Whether all ranks see a write of the first rank."""
        flat = self.all[number].flat
        before = flat[0].item()
        dist.barrier()
        if rank() == 0:
            flat[0] = -1.0
        dist.barrier()
        seen = torch.tensor([flat[0].item() == -1.0])
        dist.all_reduce(seen, dist.ReduceOp.MIN)
        if rank() == 0:
            flat[0] = before
        dist.barrier()
        return bool(seen)

    def free(self, number: int) -> None:
        self.all[number].release()


def _layout(number: int, size: int) -> Layout:
    spec = ParameterSpec((f"p{number}",), (size * world_size(),), "float32", 4, trainable=True)
    return lay_out([spec], world_size())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _num_descriptors() -> int:
    """The number of open descriptors of files in memory."""
    comm = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(link.startswith("/memfd:shardwise") for link in comm)


def _num_mapped() -> int:
    """The number of mapped files in memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "/memfd:shardwise" in line})


def _raise() -> None:
    raise ZeroDivisionError("it hurts")
