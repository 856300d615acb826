"""Errors of a sharded model against the reference: loss, gradients and updated parameters."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.verification.batches import Part, RankExchange
from shardwise.verification.engines import BackwardFn, parameters_of
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


# -- explanations ----------------------------------------------------------------------------------


_ROUNDING = 1e-6  # relative error of float64 gradients after a least-squares solve
_MAX_PIECES = 64  # pieces of a batch that a gradient is fitted with


def explain(
    found: Tensor,
    expected: Tensor,
    contributions: Callable[[int], Sequence[Tensor]],
    counts: Sequence[int],
    num_rows: int,
    dims: Mapping[str, int],
) -> str:
    """Describe the error in the gradient ``found`` and its possible causes; "" if none fits.

    ``contributions`` takes the number of pieces to split each part into, and returns what each
    piece adds to the ``expected`` gradient. ``counts`` are the tokens of each part, 1 each where
    losses are means; each has ``num_rows``.
    """
    if found.is_complex():
        return ""
    weights = _fit(found, [expected])
    if weights is not None:
        return _cause_of_factor(weights[0], len(counts), dims)
    for num_pieces in range(1, min(num_rows, _MAX_PIECES // len(counts)) + 1):
        if num_rows % num_pieces:
            continue
        columns = contributions(num_pieces)
        if _fit(expected, [torch.stack([*columns]).sum(0)]) != [1.0]:
            return ""  # rows depend on each other or on random numbers
        weights = _fit(found, columns)
        if weights is not None:
            if num_pieces == 1:
                return _cause_in_parts(weights, counts)
            return _cause_in_pieces(weights, num_pieces, num_rows // num_pieces)
    return ""


def _fit(found: Tensor, columns: Sequence[Tensor]) -> list[float] | None:
    """Return the unique weights with which ``columns`` sum to ``found``; None if there are none."""
    matrix = torch.stack([column.detach().double().reshape(-1).cpu() for column in columns], 1)
    target = found.detach().double().reshape(-1, 1).cpu()
    solved = torch.linalg.lstsq(matrix, target, rcond=_ROUNDING, driver="gelsd")
    scale = max(float(target.norm()), float(matrix.norm()))
    if int(solved.rank) < len(columns):
        return None
    if float((matrix @ solved.solution - target).norm()) > _ROUNDING * scale:
        return None
    weights: list[float] = solved.solution.flatten().tolist()
    return [round(weight, 6) for weight in weights]


def _causes(found: str, *causes: str) -> str:
    """Append the possible causes to what was found, most likely first."""
    *most, last = causes
    listed = f"{', '.join(most)}, or {last}" if most else last
    return f"{found}; possible cause{'s' * bool(most)}: {listed}"


def _cause_of_factor(factor: float, num_parts: int, dims: Mapping[str, int]) -> str:
    if factor in (0.0, 1.0):
        return "" if factor else "is zero"
    causes = []
    if _is_near(factor, num_parts):
        causes.append(f"a sum over the {num_parts} data-parallel ranks where a mean is expected")
    if _is_near(factor * num_parts, 1):
        causes += [
            f"a gradient that is divided twice by the {num_parts} data-parallel ranks",
            "one that is divided but not summed",
        ]
    matching_dims = [name for name, size in dims.items() if _is_near(factor, size)]
    if "ep" in matching_dims:
        causes.append(
            "gradients of experts that are not divided by the number of all ranks whose tokens "
            "reach them, as set_gradient_divide_factor does"
        )
    causes += [
        f"a sum over {name} where a mean is expected"
        for name in matching_dims
        if name not in ("dp", "ep") or not causes
    ]
    if factor > 1 and _is_near(factor, round(factor)):
        causes.append(
            f"losses of {round(factor)} micro-batches that are not divided by their number"
        )
    return _causes(
        f"is {factor:.4g} times what is expected", *causes, "a wrong divisor", "a loss scale"
    )


def _cause_in_parts(weights: Sequence[float], counts: Sequence[int]) -> str:
    """Describe the error in the reduction that gives parts these weights instead of 1 each."""
    number = len(weights)
    missing = [part for part, weight in enumerate(weights) if not weight]
    if missing:
        return _causes(
            f"lacks part {missing[0]} of the batch",
            "a rank whose gradient was not reduced",
            "a dropped micro-batch",
        )
    if all(
        _is_near(weight * count * number, sum(counts))
        for weight, count in zip(weights, counts, strict=True)
    ):
        tokens = ", ".join(map(str, counts))
        return _causes(
            f"gives the parts of the batch equal weights, though they have {tokens} tokens",
            "a mean over ranks where a mean over tokens is expected",
            "a loss that counts padding",
        )
    shown = ", ".join(f"{weight / number:.3g}" for weight in weights)
    return _causes(
        f"gives the parts of the batch the weights {shown}, expected {1 / number:.3g} each",
        "a mean over ranks where a mean over rows or tokens is expected",
        "the reverse",
        "a loss that is scaled differently on some ranks",
    )


def _cause_in_pieces(weights: Sequence[float], num_pieces: int, num_rows: int) -> str:
    """Describe the error in micro-batches that gives pieces of ``num_rows`` rows these weights."""

    def place(index: int) -> str:
        part, piece = divmod(index, num_pieces)
        first, last = piece * num_rows, (piece + 1) * num_rows - 1
        return f"{f'row {first}' if first == last else f'rows {first} to {last}'} of part {part}"

    missing = [place(index) for index, weight in enumerate(weights) if not weight]
    if missing:
        return _causes(
            f"lacks {', '.join(missing)} of the batch",
            "a dropped micro-batch",
            "gradients that were reset or overwritten between micro-batches",
            "rows that the loss leaves out",
        )
    farthest = max(range(len(weights)), key=lambda index: abs(weights[index] - 1))
    return _causes(
        f"counts {place(farthest)} of the batch {weights[farthest]:.4g} times, expected once",
        "a micro-batch that is scaled differently",
        "one that is accumulated more than once",
        "weights in the loss",
    )


def _is_near(number: float, expected: float) -> bool:
    return abs(number - expected) < 1e-4 * max(1.0, abs(expected))
