"""What `publish` sends: a manifest, and updates of tensors; the protocol of its targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "BITS",
    "Manifest",
    "Target",
    "TensorInfo",
    "Update",
    "identity_of",
    "indices_of",
    "runs_of",
    "starts_dtype",
]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
_MAX_RUN = 255  # elements, so that a length takes one byte


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The shape and dtype of a published tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Manifest:
    """The content of one version.

    Attributes:
        version: grows with each version.
        base: the version to which updates are applied; None if all tensors are sent whole.
        tensors: all tensors of the version by name, also those that did not change.
    """

    version: int
    base: int | None
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Update:
    """The new values of a tensor: whole, or runs of elements that have changed.

    Attributes:
        name: of the tensor.
        values: the whole tensor; or the changed elements [n], run after run.
        starts: for runs: the first element of each in the row-major tensor [r]; int32, or int64 for
            more than 2**31 elements. Runs may be in any order.
        lengths: for runs: their numbers of elements [r], uint8.
    """

    name: str
    values: Tensor
    starts: Tensor | None = None
    lengths: Tensor | None = None

    def apply_(self, tensor: Tensor) -> None:
        """Write the values into ``tensor``, contiguous, which has those of the base version."""
        if self.starts is None or self.lengths is None:
            tensor.copy_(self.values)
        else:
            bits = BITS.get(tensor.itemsize, tensor.dtype)  # torch cannot index all dtypes
            indices = indices_of(self.starts, self.lengths)
            tensor.view(-1).view(bits)[indices] = self.values.view(bits)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The values [n], and the starts and lengths if there are any; contiguous."""
        parts = (self.values.reshape(-1), self.starts, self.lengths)
        return tuple(part.contiguous() for part in parts if part is not None)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def to(self, device: torch.device | str) -> "Update":
        """The same update in the memory of ``device``."""
        values, *runs = (part.to(device) for part in self.parts)
        return Update(self.name, values.view(self.values.shape), *runs)


class Target(Protocol):
    """Receives versions of a model; `publish` calls it on the first of the model's ranks.

    If a method raises, or if the process dies before `commit` returns, receivers must keep the last
    version. `begin` may be called again at any time.

    A target to which others may write has an attribute ``identity``, a text that differs for each
    version that was ever committed to it.
    """

    @property
    def accepts_runs(self) -> bool:
        """Whether updates may be runs of elements; otherwise they are whole tensors."""

    @property
    def version(self) -> int:
        """The last version that was committed; 0 if there is none."""

    def begin(self, manifest: Manifest) -> None:
        """A version begins; updates that were not committed are void."""

    def send(self, bucket: Sequence[Update]) -> None:
        """Some tensors of the version; their memory may be reused once this returns."""

    def commit(self, version: int) -> None:
        """All tensors that changed were sent. Receivers may use the version."""


def identity_of(target: Target) -> str:
    """The ``identity`` of a target; "" if it has none."""
    return str(getattr(target, "identity", ""))


def runs_of(indices: Tensor, num_elements: int) -> tuple[Tensor, Tensor]:
    """The starts and lengths of the runs in ascending ``indices`` [n], of at most 255 elements."""
    if not len(indices):
        return indices.to(torch.int32), indices.to(torch.uint8)
    is_start = torch.ones(len(indices), dtype=torch.bool, device=indices.device)
    torch.ne(indices[1:], indices[:-1] + 1, out=is_start[1:])
    places = is_start.nonzero().view(-1)  # where runs begin, of any length
    sizes = torch.diff(places, append=torch.full_like(places[:1], len(indices)))
    pieces = (sizes + _MAX_RUN - 1) // _MAX_RUN
    number = torch.arange(int(pieces.sum()), device=indices.device)
    number -= (pieces.cumsum(0) - pieces).repeat_interleave(pieces)  # within its run
    starts = indices[places].repeat_interleave(pieces) + number * _MAX_RUN
    lengths = (sizes.repeat_interleave(pieces) - number * _MAX_RUN).clamp_(max=_MAX_RUN)
    return starts.to(starts_dtype(num_elements)), lengths.to(torch.uint8)


def indices_of(starts: Tensor, lengths: Tensor) -> Tensor:
    """The elements [n] of runs, int64; the inverse of `runs_of`."""
    sizes = lengths.long()
    first = (sizes.cumsum(0) - sizes - starts).repeat_interleave(sizes)
    return torch.arange(len(first), device=starts.device) - first


def starts_dtype(num_elements: int) -> torch.dtype:
    """The dtype of the starts of runs in a tensor of ``num_elements``."""
    return torch.int32 if num_elements < 1 << 31 else torch.int64
