"""A module is saved and loaded if its state dict has copies in place of its own tensors, too.

The names are those of the state dict, so hooks that rename tensors still apply.
"""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

import shardwise as sw
from tests.covering import covered_first
from tests.ranks import on_ranks
from tests.runtime.one_process import full

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


class Mlp(nn.Module):
    """Two layers, a buffer, and a tied parameter."""

    scale: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down, self.tied = nn.Linear(3, 5), nn.Linear(5, 3), nn.Linear(3, 5)
        self.tied.weight = self.up.weight
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("cache", torch.randn(2), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.up(x) + self.tied(x))) * self.scale
        return out


def _copy(_module: nn.Module, state: Any, *_args: Any) -> None:
    for name, value in list(state.items()):
        state[name] = value.detach().clone()


class Overriding(Mlp):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        _copy(self, state)
        return state


class Saving(nn.Linear):
    """Saves copies, as classes with a format of their own do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].detach().clone()


class Counting(nn.Linear):
    """Its extra state is a new tensor for each call, of a shape that changes."""

    def __init__(self, count: int) -> None:
        super().__init__(5, 3, dtype=torch.float64)
        self.counts = [count] * count

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.counts)

    def set_extra_state(self, state: Tensor) -> None:
        self.counts = state.tolist()


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


def _on_saving(module: nn.Module, hook: Callable[..., None]) -> None:
    module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]


def with_hook(seed: int) -> nn.Module:
    model = Mlp(seed)
    _on_saving(model, _copy)
    return model


def with_inner_hook(seed: int) -> nn.Module:
    model = Mlp(seed)

    def copy(_module: nn.Module, state: Any, prefix: str, _meta: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].detach().clone()

    _on_saving(model.down, copy)
    return model


def with_renaming_hooks(seed: int) -> nn.Module:
    """Old names in files; the hooks move between them and the module's."""
    model = Mlp(seed)

    def rename(state: Any, old: str, new: str) -> None:
        for name in list(state):
            if name.startswith(old):
                state[new + name.removeprefix(old)] = state.pop(name)

    _on_saving(
        model,
        lambda _module, state, prefix, _meta: rename(state, f"{prefix}up.", f"{prefix}first."),
    )
    model.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
        lambda _module, state, prefix, *_: rename(state, f"{prefix}first.", f"{prefix}up.")
    )
    return model


def with_copies_renamed(seed: int) -> nn.Module:
    model = with_renaming_hooks(seed)
    _on_saving(model, _copy)
    return model


def with_saving(seed: int) -> nn.Module:
    model = Mlp(seed)
    model.down = Saving(5, 3, dtype=torch.float64)
    return model


def with_parametrization(seed: int) -> nn.Module:
    model = Mlp(seed)
    parametrize.register_parametrization(model.down, "weight", Half())
    return model


def with_checkpoint_wrapper(seed: int) -> nn.Module:
    model = Mlp(seed)
    model.down = checkpoint_wrapper(model.down)  # type: ignore[assignment]
    return model


def with_extra_state(seed: int) -> nn.Module:
    model = Mlp(seed)
    model.down = Counting(seed + 2)
    return model


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "override": Overriding,
    **{
        make.__name__: make
        for make in (
            with_hook,
            with_inner_hook,
            with_renaming_hooks,
            with_copies_renamed,
            with_saving,
            with_parametrization,
            with_checkpoint_wrapper,
            with_extra_state,
        )
    },
}


def _values(model: nn.Module) -> dict[str, Tensor]:
    buffers = [(name, x) for name, x in model.named_buffers() if name != "cache"]
    return {name: full(x).detach().clone() for name, x in (*model.named_parameters(), *buffers)}


@on_ranks(2, thorough=(1,))
@pytest.mark.parametrize(("name", "strategy"), covered_first(product(MODELS, STRATEGIES)))
def test_a_model_is_loaded(name: str, strategy: str, tmp_path: Path) -> None:
    saved, loaded = (MODELS[name](seed) for seed in (0, 1))
    optimizers = []
    for model in (saved, loaded):
        sw.fully_shard(model, units=nn.Linear, strategy=strategy)
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=0.1))
    model, optimizer = saved, optimizers[0]
    model(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    sw.save(tmp_path / "x", model=saved, optimizer=optimizer)
    report = sw.load(tmp_path / "x", model=loaded, optimizer=optimizers[1]).report
    assert not str(report)
    expected, found = _values(saved), _values(loaded)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    if name == "with_extra_state":
        assert loaded.down.counts == saved.down.counts == [2, 2]  # type: ignore[union-attr]


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    """Activation checkpointing may be switched on or off between a save and a load."""
    wrapped, plain = with_checkpoint_wrapper(0), Mlp(1)
    for number, (saved, loaded) in enumerate(((wrapped, plain), (plain, wrapped))):
        optimizers = [torch.optim.AdamW(model.parameters()) for model in (saved, loaded)]
        saved(torch.randn(4, 3, dtype=torch.float64)).square().mean().backward()
        optimizers[0].step()
        sw.save(tmp_path / str(number), model=saved, optimizer=optimizers[0])
        sw.load(tmp_path / str(number), model=loaded, optimizer=optimizers[1])
        pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
        for one, other in pairs:
            assert torch.equal(one, other)
            states = [o.state[p] for o, p in zip(optimizers, (one, other), strict=True)]
            assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


class Computed(Mlp):
    """Its state dict has a tensor that nothing loads."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {**state, "norm": self.up.weight.detach().sum()}


def test_a_copy_that_nothing_loads_is_refused(tmp_path: Path) -> None:
    model, other = Computed(0), Computed(1)
    sw.save(tmp_path / "x", model=model)
    before = _values(other)
    with pytest.raises(sw.CheckpointError, match=r"norm: the state_dict\(\) of Computed returns a"):
        sw.load(tmp_path / "x", model=other)
    assert all(torch.equal(x, before[name]) for name, x in _values(other).items())
    sw.load(tmp_path / "x", model=other, only=["up.*", "down.*", "tied.*", "scale"])
    assert torch.equal(other.up.weight, model.up.weight)


def test_an_extra_state_that_nothing_loads_is_refused(tmp_path: Path) -> None:
    class Silent(nn.Linear):
        def get_extra_state(self) -> Tensor:
            return torch.ones(1)

    sw.save(tmp_path / "x", model=Silent(2, 2))
    with pytest.raises(sw.CheckpointError, match=r"_extra_state: the state_dict\(\) of Silent"):
        sw.load(tmp_path / "x", model=Silent(2, 2))
