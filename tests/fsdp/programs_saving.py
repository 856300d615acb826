"""Programs that save and load with FSDP1; ``f`` is the module that they import from."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from tests.fsdp.both import assert_same
from tests.fsdp.models import batch, make_net
from tests.fsdp.programs1 import fsdp, is_ours, loss_of, values
from tests.fsdp.programs2 import OPTIMIZERS


def cls(f: Any) -> Any:
    return f.FullyShardedDataParallel


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def sorted_states(states: dict[str, Any]) -> dict[str, Any]:
    """A sorted copy: PyTorch's order is undefined, and loading shares memory with its argument."""
    states = copy.deepcopy(states)
    groups = [
        {key: sorted(value) if key == "params" else value for key, value in group.items()}
        for group in states.get("param_groups", [])
    ]
    named = states.get("state", {})
    return {"state": {name: named[name] for name in sorted(named)}, "groups": groups}


def full(f: Any, policy: str, config: dict[str, bool]) -> list[Any]:
    net = fsdp(f, make_net(), policy)
    kind = f.StateDictType.FULL_STATE_DICT
    config = config | {
        "offload_to_cpu": config["offload_to_cpu"] and is_ours(f)
    }  # PyTorch's crashes
    with cls(f).state_dict_type(net, kind, f.FullStateDictConfig(**config)):
        saved = net.state_dict()
    other = fsdp(f, make_net(seed=3), policy)
    whole = f.FullStateDictConfig()
    with cls(f).state_dict_type(net, kind, whole), cls(f).state_dict_type(other, kind, whole):
        missing = other.load_state_dict(net.state_dict())
    return [saved, list(missing), values(f, other)]


def full_by_default(f: Any) -> list[Any]:
    net = fsdp(f, make_net())
    saved = net.state_dict()
    plain = make_net(seed=3)
    plain.load_state_dict(saved)
    other = fsdp(f, make_net(seed=3))
    other.load_state_dict(plain.state_dict())
    return [saved, values(f, other)]


def inside_another(f: Any) -> list[Any]:
    """The wrapped model is part of a model that is not wrapped."""

    class Outer(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.inner = fsdp(f, make_net(seed=seed))
            self.plain = nn.Linear(2, 2)

    torch.manual_seed(0)
    outer, other = Outer(0), Outer(3)
    saved = outer.state_dict()
    other.load_state_dict(saved)
    return [saved, values(f, other)]


def strictly(f: Any) -> list[Any]:
    net = fsdp(f, make_net())
    saved = net.state_dict()
    del saved["head.bias"]
    saved["nothing.of.that.name"] = torch.zeros(2)
    other = fsdp(f, make_net(seed=3))
    try:
        other.load_state_dict(saved)
        refused = False
    except RuntimeError:
        refused = True
    other.load_state_dict(saved, strict=False)
    return [refused, values(f, other)]


def sharded(f: Any, kind: str, offload: bool) -> list[Any]:
    """The shards of both implementations differ, so the loaded models are compared."""
    net, other = fsdp(f, make_net()), fsdp(f, make_net(seed=3))
    config = getattr(f, f"{kind.title()}StateDictConfig")(offload_to_cpu=offload)
    kind_of = getattr(f.StateDictType, f"{kind.upper()}_STATE_DICT")
    for model in (net, other):
        cls(f).set_state_dict_type(model, kind_of, config)
    saved = net.state_dict()
    other.load_state_dict(saved)
    for model in (net, other):
        cls(f).set_state_dict_type(model, f.StateDictType.FULL_STATE_DICT)
    assert_same(values(f, other), values(f, net), "loaded")
    return [sorted(saved), values(f, other)]


def shards_of(states: dict[str, Any]) -> dict[str, Any]:
    """The offsets and contents of this rank's shards; other values unchanged."""
    return {
        name: [(list(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
        if isinstance(value, ShardedTensor)
        else value
        for name, value in states.items()
    }


def sharded_tensors(f: Any, offload: bool) -> list[Any]:
    """Parameters and optimizer states as torch's sharded tensors, saved and loaded."""
    net, other, first, second = trained(f, "adam")
    config = f.ShardedStateDictConfig(offload_to_cpu=offload)
    for model in (net, other):
        cls(f).set_state_dict_type(model, f.StateDictType.SHARDED_STATE_DICT, config)
    saved = copy.deepcopy(net.state_dict())
    states = copy.deepcopy(cls(f).optim_state_dict(net, first))
    seen = [shards_of(saved), {n: shards_of(states["state"][n]) for n in sorted(states["state"])}]
    other.load_state_dict(saved)
    loadable = cls(f).optim_state_dict_to_load(other, second, copy.deepcopy(states))
    second.load_state_dict(loadable)
    return [*seen, *continued(f, net, other, first, second)]


def settings(f: Any) -> list[Any]:
    net = fsdp(f, make_net())
    seen = []

    def see() -> None:
        now = cls(f).get_state_dict_type(net)
        seen.append(
            [
                now.state_dict_type.name,
                type(now.state_dict_config).__name__,
                now.state_dict_config.offload_to_cpu,
                getattr(now.state_dict_config, "rank0_only", None),
                type(now.optim_state_dict_config).__name__,
                now.optim_state_dict_config.offload_to_cpu,
            ]
        )

    see()
    with cls(f).state_dict_type(net, f.StateDictType.SHARDED_STATE_DICT):
        see()
        with cls(f).state_dict_type(
            net,
            f.StateDictType.FULL_STATE_DICT,
            f.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            f.FullOptimStateDictConfig(offload_to_cpu=False),
        ):
            see()
        see()
    before = cls(f).set_state_dict_type(net, f.StateDictType.LOCAL_STATE_DICT)
    seen.append(before.state_dict_type.name)
    see()
    return seen


def optimizer_of(net: Any, name: str) -> Any:
    if name != "groups":
        return OPTIMIZERS[name](net.parameters())
    named = [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in net.named_parameters()]
    matrices = [p for n, p in named if n.endswith("weight")]
    rest = [p for n, p in named if not n.endswith("weight")]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": 0.02}, {"params": matrices}]
    return torch.optim.Adam([{"params": [], "lr": 0.5}, *groups], lr=0.01)


def continued(f: Any, net: Any, other: Any, first: Any, second: Any) -> list[Any]:
    """Assert that another step gives the same parameters, and return them."""
    seen = []
    for model, optimizer in ((net, first), (other, second)):
        step(model, optimizer, 5)
        seen.append(values(f, model))
    for one, two in zip(seen[0].values(), seen[1].values(), strict=True):
        assert torch.equal(one, two)
    return seen


def trained(f: Any, name: str) -> tuple[Any, Any, Any, Any]:
    net, other = fsdp(f, make_net()), fsdp(f, make_net(seed=3))
    first, second = optimizer_of(net, name), optimizer_of(other, name)
    step(net, first, 0)
    step(net, first, 1)
    return net, other, first, second


def optimizer_states(f: Any, name: str, kind: str) -> list[Any]:
    """Uses ``optim_state_dict`` and ``optim_state_dict_to_load``."""
    net, other, first, second = trained(f, name)
    for model in (net, other):
        cls(f).set_state_dict_type(model, getattr(f.StateDictType, f"{kind}_STATE_DICT"))
    states = cls(f).optim_state_dict(net, first)
    if kind == "FULL":
        states = copy.deepcopy(states)
    seen = sorted_states(states) if kind == "FULL" else sorted(states["state"])
    other.load_state_dict(net.state_dict())
    second.load_state_dict(cls(f).optim_state_dict_to_load(other, second, states))
    for model in (net, other):
        cls(f).set_state_dict_type(model, f.StateDictType.FULL_STATE_DICT)
    return [seen, *continued(f, net, other, first, second)]


def optimizer_states_of_rank_0(f: Any, name: str) -> list[Any]:
    net, other, first, second = trained(f, name)
    config = f.FullOptimStateDictConfig(rank0_only=True)
    for model in (net, other):
        cls(f).set_state_dict_type(
            model, f.StateDictType.FULL_STATE_DICT, optim_state_dict_config=config
        )
    states = copy.deepcopy(cls(f).optim_state_dict(net, first))
    other.load_state_dict(net.state_dict())
    loadable = cls(f).optim_state_dict_to_load(other, second, states)
    second.load_state_dict(loadable)
    return [sorted_states(states), *continued(f, net, other, first, second)]


def full_optimizer_states(f: Any, name: str, how: str) -> list[Any]:
    """Uses the deprecated functions."""
    net, other, first, second = trained(f, name)
    states = copy.deepcopy(cls(f).full_optim_state_dict(net, first, rank0_only=how == "scatter"))
    other.load_state_dict(net.state_dict())
    if how == "scatter":
        given = states if dist.get_rank() == 0 else None
        loadable = cls(f).scatter_full_optim_state_dict(given, other, optim=second)
    else:
        loadable = cls(f).shard_full_optim_state_dict(states, other, optim=second)
    second.load_state_dict(loadable)
    return [sorted_states(states), *continued(f, net, other, first, second)]


def optimizer_inputs(f: Any, name: str, how: str) -> list[Any]:
    """Passes ``optim_input``, the optimizer's constructor argument, instead of ``optim``."""
    net, other, first, second = trained(f, name)
    given = [{**group} for group in second.param_groups] if name == "groups" else other.parameters()
    states = copy.deepcopy(cls(f).full_optim_state_dict(net, first, rank0_only=False))
    other.load_state_dict(net.state_dict())
    function = getattr(cls(f), f"{how}_full_optim_state_dict")
    second.load_state_dict(function(states, other, optim_input=given))
    return continued(f, net, other, first, second)


def sharded_optimizer_states(f: Any, name: str) -> list[Any]:
    net, other, first, second = trained(f, name)
    states = cls(f).sharded_optim_state_dict(net, first)
    other.load_state_dict(net.state_dict())
    loadable = cls(f).flatten_sharded_optim_state_dict(states, other, second)
    second.load_state_dict(loadable)
    return [sorted(states["state"]), *continued(f, net, other, first, second)]


def rekeyed(f: Any) -> list[Any]:
    """States of a model that is not sharded, by name and by index."""
    plain = make_net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    plain(batch(0, 0)).pow(2).mean().backward()
    optimizer.step()
    by_name = cls(f).rekey_optim_state_dict(
        optimizer.state_dict(), f.OptimStateKeyType.PARAM_NAME, plain, optim=optimizer
    )
    seen = sorted_states(by_name)
    by_number = cls(f).rekey_optim_state_dict(
        by_name, f.OptimStateKeyType.PARAM_ID, plain, optim=optimizer
    )
    net = fsdp(f, make_net())
    net.load_state_dict(plain.state_dict())
    second = torch.optim.Adam(net.parameters(), lr=0.01)
    states = copy.deepcopy(by_name)
    second.load_state_dict(cls(f).shard_full_optim_state_dict(states, net, optim=second))
    step(net, second, 5)
    return [seen, sorted(by_number["state"]), values(f, net)]


def into_one_process(f: Any, name: str) -> list[Any]:
    """Full states are loaded by an optimizer of a model that is not sharded."""
    net, _, first, _ = trained(f, name)
    states = copy.deepcopy(cls(f).full_optim_state_dict(net, first, rank0_only=False))
    plain = make_net()
    plain.load_state_dict(net.state_dict())
    optimizer = optimizer_of(plain, name)
    kind = f.OptimStateKeyType.PARAM_ID
    optimizer.load_state_dict(cls(f).rekey_optim_state_dict(states, kind, plain, optim=optimizer))
    (sum(plain(batch(5, rank)).pow(2).mean() for rank in range(2)) / 2).backward()
    optimizer.step()
    step(net, first, 5)
    assert_same({n: p.detach() for n, p in plain.named_parameters()}, values(f, net), "plain")
    return [values(f, net)]
