"""Compares the bits of sharded models and of their optimizers."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.tensor.sharding import local_of


def bits_of(
    model: nn.Module, optimizer: Optimizer, *, gradients: bool = False
) -> dict[str, Tensor]:
    """This rank's parts of parameters and states, and of ``gradients`` if asked for, copied."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors = {"": parameter, **optimizer.state[parameter]}
        if gradients and parameter.grad is not None:
            tensors["grad"] = parameter.grad
        for key, value in tensors.items():
            if isinstance(value, Tensor):
                local = local_of(value) if hasattr(value, "placements") else value
                found[f"{name} {key}"] = local.detach().reshape(-1).view(torch.uint8).clone()
    return found


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name
