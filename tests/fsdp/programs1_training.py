"""Programs for FSDP1 with options of training; ``f`` is the module that they import from."""

import copy
import importlib
import os
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    allreduce_hook,
    reduce_scatter_hook,
)

from tests.fsdp.both import assert_same
from tests.fsdp.models import batch, make_net
from tests.fsdp.programs1 import CPU, fsdp, gradients, loss_of, run, values

HALF = torch.bfloat16


def hook_in_half(world_size: int, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Reduce in bfloat16, and replace ``.data``, as PyTorch's hooks do."""
    kept = gradient.dtype
    gradient.data = gradient.data.to(HALF)
    if shard is None:
        dist.all_reduce(gradient)
        gradient.data = gradient.data.to(kept) / world_size
    else:
        shard.data = shard.data.to(HALF)
        dist.reduce_scatter_tensor(shard, gradient)
        shard.data = shard.data.to(kept) / world_size


def hook_without_communication(
    state: list[int], gradient: Tensor, shard: Tensor | None = None
) -> None:
    """Keep this rank's part of its own gradients."""
    state.append(gradient.numel())
    if shard is not None:
        shard.copy_(gradient.chunk(dist.get_world_size())[dist.get_rank()])


def hooks(f: Any, which: str, strategy: str, policy: str) -> list[Any]:
    net = fsdp(f, make_net(), policy, sharding_strategy=strategy)
    if which == "default":
        default = allreduce_hook if strategy == "NO_SHARD" else reduce_scatter_hook
        world: Any = dist.group.WORLD
        net.register_comm_hook(DefaultState(world), default)
    else:
        net.register_comm_hook(dist.get_world_size(), hook_in_half)
    with net.no_sync():
        loss_of(net, 7).backward()
    return run(f, net)


def own_hook(f: Any) -> list[Any]:
    """The hook is called with the gradients of each unit, without those of units inside it."""
    net = fsdp(f, make_net(), sharding_strategy="NO_SHARD")
    state: list[int] = []
    net.register_comm_hook(state, hook_without_communication)
    loss_of(net, 0).backward()
    names = [n for n, p in net.named_parameters() if p.grad is not None]
    return [len(state), len(names), gradients(f, net)]


def keeps_low_precision(f: Any, strategy: str) -> list[Any]:
    policy = f.MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, keep_low_precision_grads=True)
    net = fsdp(f, make_net().float(), mixed_precision=policy, sharding_strategy=strategy)
    for step in range(2):
        net(batch(step, dist.get_rank()).float()).float().pow(2).mean().backward()
    found = [p.grad.dtype for p in net.parameters() if p.grad is not None and p.grad.numel()]
    norm = net.clip_grad_norm_(0.01)
    return [set(found), norm.dtype, round(norm.item(), 1)]


class Experts(nn.Module):
    """A unit that differs between ranks, after layers that all ranks share."""

    def __init__(self, f: Any) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank() + 1)
        expert = nn.Linear(4, 4).double()
        torch.manual_seed(0)
        own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        wrap = f.FullyShardedDataParallel
        self.before = nn.Linear(4, 4).double()
        self.shared = wrap(nn.Linear(4, 4).double(), device_id=CPU, use_orig_params=True)
        self.expert = wrap(expert, own, device_id=CPU, use_orig_params=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.shared(self.before(x)).tanh())  # type: ignore[no-any-return]


def experts(f: Any) -> list[Any]:
    net = f.FullyShardedDataParallel(Experts(f), device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x = torch.full((3, 4), 0.1 + dist.get_rank(), dtype=torch.float64)
    seen: list[Any] = []
    for step in range(4):
        if step == 1:
            with net.no_sync():
                net(x).pow(2).mean().backward()
        loss = net(x * (step + 1)).pow(2).mean()
        loss.backward()
        seen += [loss.item(), gradients(f, net)]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seen.append(net(x))
    return [*seen, values(f, net), {n: t.clone() for n, t in net.state_dict().items()}]


def copies(f: Any) -> None:
    """A copy of a model with several process groups trains like the original."""
    net = f.FullyShardedDataParallel(Experts(f), device_id=CPU)
    twin = copy.deepcopy(net)
    assert len(f.FullyShardedDataParallel.fsdp_modules(twin)) == 3
    x = torch.full((3, 4), 0.1 + dist.get_rank(), dtype=torch.float64)
    for model in (net, twin):
        model(x).pow(2).mean().backward()
    assert_same(gradients(f, twin), gradients(f, net), "gradients", 0.0)
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert not torch.equal(twin(x), net(x))


def other_names(f: Any) -> list[Any]:
    """Parameter names differ between ranks, which ignore different numbers of modules."""
    torch.manual_seed(0)
    ignored = [nn.Linear(4, 4).double() for _ in range(dist.get_rank() + 1)]
    torch.manual_seed(1)
    net = nn.Sequential(*ignored, nn.Linear(4, 6).double(), nn.Linear(6, 4).double())
    wrapped = f.FullyShardedDataParallel(
        net, ignored_modules=ignored, device_id=CPU, use_orig_params=True
    )
    wrapped(batch(0, dist.get_rank())).pow(2).mean().backward()
    return list(gradients(f, wrapped).values())[-4:]


def wraps_norms(f: Any, policy: str) -> list[Any]:
    """Batch norms are units of their own, in full precision."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    mixed = f.MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fsdp(f, net, policy, mixed_precision=mixed)
    found = [m for m in model.modules() if isinstance(m, f.FullyShardedDataParallel)]
    output = model(batch(0, dist.get_rank()).float())
    output.float().pow(2).mean().backward()
    return [
        any("These modules will be wrapped as separate FSDP" in str(w.message) for w in caught),
        [type(m.module).__name__.removeprefix("FSDP") for m in found],
        [m.mixed_precision.param_dtype for m in found],
        output.detach(),
        [buffer.dtype for buffer in model.buffers()],
    ]


def evaluates_in_full_precision(f: Any) -> None:
    """Evaluation between backward and step uses float32 and does not change training."""
    mixed = f.MixedPrecision(param_dtype=HALF, reduce_dtype=HALF)
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        nets = [fsdp(f, make_net().float(), mixed_precision=mixed) for _ in range(2)]
    full = fsdp(f, make_net().float())
    x = batch(0, dist.get_rank()).float()
    for net, evaluates in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            assert net(x).dtype == torch.float32  # the last factor is a buffer
            net(x).float().pow(2).mean().backward()
            if evaluates:
                full.load_state_dict(net.state_dict())
                net.eval()
                with torch.no_grad():
                    assert torch.equal(net(x), full(x))
                net.train()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(values(f, nets[0]), values(f, nets[1]), "values", 0.0)
    assert torch.equal(nets[0](x), nets[1](x))
    nets[0].eval()
    full.load_state_dict(nets[0].state_dict())
    for net in (nets[0], full):
        net(x).pow(2).mean().backward()
    assert_same(gradients(f, nets[0]), gradients(f, full), "gradients", 0.0)


def steps_in_full_precision(f: Any) -> None:
    """An optimizer may step after an evaluation, for which the model was sharded again."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 5)  # cut at an aligned offset, which must not depend on dtypes
    mixed = f.MixedPrecision(param_dtype=HALF, reduce_dtype=HALF)
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        nets = [fsdp(f, copy.deepcopy(plain), mixed_precision=mixed) for _ in range(2)]
    x = torch.randn(4, 3)
    for net, evaluates in zip(nets, (True, False), strict=True):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            net(x).float().pow(2).mean().backward()
            if evaluates and step:
                net.eval()
                assert net(x).dtype == torch.float32
            optimizer.step()
            optimizer.zero_grad()
            net.train()
    assert_same(values(f, nets[0]), values(f, nets[1]), "values", 0.0)


def scales_in_half(f: Any) -> list[Any]:
    """Losses keep their dtype, alone and in lists."""
    scaler = importlib.import_module(f"{f.__name__}.sharded_grad_scaler").ShardedGradScaler(
        "cpu", init_scale=4.0
    )
    loss = torch.tensor(1.5, dtype=HALF)
    return [scaler.scale(loss), scaler.scale([loss, (loss, loss.float())])]


def errors(f: Any) -> list[BaseException | None]:
    """The types of errors that programs catch."""
    cls = f.FullyShardedDataParallel
    net = fsdp(f, make_net())
    net.register_comm_hook(None, hook_without_communication)
    linear = nn.Linear(2, 2)
    attempts: list[Any] = [
        lambda: net.blocks[0].clip_grad_norm_(1.0),
        lambda: net.blocks[0].no_sync().__enter__(),
        lambda: net.blocks[0].register_comm_hook(None, hook_without_communication),
        lambda: net.register_comm_hook(None, hook_without_communication),
        lambda: fsdp(f, make_net()).register_comm_hook(None, 3),
        lambda: cls(nn.Linear(2, 2, device="meta"), param_init_fn=3, device_id=CPU),
        lambda: cls(linear, ignored_modules=[linear.weight], device_id=CPU),
        lambda: cls(linear, ignored_states=[linear.weight, linear], device_id=CPU),
        lambda: cls(linear, ignored_modules=[linear], ignored_states=[linear], device_id=CPU),
        lambda: cls(nn.Sequential(net), ignored_modules=[net], device_id=CPU),
        lambda: fsdp(f, nn.Sequential(net), "always"),
    ]
    caught: list[BaseException | None] = []
    for attempt in attempts:
        try:
            attempt()
            caught.append(None)
        except Exception as error:  # noqa: BLE001
            caught.append(error)
    return caught
