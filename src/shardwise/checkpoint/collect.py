"""What a save writes: values as components with named tensors, and this rank's slice of each."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.checkpoint import tree
from shardwise.checkpoint.checksums import BLOCK_BYTES
from shardwise.checkpoint.directory import Retention
from shardwise.checkpoint.format import File, Spec, index_of, spec_of
from shardwise.checkpoint.manifest import Component, tensor_ids
from shardwise.checkpoint.stores import Folder
from shardwise.errors import CheckpointError
from shardwise.plan.layout import Run
from shardwise.plan.strategy import STRATEGIES
from shardwise.runtime.mesh import DataParallelMesh, resolve_mesh
from shardwise.runtime.module import FSDPModule
from shardwise.runtime.tensor import OwnPart, local_of, own_part_of, sharding_of

__all__ = [
    "Collected",
    "HostCopies",
    "Slices",
    "TensorSlice",
    "WriteJob",
    "axis_of",
    "bytes_of",
    "check_name",
    "check_sharded",
    "check_storable",
    "collect",
    "errors_name",
    "own_slice",
    "parameter_names",
    "slice_to_write",
    "specs_of",
    "tensors_of",
]

_MAX_NAME_BYTES = 200  # file systems allow 255


@dataclass
class Collected:
    """A component before it is written: its tensors by name, and everything else as JSON."""

    kind: str
    tree: Any
    tensors: dict[str, Tensor]
    aliases: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def errors_name(component: str) -> Iterator[None]:
    """Begin the errors of the ``with`` statement's body with the name of a component."""
    try:
        yield
    except RecursionError as error:
        raise CheckpointError(f"{component}: nested too deeply, or contains itself") from error
    except CheckpointError as error:
        raise CheckpointError(f"{component}: {error}") from error


def collect(value: Any, model: nn.Module) -> Collected:
    """The component of ``value``, which was passed to `save`.

    Raises:
        CheckpointError: it cannot be saved; names the key.
        RecursionError: it contains itself.
    """
    match value:
        case nn.Module():
            check_sharded(value)
            tensors, aliases = tensors_of(value)
            return Collected("module", None, tensors, aliases)
        case Optimizer():
            return _encoded("optimizer", _by_name(value, model))
        case _ if callable(getattr(value, "state_dict", None)):
            return _encoded("object", value.state_dict())
        case _:
            return _encoded("data", value)


def specs_of(collected: Collected) -> list[Spec]:
    """The tensors of a component, as files describe them.

    Raises:
        CheckpointError: one of them cannot be saved; names it.
    """
    for key, tensor in collected.tensors.items():
        check_storable(key, tensor)
    return [spec_of(key, tensor) for key, tensor in collected.tensors.items()]


def check_name(name: str) -> None:
    """Refuse the name of a component that cannot be part of a file's name.

    Raises:
        CheckpointError: names it.
    """
    is_valid = re.fullmatch(r"[^\x00-\x1f/\\.][^\x00-\x1f/\\]*", name)
    if not is_valid or len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        raise CheckpointError(
            f"{name!r}: the name of a state is part of a file's name, and this is not a valid file "
            f"name; use at most {_MAX_NAME_BYTES} bytes without slashes or a leading dot"
        )


def check_storable(key: str, tensor: Tensor) -> None:
    """Refuse a tensor that has no dense elements on this rank.

    Raises:
        CheckpointError: names it.
    """
    if isinstance(tensor, DTensor) and own_part_of(tensor) is None:
        raise CheckpointError(
            f"{key}: a DTensor with placements {tensor.placements} cannot be saved; expected one "
            "that is replicated, or sharded along dim 0 over one mesh dim; pass its full_tensor()"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise CheckpointError(f"{key}: a {kind} tensor cannot be saved; expected a dense one")


def tensors_of(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Its parameters and persistent buffers, and the other names of tied ones.

    A tied tensor is known by its first name, as in ``named_parameters()``.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name}: the extra state of a module must be a tensor, got a "
                f"{type(tensor).__name__}; save it separately, as in sw.save(..., extra=...)"
            )
        known = first.setdefault(id(tensor), name)
        if known == name:
            tensors[name] = tensor
        else:
            aliases[name] = known
    return tensors, aliases


def parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The parameters of ``optimizer`` by their names in ``model``, in the order of the groups.

    Raises:
        CheckpointError: the model does not contain one of them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter {position} of the optimizer's group {number}, of shape "
                    f"{tuple(parameter.shape)}, is not one of the model's; build the optimizer "
                    "from model.parameters()"
                )
            found[names[id(parameter)]] = parameter
    return found


def axis_of(modules: list[nn.Module]) -> DataParallelMesh:
    """The ranks that save or load: those of the shards; all ranks if nothing is sharded."""
    for module in modules:
        for parameter in module.parameters():
            sharding = sharding_of(parameter)
            if sharding is not None:
                return sharding.mesh
    return resolve_mesh(None, STRATEGIES["ddp"])


def check_sharded(module: nn.Module) -> None:
    """Refuse a model whose parameters are gathered, as they are during a step.

    Raises:
        CheckpointError: names one of them.
    """
    for unit in module.modules():
        if not isinstance(unit, FSDPModule):
            continue
        for name, parameter in unit.named_parameters():
            if sharding_of(parameter) is None:
                raise CheckpointError(
                    f"{name} is gathered; save and load between steps, outside sw.gathered"
                )


def _by_name(optimizer: Optimizer, model: nn.Module) -> Mapping[str, Any]:
    """Its state dict, with names instead of parameters."""
    parameters = parameter_names(optimizer, model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    states = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
    return {
        "state": states,
        "param_groups": [
            {**group, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def _encoded(kind: str, value: Any) -> Collected:
    tensors: dict[str, Tensor] = {}
    return Collected(kind, tree.encode(value, tensors), tensors)


# -- slices of tensors ---------------------------------------------------------------------------


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


def own_slice(tensor: Tensor) -> TensorSlice:
    """The elements of ``tensor`` on this rank, which share its memory if it is contiguous."""
    part = own_part_of(tensor)
    if part is not None:
        return TensorSlice(part.run.start, local_of(tensor).detach().reshape(-1))
    return TensorSlice(0, tensor.detach().reshape(-1))


def slice_to_write(tensor: Tensor, number: int, rank: int) -> TensorSlice | None:
    """The elements that this rank writes of ``tensor``, the ``number``-th of all.

    Together the ranks write each element once. Replicas divide a shard among them. Rank 0 writes
    what every rank has, such as buffers.
    """
    own, distributed = own_slice(tensor), own_part_of(tensor)
    if distributed is None:
        return own if rank == 0 else None
    part = _part_of_replica(own.elements, number, distributed)
    if not len(part):
        return None
    return TensorSlice(own.start + part.start, own.elements[part.start : part.stop])


def bytes_of(elements: Tensor) -> memoryview:
    """The bytes of ``elements`` [n]: its own memory if it is contiguous and on the CPU."""
    array: Any = elements.contiguous().cpu().view(torch.uint8).numpy()
    return memoryview(array)


def _part_of_replica(elements: Tensor, number: int, own: OwnPart) -> Run:
    """The part of a shard that this replica writes."""
    num_elements, copies, replica = len(elements), own.num_replicas, own.replica
    if copies == 1:
        return Run(0, num_elements)
    if elements.nbytes < BLOCK_BYTES:  # too small to divide
        return Run(0, num_elements if number % copies == replica else 0)
    return Run(num_elements * replica // copies, num_elements * (replica + 1) // copies)


Slices = Mapping[int, TensorSlice]  # by the number of the tensor; see `manifest.tensor_ids`


@dataclass(frozen=True)
class WriteJob:
    """Everything that is needed to write a checkpoint."""

    folder: Folder
    components: Mapping[str, Component]
    slices: Slices  # of this rank
    retention: Retention | None

    @cached_property
    def files(self) -> list[File]:
        """The files of all components."""
        return [file for part in self.components.values() for file in part.files]

    @cached_property
    def numbers(self) -> dict[str, list[int]]:
        """The numbers of the tensors of each file, by its name."""
        ids = tensor_ids(self.components)
        return {
            file.name: [ids[name, spec.name] for spec in file.specs]
            for name, part in self.components.items()
            for file in part.files
        }

    @property
    def others(self) -> dict[str, bytes]:
        """The files without tensors: the index of each component that is split."""
        return {
            f"{name}.safetensors.index.json": index_of(part.files)
            for name, part in self.components.items()
            if len(part.files) > 1
        }


class HostCopies:
    """Copies of slices in host memory, which a save with ``wait=False`` writes.

    The memory is kept for the next save: copying into new memory takes twice as long or more.
    """

    def __init__(self) -> None:
        self._free: dict[int, Tensor] = {}

    def copy(self, slices: Slices) -> Slices:
        """Copies of ``slices``, whose memory is not reused until `reclaim`."""
        free, self._free = self._free, {}
        return {
            number: TensorSlice(own.start, _copied(own.elements, free.pop(number, None)))
            for number, own in slices.items()
        }

    def reclaim(self, copies: Slices) -> None:
        """Reuse the memory of ``copies`` in the next save."""
        self._free = {number: copy.elements for number, copy in copies.items()}

    def clear(self) -> None:
        """Free the memory that is kept."""
        self._free = {}


def _copied(source: Tensor, memory: Tensor | None) -> Tensor:
    """A copy, in ``memory`` if that fits, and pinned if the source is on a GPU."""
    pinned = source.device.type != "cpu"
    fits = (
        memory is not None
        and memory.shape == source.shape
        and memory.dtype is source.dtype
        and memory.is_pinned() == pinned
    )
    if memory is None or not fits:
        memory = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
    return memory.copy_(source)
