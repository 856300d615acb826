"""The reference: one process runs every rank's part of a batch and then takes one optimizer step.

The loss is the mean of the parts' losses or, if `loss_fn` returns sums and token counts, the mean
over all tokens. For a model that treats rows independently, this is the loss of the whole batch.
For other models (batch norm, a router with a capacity), it is what the ranks compute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import PlanError
from shardwise.features.checks import device_for
from shardwise.features.fsdp_module import FSDPModule
from shardwise.tensor.mesh import DataParallelMesh
from shardwise.verification.batches import SEED, Part
from shardwise.verification.engines import BackwardFn
from shardwise.verification.exchange import RankExchange
from shardwise.verification.optimizers import OptimizerFn, adamw

__all__ = ["LossFn", "Outcome", "Reference", "Training"]

LossFn = Callable[[Any, Any], Tensor | tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Training:
    """The model, loss and optimizer to train, sharded or not."""

    model_fn: Callable[[], nn.Module]
    loss_fn: LossFn | None
    optimizer_fn: OptimizerFn | None

    def build(self) -> nn.Module:
        """Build a new model, with the same float64 values each time."""
        torch.manual_seed(SEED)
        model = self.model_fn()
        if not isinstance(model, nn.Module) or isinstance(model, FSDPModule):
            raise PlanError(
                f"model_fn returned {type(model).__name__}: expected a new torch.nn.Module that is "
                "not sharded, because verify shards it"
            )
        if next(model.parameters(), None) is None:
            raise PlanError(
                f"model_fn returned {type(model).__name__} without parameters; there is nothing to "
                "verify"
            )
        return model.double()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return (self.optimizer_fn or adamw)(model.parameters())

    def backward_with(self, backward: BackwardFn, part: Part) -> float:
        """Compute gradients with an engine's own ``backward``; return the loss of the part."""
        return float(backward(self.loss_fn or _model_is_loss, part.draw()))

    def backward(self, model: nn.Module, part: Part, weight: float = 1.0) -> tuple[float, int]:
        """Run the backward of the loss of a part times ``weight``; return it, and its tokens."""
        loss, count = _with_count((self.loss_fn or _model_is_loss)(model, part.draw()))
        weighted = loss * weight
        weighted.backward()  # type: ignore[no-untyped-call]
        return float(weighted.detach()), count


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step. Tensors are keyed by parameter name and live on the ranks' device."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    parameters: Mapping[str, Tensor]  # after the optimizer's step
    counts: Sequence[int]  # tokens of each part; 1 each where losses are means


class Reference:
    def __init__(
        self,
        training: Training,
        mesh: DataParallelMesh,
        exchange: RankExchange,
        num_parts: int | None = None,
    ) -> None:
        """Build one model per part; the models share parameters.

        Buffers (such as running statistics of batch norm) and other module state are separate.
        """
        self._training = training
        self._exchange = exchange
        model = training.build()
        self.name = type(model).__name__
        self.device = device_for(model, mesh)
        self._models = [model.to(self.device)]  # one per part
        self.parameters = dict(model.named_parameters())
        self.initial = self.values()
        for _ in range((exchange.num_parts if num_parts is None else num_parts) - 1):
            other = self.rebuild()
            _share_parameters(other.to(self.device), model)
            self._models.append(other)
        self._optimizer = training.optimizer(model)

    def rebuild(self) -> nn.Module:
        """Build a new model; raise a PlanError unless its values are the initial ones."""
        model = self._training.build()
        self._exchange.raise_first(self._difference(model))
        return model

    def contributions(
        self, name: str, parts: Sequence[Part], before: Mapping[str, Tensor], num_pieces: int
    ) -> list[Tensor]:
        """Return what ``num_pieces`` of each part add to the gradient of parameter ``name``.

        The parameters have the values ``before``.
        """
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(before[key])
        parameter, found, total = self.parameters[name], [], 0
        for model, part in zip(self._models, parts, strict=True):
            for piece in part.split(num_pieces):
                total += self._training.backward(model, piece)[1]
                gradient = parameter.grad
                found.append(torch.zeros_like(parameter) if gradient is None else gradient)
                model.zero_grad(set_to_none=True)
        return [gradient / total for gradient in found]

    def step(self, parts: Sequence[Part], *, zeros: bool) -> Outcome:
        """Train one step, each model on its part.

        With ``zeros``, the gradient of a parameter that no part used is zero instead of None.
        """
        loss, counts = 0.0, []
        for model, part in zip(self._models, parts, strict=True):
            own, count = self._training.backward(model, part)
            loss += own
            counts.append(count)
        if zeros:
            self._fill_with_zeros()
        total = sum(counts)
        gradients = {name: p.grad for name, p in self.parameters.items()}
        for gradient in gradients.values():
            if gradient is not None:
                gradient.div_(total)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return Outcome(loss / total, gradients, self.values(), counts)

    def values(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    def _fill_with_zeros(self) -> None:
        for parameter in self.parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _difference(self, other: nn.Module) -> str | None:
        found = dict(other.named_parameters())
        if unmatched := sorted(found.keys() ^ self.initial.keys()):
            return f"model_fn built {', '.join(unmatched)} in one call and not in another"
        for name, expected in self.initial.items():
            if found[name] is self.parameters[name]:
                return f"model_fn returned {name} twice; it must build a new model each time"
            if not torch.equal(found[name].to(self.device), expected):
                return (
                    f"model_fn gave {name} different values in a second call; it may draw random "
                    "values only from torch's generator, which is seeded before each call"
                )
        return None


def _share_parameters(other: nn.Module, model: nn.Module) -> None:
    """Replace the parameters of ``other`` by those of ``model``."""
    shared = dict(model.named_parameters(remove_duplicate=False))
    for name in [name for name, _ in other.named_parameters(remove_duplicate=False)]:
        path, _, attribute = name.rpartition(".")
        setattr(other.get_submodule(path), attribute, shared[name])


def _with_count(loss: Any) -> tuple[Tensor, int]:
    """Return a loss and its number of tokens, which is 1 for a mean."""
    total, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, 1)  # noqa: PLR2004
    if not isinstance(total, Tensor) or total.ndim:
        got = f"shape {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise PlanError(
            f"the loss is {got}: expected a scalar; pass a loss_fn(model, batch) that returns "
            "the mean over the batch, or (sum over its tokens, number of tokens)"
        )
    return total, int(count)


def _model_is_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss_fn for a model that returns its loss."""
    if isinstance(batch, Mapping):
        loss: Tensor = model(**batch)
    elif isinstance(batch, (tuple, list)):
        loss = model(*batch)
    else:
        loss = model(batch)
    return loss
