"""Errors of a sharded model against the reference: loss, gradients and updated parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.verification.batches import Part
from shardwise.verification.engines import BackwardFn, parameters_of
from shardwise.verification.exchange import RankExchange
from shardwise.verification.explain import explain
from shardwise.verification.reference import Outcome, Reference, Training
from shardwise.verification.result import Comparison, Worst

__all__ = ["Judge"]

# A gradient can be zero except for rounding (a key's bias under softmax), and its relative error
# would be meaningless. The divisor is at least this share of the norm of all gradients.
SMALL = 1e-3

NOT_REACHED = (
    "no backward reached it: it is frozen or detached there, or a zero-bubble schedule requested "
    "the gradients of shards, which forward did not use"
)


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares strategies with the reference. All ranks call it and get the same result."""

    training: Training
    batches: Sequence[Sequence[Part]]  # by step, then by rank
    outcomes: Sequence[Outcome]  # outcomes of the reference, by step
    exchange: RankExchange
    tolerance: float
    reference: Reference | None = None  # where given, errors come with possible causes

    def compare(
        self, model: nn.Module, strategy: str, backward: BackwardFn | None = None
    ) -> Comparison:
        """Train the sharded ``model`` until a step differs from the reference.

        ``backward`` computes its gradients; None: the backward of its loss.
        """
        optimizer = self.training.optimizer(model)
        loss, gradient, parameter = Worst(), Worst(), Worst()
        for step, expected in enumerate(self.outcomes):
            part = self.batches[step][self.exchange.part]
            if backward is None:
                weight = len(expected.counts) / sum(expected.counts)
                own, _ = self.training.backward(model, part, weight)
            else:
                own = self.training.backward_with(backward, part)
            mean = math.fsum(self.exchange.gather(own)) / self.exchange.size
            error = abs(mean - expected.loss) / max(abs(expected.loss), SMALL)
            loss = _worst_of(loss, Worst(_nan_to_inf(error), step=step))
            gradients = {name: p.grad for name, p in parameters_of(model).items()}
            found = self._worst(gradients, expected.gradients, step)
            gradient = _worst_of(gradient, self._with_cause(found, gradients.get(found.name)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            parameters = {name: p.detach() for name, p in parameters_of(model).items()}
            parameter = _worst_of(parameter, self._worst(parameters, expected.parameters, step))
            if _worst_of(loss, gradient, parameter).error > self.tolerance:
                break
        return Comparison(strategy, step + 1, self.tolerance, loss, gradient, parameter)

    def _worst(
        self, found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], step: int
    ) -> Worst:
        """The largest error of any tensor on any rank (replicas may differ too)."""
        norm = math.hypot(*(_norm(tensor) for tensor in expected.values() if tensor is not None))
        # Exchanged first, because a rank without a tensor would not take part in gathering it.
        by_rank = self.exchange.gather({name: tensor is None for name, tensor in found.items()})
        lost = sorted(set(expected).difference(*by_rank))
        worst = Worst(math.inf, lost[0], step, "is on no rank") if lost else Worst(step=step)
        for name, tensor in found.items():
            wanted = expected[name]
            holders = [rank for rank, absent in enumerate(by_rank) if name in absent]
            missing = [rank for rank in holders if by_rank[rank][name]]
            if wanted is None or missing:
                error, note = _presence(wanted, missing, len(holders))
            else:
                assert tensor is not None
                error = _distance(_full(tensor), wanted, SMALL * norm)
                note = "is not finite" if math.isinf(error) else ""
                if note and not torch.isfinite(wanted).all():
                    note += " in one process, so cannot be compared"
            worst = _worst_of(worst, Worst(error, name if error else "", step, note))
        return _worst_of(*self.exchange.gather(worst))

    def _with_cause(self, worst: Worst, gradient: Tensor | None) -> Worst:
        """Add the possible causes of the error in ``gradient`` as the note of ``worst``."""
        if self.reference is None or worst.note or worst.error <= self.tolerance:
            return worst
        cause = "" if gradient is None else self._cause(worst, _full(gradient))
        return replace(worst, note=next(filter(None, self.exchange.gather(cause)), ""))

    def _cause(self, worst: Worst, found: Tensor) -> str:
        reference, step, parts = self.reference, worst.step, self.batches[worst.step]
        expected = self.outcomes[step].gradients[worst.name]
        assert reference is not None
        assert expected is not None
        before = self.outcomes[step - 1].parameters if step else reference.initial
        return explain(
            found,
            expected,
            partial(reference.contributions, worst.name, parts, before),
            self.outcomes[step].counts,
            parts[0].num_rows,
            self.exchange.dims,
        )


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _presence(wanted: Tensor | None, missing: Sequence[int], num_ranks: int) -> tuple[float, str]:
    """Return the error and the note for a tensor that one side lacks."""
    if wanted is None and len(missing) == num_ranks:
        return 0.0, ""
    if wanted is None:
        return math.inf, "is a tensor, expected None"
    expected = f"expected {list(wanted.shape)}"
    if len(missing) == num_ranks:
        return math.inf, f"is None, {expected}: {NOT_REACHED}"
    return math.inf, f"is None on ranks {list(missing)}, {expected}"


def _distance(tensor: Tensor, wanted: Tensor, least: float) -> float:
    """Return the Euclidean error relative to the norm of ``wanted``, or to ``least`` if larger."""
    distance = _norm(tensor - wanted)
    scale = max(_norm(wanted), least)
    return _nan_to_inf(distance / scale if scale else distance)


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor if tensor.is_complex() else tensor.double()))


def _nan_to_inf(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _worst_of(*several: Worst) -> Worst:
    return max(several, key=lambda worst: worst.error)
