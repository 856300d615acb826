"""Slices: the runs of a tensor's row-major elements that one rank writes or reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise._private import is_strided_shard
from shardwise.checkpoint.checksums import BLOCK_BYTES
from shardwise.comm.device import wait_for_device
from shardwise.plan.chunks import chunk_of
from shardwise.plan.layout import Run
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.tensor.sharded_tensor import OwnPart, own_part_of
from shardwise.tensor.sharding import local_of

__all__ = [
    "HostCopies",
    "Slices",
    "TensorSlice",
    "assign_slice",
    "bytes_of",
    "coordinates_of",
    "part_of_whole",
    "slice_to_read",
    "slice_to_write",
]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements of a tensor in row-major order, from ``start`` on."""

    start: int
    elements: Tensor  # [n]

    @property
    def start_byte(self) -> int:
        return self.start * self.elements.itemsize

    @property
    def stop_byte(self) -> int:
        return self.start_byte + self.elements.nbytes

    def bytes_between(self, start: int, stop: int) -> memoryview:
        """Bytes ``[start, stop)`` of the tensor; a copy if the elements are on an accelerator."""
        first, itemsize = self.start_byte, self.elements.itemsize
        return bytes_of(self.elements[(start - first) // itemsize : (stop - first) // itemsize])


Slices = Mapping[int, TensorSlice]  # by the number of the tensor; see `manifest.tensor_ids`


def slice_to_write(tensor: Tensor, number: int, ranks: DataParallelMesh) -> TensorSlice | None:
    """The elements that this rank writes of ``tensor``, the ``number``-th tensor of all.

    Together, ``ranks`` write each element once. Replicas divide a shard among themselves. Rank 0
    writes tensors that every rank has, such as buffers. A tensor whose elements on this rank are
    not one run, as with tensor parallelism, is gathered and cut into runs. Every rank must then
    call this.
    """
    if not isinstance(tensor, DTensor):
        return slice_to_read(tensor) if ranks.group_rank == 0 else None
    part = own_part_of(tensor)
    if part is None:
        run = _even_run(tensor)
        whole = tensor.full_tensor().detach().reshape(-1)
        own, part = TensorSlice(run.start, whole[run.start : run.stop].clone()), OwnPart(run, 0, 1)
    else:
        own = slice_to_read(tensor)
    copies = _with_mesh_replicas(ranks, part, tensor)
    written = Run(0, 0) if copies is None else _part_of_replica(own.elements, number, copies)
    if not len(written):
        return None
    return TensorSlice(own.start + written.start, own.elements[written.start : written.stop])


def slice_to_read(tensor: Tensor) -> TensorSlice:
    """The elements that this rank reads, in the memory of ``tensor`` if possible.

    Otherwise `assign_slice` copies them into ``tensor`` later.
    """
    part = own_part_of(tensor)
    if part is not None:
        return TensorSlice(part.run.start, local_of(tensor).detach().reshape(-1))
    if not isinstance(tensor, DTensor):
        return TensorSlice(0, tensor.detach().reshape(-1))
    run = _even_run(tensor)
    return TensorSlice(run.start, local_of(tensor).new_empty(len(run)))


def assign_slice(tensor: Tensor, read: TensorSlice) -> None:
    """Copy ``read``, the filled `slice_to_read`, into ``tensor`` unless they share memory.

    Every rank must call this if the elements of ``tensor`` on a rank are not one run.
    """
    if not isinstance(tensor, DTensor):
        if not tensor.is_contiguous():
            tensor.copy_(read.elements.view(tensor.shape))
    elif own_part_of(tensor) is None:
        mesh = tensor.device_mesh
        flat = DTensor.from_local(
            read.elements,
            mesh,
            [Shard(0)] * mesh.ndim,
            run_check=False,
            shape=torch.Size([tensor.numel()]),
            stride=(1,),
        )
        whole = flat.full_tensor().view(tensor.shape)
        local_of(tensor).copy_(part_of_whole(whole, tensor, coordinates_of(mesh)))
    elif not local_of(tensor).is_contiguous():
        local_of(tensor).copy_(read.elements.view(local_of(tensor).shape))


def _even_run(tensor: DTensor) -> Run:
    """An equal part of the elements for each rank of the tensor's mesh: `Shard(0)` in each dim."""
    run = Run(0, tensor.numel())
    for size, index in _coordinates(tensor.device_mesh):
        part = chunk_of(len(run), size, index)
        run = Run(run.start + part.start, run.start + part.stop)
    return run


def part_of_whole(whole: Tensor, tensor: DTensor, coordinates: Sequence[int]) -> Tensor:
    """A view of ``whole``, the elements of ``tensor``: the part of the rank at ``coordinates``.

    `distribute_tensor` (torch 2.13) is wrong for uneven strided shards: a rank gets another's rows.
    """
    dims = zip(tensor.placements, tensor.device_mesh.shape, coordinates, strict=True)
    # A strided shard cuts what the other mesh dims have cut.
    for placement, size, index in sorted(dims, key=lambda dim: is_strided_shard(dim[0])):
        if isinstance(placement, Shard) or is_strided_shard(placement):
            run = chunk_of(whole.shape[placement.dim], size, index)
            whole = whole.narrow(placement.dim, run.start, len(run))
    return whole


def coordinates_of(mesh: DeviceMesh) -> list[int]:
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    return list(coordinates)


def _coordinates(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """The size of each dim of ``mesh``, and this rank's index in it."""
    return list(zip(mesh.shape, coordinates_of(mesh), strict=True))


def _with_mesh_replicas(ranks: DataParallelMesh, part: OwnPart, tensor: DTensor) -> OwnPart | None:
    """``part`` with replicas over the mesh dims that ``tensor`` is not on counted as well.

    If ``ranks`` have the mesh of other tensors, such as experts, its dims do not show replicas: the
    ranks that have ``tensor`` together with the first of ``ranks`` write it, and others get None.
    """
    mesh, own = ranks.mesh, tensor.device_mesh
    if mesh is None or mesh.size() == own.size():
        return part
    known = own.mesh_dim_names or ()
    if not known or not set(known).issubset(mesh.mesh_dim_names or ()):
        return part if mesh.mesh.flatten()[0] in own.mesh else None
    for name, (size, index) in zip(mesh.mesh_dim_names or (), _coordinates(mesh), strict=True):
        if name not in known:
            part = replace(
                part, replica=part.replica * size + index, num_replicas=part.num_replicas * size
            )
    return part


def bytes_of(elements: Tensor) -> memoryview:
    """The bytes of ``elements`` [n], without a copy if it is contiguous and on the CPU."""
    array: Any = elements.contiguous().cpu().view(torch.uint8).numpy()
    return memoryview(array)


def _part_of_replica(elements: Tensor, number: int, own: OwnPart) -> Run:
    num_elements, copies, replica = len(elements), own.num_replicas, own.replica
    if copies == 1:
        return Run(0, num_elements)
    if elements.nbytes < BLOCK_BYTES:  # too small to divide
        return Run(0, num_elements if number % copies == replica else 0)
    return Run(num_elements * replica // copies, num_elements * (replica + 1) // copies)


class HostCopies:
    """Copies of slices in host memory, which a save with ``wait=False`` writes.

    The memory is kept for the next save: copying into new memory takes twice as long or more.
    """

    def __init__(self) -> None:
        self._free: dict[int, Tensor] = {}

    def copy(self, slices: Slices) -> Slices:
        """Copies of ``slices``, whose memory is not reused until `reclaim`."""
        free, self._free = self._free, {}
        copies = {
            number: TensorSlice(own.start, _copied(own.elements, free.pop(number, None)))
            for number, own in slices.items()
        }
        for device in {own.elements.device for own in slices.values()}:
            wait_for_device(device)  # once for all copies
        return copies

    def reclaim(self, copies: Slices) -> None:
        """Reuse the memory of ``copies`` in the next save."""
        self._free = {number: copy.elements for number, copy in copies.items()}

    def clear(self) -> None:
        self._free = {}


def _copied(source: Tensor, memory: Tensor | None) -> Tensor:
    """Start a copy of ``source``, into ``memory`` if it fits; pinned if the source is on a GPU."""
    pinned = source.device.type != "cpu"
    fits = (
        memory is not None
        and memory.shape == source.shape
        and memory.dtype is source.dtype
        and memory.is_pinned() == pinned
    )
    if memory is None or not fits:
        memory = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
    return memory.copy_(source, non_blocking=pinned)
