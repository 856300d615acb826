"""Programs written for FSDP1; ``f`` is the module that they import from."""

import importlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.fsdp.models import STEPS, Block, Chunk, Net, batch, make_net
from tests.fsdp.programs2 import OPTIMIZERS

CPU = torch.device("cpu")


def wrap_module(f: Any) -> Any:
    return importlib.import_module(f"{f.__name__}.wrap")


def policy_of(f: Any, name: str) -> Any:
    w = wrap_module(f)
    policies = {
        "none": None,
        "always": w.always_wrap_policy,
        "size": partial(w.size_based_auto_wrap_policy, min_num_params=60),
        "large": partial(w.size_based_auto_wrap_policy, min_num_params=10_000),
        "leaf": partial(
            w.size_based_auto_wrap_policy, min_num_params=20, force_leaf_modules={Block}
        ),
        "transformer": partial(w.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "lambda": partial(
            w.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, (Block, nn.LayerNorm))
        ),
        "module": w.ModuleWrapPolicy({Block}),
        "list": w.ModuleWrapPolicy({Chunk}),
        "custom": w.CustomPolicy(lambda m: isinstance(m, nn.Linear)),
        "custom options": w.CustomPolicy(
            lambda m: (
                {"sharding_strategy": f.ShardingStrategy.SHARD_GRAD_OP}
                if isinstance(m, Block)
                else False
            )
        ),
        "or": partial(
            w._or_policy,
            policies=[
                w.ModuleWrapPolicy({Block}),
                partial(w.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Linear)),
            ],
        ),
    }
    return policies[name]


def fsdp(f: Any, module: nn.Module, policy: str = "module", **options: Any) -> Any:
    options.setdefault("use_orig_params", True)
    if isinstance(options.get("sharding_strategy"), str):
        options["sharding_strategy"] = getattr(f.ShardingStrategy, options["sharding_strategy"])
    if isinstance(options.get("backward_prefetch"), str):
        options["backward_prefetch"] = getattr(f.BackwardPrefetch, options["backward_prefetch"])
    return f.FullyShardedDataParallel(
        module, auto_wrap_policy=policy_of(f, policy), device_id=CPU, **options
    )


def loss_of(model: nn.Module, step: int) -> Any:
    return model(batch(step, dist.get_rank())).pow(2).mean()


def values(f: Any, model: nn.Module) -> dict[str, Tensor]:
    with f.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def gradients(f: Any, model: nn.Module) -> dict[str, Any]:
    whole = f.FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True)
    with whole:
        named = model.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.requires_grad and p.grad is not None}


def clean(name: str) -> str:
    """The name without wrappers, which PyTorch gives only in summon_full_params."""
    return name.replace("_fsdp_wrapped_module.", "")


def is_ours(f: Any) -> bool:
    """Whether ``f`` is shardwise, which supports on a CPU what PyTorch supports on a GPU only."""
    return bool(f.__name__ == "shardwise.fsdp")


def run(f: Any, model: Any, optimizer: str = "sgd", flat: bool = False) -> list[Any]:
    """Train; return the losses, the first gradients unless they are ``flat``, and the values."""
    chosen = OPTIMIZERS[optimizer](model.parameters())
    seen: list[Any] = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        seen.append(loss.item())
        if not step and not flat:
            seen.append(gradients(f, model))
        chosen.step()
        chosen.zero_grad()
    return [*seen, values(f, model)]


def train(
    f: Any,
    policy: str = "module",
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> list[Any]:
    return run(f, fsdp(f, make_net(**(model or {})), policy, **(options or {})), optimizer)


def prefetch(f: Any, backward: str | None, forward: bool) -> list[Any]:
    return train(f, options={"backward_prefetch": backward, "forward_prefetch": forward})


def train_flat(f: Any, optimizer: str) -> list[Any]:
    """PyTorch's parameters are flat here, so gradients are not compared."""
    net = fsdp(f, make_net(), use_orig_params=False)
    return [*run(f, net, optimizer, flat=True), dict(net.state_dict())]


def hybrid(f: Any, strategy: str, given: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: dict[str, Any] = {"device_mesh": mesh}
    if given == "groups":
        options = {"process_group": (mesh["shard"].get_group(), mesh["replicate"].get_group())}
    net = fsdp(f, make_net(), sharding_strategy=strategy, **options)
    return run(f, net)


def in_groups(f: Any) -> list[Any]:
    """Two models, each on half of the ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = fsdp(f, make_net(), process_group=groups[dist.get_rank() // 2])
    return [net.rank, net.world_size, *run(f, net)]


def mesh_1d(f: Any) -> list[Any]:
    return run(f, fsdp(f, make_net(), device_mesh=init_device_mesh("cpu", (2,))))


def modules(f: Any, policy: str) -> list[Any]:
    net = fsdp(f, make_net(), policy)
    cls = f.FullyShardedDataParallel
    return [
        len(cls.fsdp_modules(net)),
        len(cls.fsdp_modules(net, root_only=True)),
        [name for name, module in net.named_modules() if isinstance(module, cls)],
        [clean(name) for name, _ in net.named_parameters()],
        [clean(name) for name, _ in net.named_buffers()],
        isinstance(net, cls),
        isinstance(net.module, Net),
        net.scale,  # an attribute of the wrapped module
        net.check_is_root(),
        [m.sharding_strategy.name for m in cls.fsdp_modules(net)],
        [m.world_size for m in cls.fsdp_modules(net)],
    ]


def called_list(f: Any) -> list[Any]:
    """A subclass of nn.ModuleList that has a forward."""
    net = make_net()
    net.blocks = nn.ModuleList([Chunk(net.blocks)])
    net = fsdp(f, net, "list")
    units = f.FullyShardedDataParallel.fsdp_modules(net)
    return [[sum(p.numel() for p in unit.params) > 0 for unit in units], *run(f, net)]


def attributes(f: Any) -> list[Any]:
    cls = f.FullyShardedDataParallel
    sequential = cls(nn.Sequential(nn.Linear(3, 2), nn.ReLU()), device_id=CPU)
    try:
        found = sequential.nothing_of_that_name
    except AttributeError:
        found = "AttributeError"
    return [
        type(sequential[1]).__name__,
        len(sequential.module),
        found,
        [s.name for s in f.ShardingStrategy],
        [s.name for s in f.StateDictType],
        [s.name for s in f.BackwardPrefetch],
        f.CPUOffload().offload_params,
        f.MixedPrecision().param_dtype,
        f.FullStateDictConfig(rank0_only=True).offload_to_cpu,
        f.FullOptimStateDictConfig().offload_to_cpu,
    ]


def accumulate(f: Any, sync: bool, policy: str) -> list[Any]:
    net = fsdp(f, make_net(), policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    seen: list[Any] = []
    for step in range(2):
        for micro in range(2):
            if sync:
                loss_of(net, 3 * step + micro).backward()
            else:
                with net.no_sync():
                    loss_of(net, 3 * step + micro).backward()
        loss_of(net, 3 * step + 2).backward()
        seen.append(gradients(f, net))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, values(f, net)]


def clip(f: Any, max_norm: float, norm_type: float, strategy: str) -> list[Any]:
    net = fsdp(f, make_net().float(), sharding_strategy=strategy)
    net(batch(0, dist.get_rank()).float()).pow(2).mean().backward()
    norm = net.clip_grad_norm_(max_norm, norm_type)
    return [norm, gradients(f, net)]


def precision(f: Any, policy: dict[str, Any], wrapped: str) -> list[Any]:
    net = fsdp(f, make_net().float(), wrapped, mixed_precision=f.MixedPrecision(**policy))
    output = net(batch(0, dist.get_rank()).float())
    output.float().pow(2).mean().backward()
    return [output.detach(), gradients(f, net), values(f, net)]


def ignores_norms(f: Any) -> list[Any]:
    policy = f.MixedPrecision(param_dtype=torch.bfloat16, _module_classes_to_ignore=(nn.LayerNorm,))
    net = fsdp(f, make_net().float(), mixed_precision=policy)
    output = net(batch(0, dist.get_rank()).float())
    output.float().pow(2).mean().backward()
    return [output.detach(), gradients(f, net)]


def offload(f: Any, params: bool) -> list[Any]:
    cpu_offload = f.CPUOffload(offload_params=params and is_ours(f))
    return run(f, fsdp(f, make_net(), cpu_offload=cpu_offload))


def ignore(f: Any, which: str, how: str) -> list[Any]:
    net = make_net()
    module = net.get_submodule(which)
    ignored: list[Any] = list(module.parameters()) if how == "parameters" else [module]
    option = "ignored_modules" if how == "ignored_modules" else "ignored_states"
    options: dict[str, Any] = {option: ignored}
    wrapped = fsdp(f, net, **options)
    loss_of(wrapped, 0).backward()
    named = {clean(n): p.grad for n, p in wrapped.named_parameters()}
    whole = {n: gradient.clone() for n, gradient in named.items() if n.startswith(which)}
    return [whole, gradients(f, wrapped), values(f, wrapped)]


def freeze(f: Any, which: str) -> list[Any]:
    net = make_net()
    net.get_submodule(which).requires_grad_(False)
    return run(f, fsdp(f, net))


def syncs(f: Any) -> list[Any]:
    rank = dist.get_rank() if is_ours(f) else 0
    net = make_net(seed=rank)
    net.scale.add_(rank)
    wrapped = fsdp(f, net, sync_module_states=is_ours(f))
    return [net.scale, values(f, wrapped), *run(f, wrapped)]


def meta(f: Any, how: str) -> list[Any]:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)).double()

    def fill(module: nn.Module) -> None:
        module.to_empty(device=CPU, recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    torch.manual_seed(3)
    policy = wrap_module(f).ModuleWrapPolicy({nn.Linear})
    model = f.FullyShardedDataParallel(
        net,
        auto_wrap_policy=policy,
        device_id=CPU,
        use_orig_params=True,
        param_init_fn=fill if how == "function" else None,
    )
    return run(f, model)


def by_hand(f: Any, outer: bool) -> list[Any]:
    w = wrap_module(f)
    options = {"use_orig_params": True, "device_id": CPU}
    torch.manual_seed(0)
    with w.enable_wrap(wrapper_cls=f.FullyShardedDataParallel, **options):
        net: Any = nn.Sequential(
            w.wrap(nn.Linear(4, 6).double()),
            nn.Tanh(),
            nn.Sequential(
                w.wrap(
                    nn.Linear(6, 6).double(),
                    sharding_strategy=f.ShardingStrategy.SHARD_GRAD_OP,
                ),
                nn.Tanh(),
            ),
            nn.Linear(6, 4).double(),
        )
        if outer:
            net = w.wrap(net)
    unwrapped = w.wrap(nn.Linear(2, 2))
    names = [n for n, m in net.named_modules() if isinstance(m, f.FullyShardedDataParallel)]
    if not outer:
        net = f.FullyShardedDataParallel(net, **options)
    return [names, type(unwrapped).__name__, *run(f, net)]


def nested_enable_wrap(f: Any) -> list[Any]:
    w = wrap_module(f)
    with w.enable_wrap(wrapper_cls=f.FullyShardedDataParallel):
        try:
            with w.enable_wrap(wrapper_cls=f.FullyShardedDataParallel):
                return ["entered"]
        except NotImplementedError:
            return ["refused"]


def summon(f: Any, writeback: bool, recurse: bool) -> list[Any]:
    net = fsdp(f, make_net())
    before = values(f, net)
    whole = f.FullyShardedDataParallel.summon_full_params
    with whole(net, writeback=writeback, recurse=recurse), torch.no_grad():
        net.head.weight.mul_(2.0)
        shape = tuple(net.head.weight.shape)
    return [before, shape, values(f, net), *run(f, net)]


def summon_gradients(f: Any, writeback: bool) -> list[Any]:
    net = fsdp(f, make_net())
    loss_of(net, 0).backward()
    whole = f.FullyShardedDataParallel.summon_full_params
    with whole(net, writeback=writeback, with_grads=True), torch.no_grad():
        seen = {n: p.grad.clone() for n, p in net.named_parameters()}
        for parameter in net.parameters():
            parameter.grad.mul_(0.5)
    return [seen, gradients(f, net)]


def summon_rank0(f: Any) -> list[Any]:
    net = fsdp(f, make_net())
    whole = f.FullyShardedDataParallel.summon_full_params
    with whole(net, rank0_only=True, writeback=False):
        seen = [tuple(p.shape) for p in net.parameters()] if dist.get_rank() == 0 else []
    return [seen, *run(f, net)]


def applies(f: Any) -> list[Any]:
    net = fsdp(f, make_net())

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.125)

    result = net.apply(fill)
    return [result is net, values(f, net), *run(f, net)]


def evaluate(f: Any, policy: str) -> list[Any]:
    net = fsdp(f, make_net(), policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(STEPS):
        net.eval()
        with torch.no_grad():
            seen.append(loss_of(net, 9).item())
        net.train()
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return [*seen, values(f, net)]


def several_forwards(f: Any) -> list[Any]:
    net = fsdp(f, make_net())
    (loss_of(net, 0) + loss_of(net, 1)).backward()
    return [gradients(f, net)]


def scales(f: Any, bad: bool) -> list[Any]:
    """If the gradients of one rank overflow, every rank skips the step."""
    net = fsdp(f, make_net())
    scaler = importlib.import_module(f"{f.__name__}.sharded_grad_scaler").ShardedGradScaler(
        "cpu", init_scale=1024.0
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = loss_of(net, 0)
    if bad and dist.get_rank() == 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return [scaler.get_scale(), values(f, net)]


def refusals(f: Any) -> list[Any]:
    """Both implementations refuse the same mistakes."""
    net = fsdp(f, make_net(), "none")
    summon_full = f.FullyShardedDataParallel.summon_full_params
    attempts: list[Any] = [
        lambda: summon_full(net, rank0_only=True, writeback=True).__enter__(),
        lambda: fsdp(f, nn.Sequential(net), "always"),
        lambda: fsdp(f, make_net(), ignored_modules=[], ignored_states=[nn.Linear(1, 1)]),
        lambda: f.FullyShardedDataParallel.set_state_dict_type(
            net, f.StateDictType.SHARDED_STATE_DICT, f.FullStateDictConfig()
        ),
    ]
    refused = []
    for attempt in attempts:
        try:
            attempt()
            refused.append(False)
        except Exception:  # noqa: BLE001 (its type differs)
            refused.append(True)
    return refused
