"""Inputs on the CPU are copied to the device of the parameters, as FSDP1 and FSDP2 copy them."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import shardwise as sw
from shardwise.fsdp import register_fsdp_forward_method
from shardwise.runtime import engine
from shardwise.runtime.casting import move_tensors
from tests.streams.install import simulated
from tests.streams.programs import DEVICE
from tests.streams.simulation import Problem, Simulation

SIZE = 4
CPU = torch.device("cpu")


class Pair(NamedTuple):
    x: Tensor
    mask: Tensor


class Model(nn.Module):
    """Notes the devices of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        self.seen: list[torch.device] = []

    def forward(self, pair: Pair, *, extra: dict[str, Any], steps: int = 1) -> Tensor:
        self.seen += [pair.x.device, pair.mask.device, *(one.device for one in extra["more"])]
        y = pair.x
        for _ in range(steps):
            y = self.layer(y)
        return y * pair.mask

    def predict(self, x: Tensor) -> Tensor:
        self.seen.append(x.device)
        y: Tensor = self.layer(x)
        return y

    def lengths(self, packed: PackedSequence) -> Tensor:
        self.seen += [packed.data.device, packed.batch_sizes.device]
        return self.layer(packed.data)  # type: ignore[no-any-return]


def _inputs() -> tuple[Pair, dict[str, Any]]:
    x, mask = torch.randn(2, SIZE), torch.ones(2, SIZE, dtype=torch.bool)
    return Pair(x, mask), {"more": [torch.zeros(1, dtype=torch.int64), x], "name": "text"}


def _sharded(simulation: Simulation, **options: Any) -> Any:
    simulation.current_device = DEVICE.index
    return sw.fully_shard(Model().to(DEVICE), units=nn.Linear, **options)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_nested_inputs_are_copied_and_the_callers_are_kept(dtype: torch.dtype | None) -> None:
    with simulated(simulation := Simulation()):
        model = _sharded(simulation, mp_policy=sw.MixedPrecisionPolicy(dtype))
        pair, extra = _inputs()
        pair.x.requires_grad_()
        torch.autograd.backward(model(pair, extra=extra).sum())
        assert model.seen == 4 * [DEVICE]
        assert {pair.x.device, extra["more"][0].device} == {CPU}
        assert pair.x.grad is not None
    assert not [one for one in simulation.found if one.problem is not Problem.SYNC]


def test_the_host_does_not_wait_for_copies_from_pinned_memory() -> None:
    with simulated(simulation := Simulation()):
        model = _sharded(simulation)
        waits = []
        for pinned in (True, True, False):
            x = torch.empty(2, SIZE, pin_memory=pinned)
            mask = torch.empty(2, SIZE, dtype=torch.bool, pin_memory=pinned)
            before = simulation.syncs.total()
            model(Pair(x, mask), extra={"more": []})
            waits.append(simulation.syncs.total() - before)
        assert waits[1:] == [0, 2]  # the first forward creates streams
        assert set(model.seen) == {DEVICE}


def test_other_methods_units_and_gathered_models_take_inputs_on_the_cpu() -> None:
    with simulated(simulation := Simulation()):
        model = _sharded(simulation)
        for method in ("predict", "lengths"):
            register_fsdp_forward_method(model, method)
        model.predict(torch.randn(2, SIZE))
        model.lengths(pack_sequence([torch.randn(2, SIZE), torch.randn(1, SIZE)]))
        assert model.seen == [DEVICE, DEVICE, CPU]  # as PackedSequence.to does
        assert model.layer(torch.randn(2, SIZE)).device == DEVICE
        with sw.gathered(model):
            assert model.predict(torch.randn(2, SIZE)).device == DEVICE


def test_inputs_of_vmap_are_copied() -> None:
    """PyTorch cannot say of them whether they are pinned."""
    found = torch.vmap(lambda x: move_tensors([x], CPU)[0])(torch.ones(2, SIZE))
    assert torch.equal(found, torch.ones(2, SIZE))


def test_only_the_device_of_the_parameters_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the CPU is left alone, also where there is an accelerator."""
    monkeypatch.setattr(engine, "move_tensors", None)
    with simulated(Simulation()):
        model: Any = sw.fully_shard(Model(), units=nn.Linear)
        pair, extra = _inputs()
        model(pair, extra=extra)
        assert set(model.seen) == {CPU}
