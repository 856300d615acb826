"""Losses of a model, and the order of their forwards and backwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Loss", "backwards", "losses_of", "outputs_of"]


@dataclass(frozen=True)
class Loss:
    """A mean over parts of a batch, and the loss of every part."""

    total: Tensor
    parts: tuple[Tensor, ...]


MakeLosses = Callable[[], list[Loss]]


def losses_of(model: nn.Module, parts: Sequence[Tensor]) -> list[Loss]:
    """Two losses of one forward, each the mean over ``parts``."""
    by_part = [_two_losses(outputs_of(model, part)) for part in parts]
    return [
        Loss(torch.stack(list(losses)).mean(), tuple(loss.detach() for loss in losses))
        for losses in zip(*by_part, strict=True)
    ]


def _two_losses(outputs: list[Tensor]) -> tuple[Tensor, Tensor]:
    return outputs[0].square().mean(), sum((y.sin().mean() for y in outputs), torch.zeros(()))


def outputs_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    output = model(x.clone())
    return [output] if isinstance(output, Tensor) else [output[0], output[1]["hidden"]]


def backwards(kind: str, make: Sequence[MakeLosses]) -> Iterator[Loss]:
    """One or two forwards, and their backwards as ``kind`` says; yields after each of them."""
    first = make[0]()
    match kind:
        case "plain":
            yield _backward(first[0])
        case "two forwards" | "reversed":
            second = make[1]()
            order = (first[0], second[1]) if kind == "two forwards" else (second[1], first[0])
            for loss in order:
                yield _backward(loss)
        case "sum":
            second = make[1]()
            yield _backward(Loss(first[0].total + second[1].total, second[1].parts))
        case "roots":
            torch.autograd.backward([loss.total for loss in first])
            yield first[1]
        case "twice":
            yield _backward(first[0], retain_graph=True)
            yield _backward(first[1])
        case "abandoned":
            yield _backward(make[1]()[0])
        case _:
            raise AssertionError(kind)


def _backward(loss: Loss, **options: Any) -> Loss:
    loss.total.backward(**options)  # type: ignore[no-untyped-call]
    return loss
