"""FSDP1's sharded state dicts on a mesh of more dims than data parallelism has.

A parameter is on the dims of the mesh that it is distributed over. In the state dict all are on the
mesh with all dims, replicated over the others. Outer dims cut a tensor before inner ones there; the
parameters of tensor parallelism are cut in the other order, which is what `_StridedShard` says.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise._private import is_strided_shard, root_mesh
from shardwise.runtime.tensor import local_of

__all__ = ["as_parameter", "on_whole_mesh"]


def on_whole_mesh(tensor: DTensor) -> DTensor:
    """``tensor`` on the mesh that its own is a part of; every rank has to call this."""
    mesh = root_mesh(tensor.device_mesh)
    if mesh.ndim == 1 or mesh.mesh_dim_names is None:
        return tensor
    placements = _on(mesh, tensor)
    whole = _from_local(local_of(tensor), mesh, placements, tensor)
    in_order = [Shard(_dim_of(one)) if is_strided_shard(one) else one for one in placements]
    return whole.redistribute(placements=in_order)


def as_parameter(value: DTensor, parameter: Tensor) -> DTensor:
    """The reverse: ``value`` as ``parameter`` is distributed; every rank has to call this."""
    assert isinstance(parameter, DTensor)
    wanted = parameter.device_mesh, parameter.placements
    if (value.device_mesh, value.placements) == wanted:
        return value
    if value.device_mesh == root_mesh(parameter.device_mesh):
        value = value.redistribute(placements=_on(value.device_mesh, parameter))
        return _from_local(local_of(value), *wanted, value)
    return value


def _on(mesh: DeviceMesh, tensor: DTensor) -> list[Placement]:
    """The placements of ``tensor``, whose mesh has some of the dims of ``mesh``."""
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = dict(zip(names, tensor.placements, strict=True))
    return [placements.get(name, Replicate()) for name in mesh.mesh_dim_names or ()]


def _from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], like: DTensor
) -> DTensor:
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _dim_of(placement: Placement) -> int:
    dim: int = placement.dim  # type: ignore[attr-defined]
    return dim
