"""The global batch of each step, split into one part per rank."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise._private import pytree
from shardwise.errors import PlanError
from shardwise.verification.exchange import RankExchange

__all__ = ["SEED", "Part", "cut_batch"]

SEED = 0


@dataclass(frozen=True, slots=True)
class Part:
    rows: Any  # the structure that batch_fn returned, with 1/N of the rows
    seed: int  # for layers that draw random numbers, such as dropout

    def draw(self) -> Any:
        """Seed torch's generators and return a copy of the rows."""
        torch.manual_seed(self.seed)
        return pytree.tree_map_only(Tensor, torch.clone, self.rows)

    @property
    def num_rows(self) -> int:
        return next(len(leaf) for leaf in pytree.tree_leaves(self.rows) if isinstance(leaf, Tensor))

    def split(self, num_pieces: int) -> list["Part"]:
        """Split the part into pieces of equally many consecutive rows."""
        return [Part(_rows(self.rows, piece, num_pieces), self.seed) for piece in range(num_pieces)]


def cut_batch(
    batch_fn: Callable[[int], Any], step: int, exchange: RankExchange, device: torch.device
) -> list[Part]:
    """Return the parts of the batch of a step, on ``device`` and in float64.

    Raise a PlanError if the batch differs between ranks, or does not divide evenly over them.
    """
    torch.manual_seed(SEED + step)
    batch = batch_fn(step)
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    exchange.raise_first(_problem(tensors, f"batch_fn({step})", exchange.num_parts))
    for rank, digest in enumerate(digests := exchange.gather(_digest(tensors))):
        if digest != digests[0]:
            raise PlanError(
                f"batch_fn({step}) differs between ranks 0 and {rank}; it must return the global "
                "batch, which verify splits, and may depend only on the step and torch's seed"
            )
    num_parts = exchange.num_parts
    on_device = pytree.tree_map_only(Tensor, lambda t: _widen(t.detach()).to(device), batch)
    return [
        Part(_rows(on_device, part, num_parts), seed=SEED + step * num_parts + part)
        for part in range(num_parts)
    ]


def _problem(tensors: list[Tensor], source: str, num_ranks: int) -> str | None:
    """Explain why the batch cannot be split; None if it can."""
    if not tensors:
        return f"{source} has no tensors; expected a tensor, or a tuple, list or dict of them"
    if any(tensor.ndim == 0 for tensor in tensors):
        return f"{source} has a scalar tensor; expected dim 0 to be the batch"
    sizes = sorted({len(tensor) for tensor in tensors})
    if len(sizes) > 1:
        return (
            f"{source} has tensors of {' and '.join(map(str, sizes))} rows; expected the same "
            "number of rows in every tensor"
        )
    [size] = sizes
    if size % num_ranks or not size:
        below = size // num_ranks * num_ranks
        nearest = " or ".join(str(number) for number in (below, below + num_ranks) if number)
        return (
            f"{source} has {size} rows, which do not divide evenly over {num_ranks} ranks; "
            f"return {nearest} rows"
        )
    return None


def _rows(batch: Any, part: int, num_parts: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.chunk(num_parts)[part], batch)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tensor.dtype, tensor.shape)).encode())
        digest.update(_widen(tensor.detach()).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
