"""A sharded model with an optimizer, and its bits."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from tests.models import CASES, build
from tests.runtime.one_process import BATCH, full, own_part, world_size


class Training:
    """A case of `tests.models` with AdamW, sharded."""

    def __init__(self, name: str, *, seed: int = 0, **options: Any) -> None:
        self.case = CASES[name]
        torch.manual_seed(seed)
        self.model = build(name)
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                parameter.data.add_(seed)
        sw.fully_shard(self.model, **{"units": self.case.units, **options})
        self.optimizer = adamw(self.model)

    def step(self, number: int = 0) -> None:
        """Train one step on a batch that depends only on ``number``."""
        torch.manual_seed(1000 + number)
        self.case.loss(self.model(own_part(self.case.batch(BATCH)))).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> dict[str, bytes]:
        """The bytes of every gathered parameter, buffer and state."""
        found = {name: bits(x) for name, x in self.model.state_dict(keep_vars=True).items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = bits(value)
        for number, group in enumerate(self.optimizer.param_groups):
            options = {key: value for key, value in group.items() if key != "params"}
            found[f"group {number}"] = repr(options).encode()
        return found

    def own_bytes(self) -> int:
        """The size of the shards, buffers and states on this rank."""
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        return sum(_nbytes(x) for x in (*self.model.parameters(), *self.model.buffers(), *states))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups and more states than by default."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.2},
        {"params": [p for p in parameters if p.ndim <= 1]},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, amsgrad=True)


def bits(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    whole: Tensor = full(value).detach().contiguous()
    return str(tuple(whole.shape)).encode() + whole.reshape(-1).view(torch.uint8).numpy().tobytes()


def digests(path: Path) -> dict[str, str]:
    """The sha256 of every file of a checkpoint."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())
    }


def differing(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def wide(size: int) -> nn.Module:
    """A model with parameters of several checksum blocks, which ranks cut inside blocks."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(701, size), nn.Linear(613, 5), nn.Linear(5, 500_003))


def save_wide(size: int, strategy: str, place: Path | str) -> None:
    model = sw.fully_shard(wide(size), units=nn.Linear, **options_for(strategy))
    sw.save(place, model=model)


def load_wide(size: int, place: Path | str) -> int:
    """Load what `save_wide` saved and check it; return the bytes that this rank read."""
    model = wide(size)
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    sw.fully_shard(model, units=nn.Linear)
    loaded = sw.load(place, model=model)
    for parameter, values in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.full_tensor(), values)  # type: ignore[attr-defined]
    return loaded.bytes_read


def options_for(strategy: str) -> dict[str, Any]:
    """The arguments of `fully_shard` for a strategy on the current ranks."""
    is_hybrid = strategy in ("hsdp", "hfsdp") and world_size() > 1
    return {"strategy": strategy, **({"sharding_factor": 2} if is_hybrid else {})}


def _nbytes(value: Any) -> int:
    if isinstance(value, sw.ShardedTensor):
        return value.to_local().nbytes
    return value.nbytes if isinstance(value, Tensor) else 0
