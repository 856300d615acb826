"""FSDP1's sharded state dicts on a mesh that has more dims than data parallelism uses.

The mesh of a parameter has only the dims that it is distributed over. In the state dict, every
tensor is on the mesh with both dims, and replicated over a dim that the parameter lacks. There, the
first dim cuts a tensor before the second. Tensor-parallel parameters are cut in the opposite order,
which `_StridedShard` expresses.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._private import is_strided_shard, root_mesh
from shardwise.tensor.sharding import local_of

__all__ = ["as_parameter", "on_whole_mesh"]

_NUM_DIMS = 2  # data and tensor parallelism; the job may have others, such as pipelines


def on_whole_mesh(tensor: DTensor) -> DTensor:
    """``tensor`` on the root of its mesh; every rank must call this."""
    mesh = root_mesh(tensor.device_mesh)
    if mesh.ndim != _NUM_DIMS or mesh.mesh_dim_names is None:
        return tensor
    placements = _placements_on(mesh, tensor)
    whole = _from_local(local_of(tensor), mesh, placements, tensor)
    in_order = [Shard(p.dim) if is_strided_shard(p) else p for p in placements]
    return whole.redistribute(placements=in_order)


def as_parameter(value: Tensor, parameter: DTensor) -> DTensor:
    """A copy of ``value``, whole or sharded in any way, distributed like ``parameter``.

    Every rank must call this.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    if isinstance(value, DTensor) and value.device_mesh == root_mesh(mesh):
        value = value.redistribute(placements=_placements_on(value.device_mesh, parameter))
        return _from_local(local_of(value).detach().clone(), mesh, placements, parameter)
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    replicated = _from_local(whole.detach(), mesh, [Replicate()] * mesh.ndim, parameter)
    part = local_of(replicated.redistribute(placements=placements))
    return _from_local(part.clone(), mesh, placements, parameter)


def _placements_on(mesh: DeviceMesh, tensor: DTensor) -> list[Placement]:
    """The placements of ``tensor`` on ``mesh``, whose dims include those of the tensor's mesh."""
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, tensor.placements, strict=True))
    return [placements.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]


def _from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: DTensor
) -> DTensor:
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
