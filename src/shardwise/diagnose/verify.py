"""`verify`: does a sharded model compute what one process computes?

Every rank trains a model whole, on the global batch, and beside it the same model sharded, on the
rank's part of that batch, both in float64 so that a real error cannot hide in rounding.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.diagnose.verification import Comparison, Verification, Worst
from shardwise.errors import PlanError
from shardwise.plan.strategy import Strategy, resolve_strategy
from shardwise.plan.units import Units
from shardwise.runtime.device import current_gpu, num_local_gpus
from shardwise.runtime.engine import FSDPModule, fully_shard
from shardwise.runtime.sharded_tensor import ShardedTensor

__all__ = ["verify"]

T = TypeVar("T")
Batch = Tensor | tuple[Any, ...]
Named = list[tuple[str, Tensor | None, Tensor | None]]  # name, sharded, expected

SEED = 0
# A gradient may be zero but for rounding (that of a key's bias under softmax), and then it has no
# size to compare an error with: this share of the size of all gradients together takes its place.
SMALL = 1e-3


def verify(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[int], Any],
    strategies: str | Strategy | Iterable[str | Strategy] = ("fsdp",),
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    units: Units = "auto",
    optimizer_fn: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    tolerance: float = 1e-10,
    **options: Any,
) -> Verification:
    """Compare loss, every gradient and every updated parameter with those of one process.

    Every rank calls it, with or without a process group, and gets the same result::

        sw.verify(
            lambda: Transformer(...),
            lambda step: torch.randint(256, (8, 33)),
            ["fsdp"],
            loss_fn=lambda model, tokens: cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]),
            units=Block,
        ).raise_for_difference()

    Layers that draw random numbers or look at the batch as a whole (dropout, batch norm) cannot
    agree with one process; let ``model_fn`` return ``model.eval()`` for a model that has them.

    Args:
        model_fn: builds the plain model, a new one at each call. torch's seed is set before, and
            the model is cast to float64 after. A whole copy has to fit on each rank.
        batch_fn: the global batch of a step (from 0), the same on every rank: a tensor or a tuple,
            whose tensors are split along dim 0 over the ranks. torch's seed is set before;
            floating-point tensors are cast to float64.
        strategies: what to compare, as `fully_shard` takes it.
        loss_fn: ``loss_fn(model, batch)`` is the loss of a part of the batch, a mean over it; None
            where ``model(*batch)`` returns that already.
        units: as `fully_shard` takes it.
        optimizer_fn: makes an optimizer of ``model.parameters()``; None for AdamW.
        steps: optimizer steps to compare. After the first step that differs none are: what would
            be told of them are consequences.
        tolerance: the largest relative error, in the Euclidean norm, that counts as equal.
        options: for `fully_shard`: mesh, prefetch, reshard_after_forward, unused.

    Raises:
        PlanError: an argument cannot be used; a difference is not raised but returned.
    """
    if isinstance(strategies, (str, Strategy)):
        strategies = [strategies]
    rows = [resolve_strategy(row) for row in strategies]
    if not rows or steps < 1 or not tolerance >= 0:
        raise PlanError(
            f"strategies={strategies!r}, steps={steps}, tolerance={tolerance}: expected at least "
            "one strategy, one step and a tolerance of 0 or more"
        )
    training = Training(
        model_fn, batch_fn, loss_fn or _model_is_loss, optimizer_fn or _adamw, steps, tolerance
    )
    with _own_random_numbers():
        found = [_compare(training, row, {"units": units, **options}) for row in rows]
    return Verification(tuple(found))


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how the outcome is judged."""

    model_fn: Callable[[], nn.Module]
    batch_fn: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], Tensor]
    optimizer_fn: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    steps: int
    tolerance: float

    def build(self) -> nn.Module:
        torch.manual_seed(SEED)
        model = self.model_fn()
        if not isinstance(model, nn.Module) or isinstance(model, FSDPModule):
            raise PlanError(
                f"model_fn returned {type(model).__name__}: expected a torch.nn.Module that is not "
                "sharded; verify shards it itself"
            )
        return model.double()

    def backward(self, model: nn.Module, batch: Batch) -> float:
        loss = self.loss_fn(model, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            got = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise PlanError(
                f"the loss is {got}: expected a scalar; pass a loss_fn(model, batch) that returns "
                "the mean over the batch"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that a model is sharded over, and this one among them."""

    group: dist.ProcessGroup | None  # None where there is one only

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


# -- the steps -----------------------------------------------------------------------------------


def _compare(training: Training, strategy: Strategy, options: dict[str, Any]) -> Comparison:
    reference, model = training.build(), training.build()
    _check_same(reference, model)
    fully_shard(model, strategy=strategy, **options)
    peers, device = _place_of(model)
    reference.to(device)
    optimizers = [training.optimizer_fn(one.parameters()) for one in (reference, model)]
    worst = [Worst(), Worst(), Worst()]  # loss, gradient, parameter
    for step in range(training.steps):
        whole = _global_batch(training, step, peers, device)
        part = _own_part(whole, step, peers)
        expected = training.backward(reference, whole)
        own = training.backward(model, part)
        if options.get("unused") == "zeros":
            _fill_with_zeros(reference)
        loss = _loss_error(sum(peers.gather(own)) / peers.size, expected, step, peers)
        gradient = _worst_error(_gradients(model, reference), step, peers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        parameter = _worst_error(_parameters(model, reference), step, peers)
        worst = [_farther(pair) for pair in zip(worst, (loss, gradient, parameter), strict=True)]
        if any(one.error > training.tolerance for one in worst):
            break
    return Comparison(strategy.name, peers.size, step + 1, training.tolerance, *worst)


def _check_same(reference: nn.Module, model: nn.Module) -> None:
    """Both have to be what one ``model_fn`` makes of one seed, and apart from each other.

    Raises:
        PlanError: names the first parameter that differs, or is in both.
    """
    first, second = (dict(one.named_parameters()) for one in (reference, model))
    if first.keys() != second.keys():
        names = sorted(first.keys() ^ second.keys())
        raise PlanError(f"model_fn built {', '.join(names)} in one call and not in the other")
    for name, parameter in first.items():
        if parameter is second[name]:
            raise PlanError(
                f"model_fn returned {name} twice; it has to build a new model each time"
            )
        if not torch.equal(parameter, second[name]):
            raise PlanError(
                f"model_fn gave {name} other values in its second call; it may draw them from "
                "torch's generator, which is seeded before each call, and from no other"
            )


def _place_of(model: nn.Module) -> tuple[Peers, torch.device]:
    """The ranks and the device that the model is on now."""
    for parameter in model.parameters():
        if isinstance(parameter, ShardedTensor):
            return Peers(parameter.sharding.axis.group), parameter.device
    raise PlanError("model_fn returned a model without parameters; there is nothing to verify")


def _fill_with_zeros(reference: nn.Module) -> None:
    """What ``unused="zeros"`` promises of a parameter that no rank used."""
    for parameter in reference.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


# -- the batch -----------------------------------------------------------------------------------


def _global_batch(training: Training, step: int, peers: Peers, device: torch.device) -> Batch:
    torch.manual_seed(SEED + step)
    batch = training.batch_fn(step)
    if not isinstance(batch, (Tensor, tuple, list)):
        got = type(batch).__name__
        raise PlanError(f"batch_fn({step}) returned {got}: expected a tensor or a tuple")
    for rank, digest in enumerate(digests := peers.gather(_digest(batch))):
        if digest != digests[0]:
            raise PlanError(
                f"batch_fn({step}) differs between ranks 0 and {rank}; it has to return the global "
                "batch, which verify splits, and may depend on the step and torch's seed alone"
            )
    return _on_tensors(batch, lambda tensor: _wide(tensor).to(device))


def _own_part(batch: Batch, step: int, peers: Peers) -> Batch:
    """This rank's rows of every tensor."""

    def rows(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            raise PlanError(f"batch_fn({step}) has a scalar tensor; expected dim 0 to be the batch")
        if len(tensor) % peers.size or not len(tensor):
            below = len(tensor) // peers.size * peers.size
            nearest = " or ".join(str(n) for n in (below, below + peers.size) if n)
            raise PlanError(
                f"batch_fn({step}) has {len(tensor)} rows, which do not divide into {peers.size} "
                f"ranks; return {nearest}"
            )
        return tensor.chunk(peers.size)[peers.rank].clone()

    return _on_tensors(batch, rows)


def _on_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return change(batch)
    return tuple(change(entry) if isinstance(entry, Tensor) else entry for entry in batch)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _digest(batch: Any) -> str:
    digest = hashlib.sha256()

    def take(tensor: Tensor) -> Tensor:
        digest.update(repr((tensor.dtype, tensor.shape)).encode())
        digest.update(_wide(tensor.detach()).cpu().contiguous().numpy().tobytes())
        return tensor

    _on_tensors(batch, take)
    return digest.hexdigest()


# -- the errors ----------------------------------------------------------------------------------


def _loss_error(loss: float, expected: float, step: int, peers: Peers) -> Worst:
    error = abs(loss - expected) / max(abs(expected), SMALL)
    return _farther(peers.gather(Worst(_finite(error), step=step)))


def _gradients(model: nn.Module, reference: nn.Module) -> Named:
    return [(name, one.grad, other.grad) for name, one, other in _in_both(model, reference)]


def _parameters(model: nn.Module, reference: nn.Module) -> Named:
    return [(name, one.detach(), other.detach()) for name, one, other in _in_both(model, reference)]


def _in_both(
    model: nn.Module, reference: nn.Module
) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        yield name, parameter, expected[name]


def _worst_error(named: Named, step: int, peers: Peers) -> Worst:
    """The farthest of all tensors on all ranks; replicas may differ from each other as well."""
    whole = math.hypot(*(_norm(expected) for _, _, expected in named if expected is not None))
    # Exchanged first: a rank without a tensor would not take part in gathering it.
    absent = peers.gather([tensor is None for _, tensor, _ in named])
    own = [
        _error_of(
            entry, step, [rank for rank in range(peers.size) if absent[rank][place]], whole, peers
        )
        for place, entry in enumerate(named)
    ]
    return _farther(peers.gather(_farther(own)))


def _error_of(
    entry: tuple[str, Tensor | None, Tensor | None],
    step: int,
    absent: list[int],
    whole: float,
    peers: Peers,
) -> Worst:
    name, tensor, expected = entry
    if expected is None:
        if len(absent) == peers.size:
            return Worst(step=step)
        return Worst(math.inf, name, step, "is a tensor, expected None")
    if absent:
        ranks = "" if len(absent) == peers.size else f" on ranks {absent}"
        return Worst(math.inf, name, step, f"is None{ranks}, expected {list(expected.shape)}")
    assert tensor is not None
    full = tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
    distance = _norm(full - expected)
    scale = max(_norm(expected), SMALL * whole)
    error = _finite(distance / scale if scale else distance)
    return Worst(error, name if error else "", step)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor if tensor.is_complex() else tensor.double()))


def _finite(error: float) -> float:
    """Nothing is close to what is not a number."""
    return math.inf if math.isnan(error) else error


def _farther(several: Iterable[Worst]) -> Worst:
    return max(several, key=lambda worst: worst.error)


# -- what stands in for an argument --------------------------------------------------------------


def _model_is_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch) if isinstance(batch, Tensor) else model(*batch)
    return loss


def _adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    # A large eps: where a gradient is all rounding, Adam would make a step of it.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave torch's generators as they were."""
    with torch.random.fork_rng([current_gpu()] if num_local_gpus() else []):
        yield
