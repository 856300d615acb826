"""Programs written for FSDP2; ``f`` is the module that they import from."""

from collections.abc import Iterator
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise.fsdp
from tests.fsdp.extended import InBfloat16, Pair, replace_weights
from tests.fsdp.models import STEPS, Chunk, Net, batch, make_net

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def mesh_1d() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def mesh_2d(replicas: int = 2) -> DeviceMesh:
    shape = replicas, dist.get_world_size() // replicas
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def shard(f: Any, model: nn.Module, wrapped: str = "blocks", **options: Any) -> Any:
    """Shard the blocks and the root, one of them, or single layers."""
    options.setdefault("mesh", mesh_1d())
    if wrapped in ("blocks", "blocks alone"):
        for block in model.get_submodule("blocks").children():
            f.fully_shard(block, **options)
    if wrapped == "layers":
        for module in list(model.modules()):
            if isinstance(module, nn.Linear):
                f.fully_shard(module, **options)
    if wrapped != "blocks alone":
        f.fully_shard(model, **options)
    return model


def whole(tensor: Any) -> Tensor:
    """A copy of the full tensor, on every rank."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


def loss_of(model: nn.Module, step: int) -> Any:
    return model(batch(step, dist.get_rank())).pow(2).mean()


def own(tensor: Any) -> Tensor:
    """A copy of this rank's part, which is the same in both implementations."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: own(p) for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Any]:
    named = model.named_parameters()
    return {name: None if p.grad is None else own(p.grad) for name, p in named}


def steps(model: nn.Module, optimizer: str = "sgd") -> Iterator[Any]:
    """Train; yield each loss, the first gradients and the final parameters."""
    chosen = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        yield loss.item()
        if not step:
            yield gradients(model)
        chosen.step()
        chosen.zero_grad()
    yield values(model)


def train(
    f: Any,
    wrapped: str = "blocks",
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
) -> list[Any]:
    net = shard(f, make_net(**(model or {})), wrapped, **(options or {}))
    return list(steps(net, optimizer))


def hybrid(f: Any, reshard: bool | None = None) -> list[Any]:
    net = shard(f, make_net(), mesh=mesh_2d(), reshard_after_forward=reshard)
    return list(steps(net))


def hybrid_accumulates(f: Any) -> list[Any]:
    net = shard(f, make_net(), mesh=mesh_2d())
    for micro in range(2):
        net.set_requires_all_reduce(micro == 1)
        loss_of(net, micro).backward()
    return [gradients(net)]


def accumulate(f: Any, reshards: bool = True, last: bool = True) -> list[Any]:
    net = shard(f, make_net())
    seen = []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(2):
        for micro in range(2):
            net.set_requires_gradient_sync(micro == 1)
            net.set_reshard_after_backward(reshards or micro == 1)
            net.set_is_last_backward(not last or micro == 1)
            loss_of(net, 2 * step + micro).backward()
        seen.append(gradients(net))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, values(net)]


def finalized(f: Any, asynchronous: bool) -> list[Any]:
    """PyTorch has `finalize_backward` since 2.15; before, the last backward reduces."""
    net = shard(f, make_net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    has_call = hasattr(net, "finalize_backward")
    if has_call:
        net.set_manual_backward_finalization(True)
        net.finalize_backward()  # before the first forward, it does nothing
    seen = []
    for step in range(2):
        for micro in range(3):
            net.set_requires_gradient_sync(micro == 2 and not has_call)
            loss_of(net, 3 * step + micro).backward()
        if has_call:
            net.set_requires_gradient_sync(True)
            handle = net.finalize_backward(async_op=asynchronous)
            assert isinstance(handle, f.GradientReductionHandle if asynchronous else NoneType)
            if handle is not None:
                handle.wait()
        seen.append(gradients(net))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, values(net)]


def overridden_dtypes(f: Any, reduce_dtype: torch.dtype | None) -> list[Any]:
    def chosen(parameter: nn.Parameter) -> torch.dtype | None:
        return parameter.dtype if parameter.shape[-1] == 4 else None

    net: Any = nn.Sequential(Scale(4), Scale(5)).float()
    policy = f.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, param_dtype_override_fn=chosen
    )
    f.fully_shard(net, mesh=mesh_1d(), mp_policy=policy)
    net(torch.randn(3, 1)).float().pow(2).mean().backward()
    return [[scale.seen for scale in net], gradients(net), values(net)]


class Scale(nn.Module):
    """Multiplies by a row, whose dtype in forward it records."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, width))
        self.seen = ""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = str((x.dtype, self.row.dtype))
        return x.sum(-1, keepdim=True).to(self.row.dtype) * self.row


def accumulate_reduced(f: Any) -> list[Any]:
    net = shard(f, make_net())
    for micro in range(2):
        loss_of(net, micro).backward()
    return [gradients(net)]


def clip(f: Any, max_norm: float, norm_type: float) -> list[Any]:
    net = shard(f, make_net())
    loss_of(net, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm, norm_type)
    return [whole(norm), gradients(net)]


def precision(f: Any, policy: dict[str, Any], outer: bool = True) -> list[Any]:
    net: Any = make_net().float()
    mp_policy = f.MixedPrecisionPolicy(**policy)
    for block in net.blocks:
        f.fully_shard(block, mesh=mesh_1d(), mp_policy=mp_policy)
    f.fully_shard(net, mesh=mesh_1d(), **({"mp_policy": mp_policy} if outer else {}))
    output = net(batch(0, dist.get_rank()).float())
    output.float().pow(2).mean().backward()
    return [output.detach(), gradients(net), values(net)]


def low_precision_model(f: Any) -> list[Any]:
    net = shard(f, make_net().bfloat16())
    output = net(batch(0, dist.get_rank()).bfloat16())
    output.float().pow(2).mean().backward()
    return [[str(p.dtype) for p in net.parameters()], output.detach(), gradients(net)]


def offload(f: Any, pin_memory: bool) -> list[Any]:
    policy = f.CPUOffloadPolicy(pin_memory=pin_memory)
    return list(steps(shard(f, make_net(), offload_policy=policy)))


def no_offload(f: Any) -> list[Any]:
    return list(steps(shard(f, make_net(), offload_policy=f.OffloadPolicy())))


def ignore_in_a_block(f: Any, is_meta: bool) -> list[Any]:
    """Ignored by the call for a block, and not named again by the call for the root."""
    net: Any = make_net()
    saved = net.state_dict()
    if is_meta:
        net = net.to("meta")
    block = net.blocks[0]
    f.fully_shard(block, mesh=mesh_1d(), ignored_params=set(block.up.parameters()))
    f.fully_shard(net, mesh=mesh_1d())
    plain = {n for n, p in net.named_parameters() if not hasattr(p, "full_tensor")}
    if is_meta:
        net.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                value = saved[name]
                if name not in plain:
                    value = distribute_tensor(value, mesh_1d(), [Shard(0)])
                parameter.copy_(value)
            for name, buffer in net.named_buffers():
                buffer.copy_(saved[name])
    loss_of(net, 0).backward()
    return [sorted(plain), gradients(net), values(net)]


def ignore(f: Any, which: str) -> list[Any]:
    net: Any = make_net()
    ignored = set(net.get_submodule(which).parameters())
    shard(f, net, ignored_params=ignored)
    plain = {n for n, p in net.named_parameters() if not hasattr(p, "full_tensor")}
    loss_of(net, 0).backward()
    return [sorted(plain), gradients(net), values(net)]


def freeze(f: Any, which: str) -> list[Any]:
    net = make_net()
    net.get_submodule(which).requires_grad_(False)
    return list(steps(shard(f, net)))


def evaluate(f: Any, wrapped: str) -> list[Any]:
    net = shard(f, make_net(), wrapped)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    seen: list[Any] = []
    for step in range(STEPS):
        net.eval()
        with torch.no_grad():
            seen.append(loss_of(net, 9).item())
        net.train()
        loss_of(net, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, values(net)]


def by_hand(f: Any, asynchronous: bool, reshards: bool) -> list[Any]:
    net = shard(f, make_net())
    handle = net.unshard(async_op=asynchronous)
    seen: list[Any] = [(handle is None) != asynchronous]
    if handle is not None:
        seen.append(isinstance(handle, f.UnshardHandle))
        handle.wait()
    seen += [net.embed.weight.detach().clone(), hasattr(net.blocks[0].up.weight, "full_tensor")]
    if reshards:
        net.reshard()
        seen.append(hasattr(net.embed.weight, "full_tensor"))
    return [*seen, *steps(net)]


def by_hand_ahead(f: Any) -> list[Any]:
    net = shard(f, make_net())
    for block in net.blocks:
        block.unshard(async_op=True)
    return list(steps(net))


def reshards_later(f: Any, value: bool, recurse: bool) -> list[Any]:
    net = shard(f, make_net())
    net.set_reshard_after_forward(value, recurse=recurse)
    return list(steps(net))


def divides(f: Any, factor: float) -> list[Any]:
    net = shard(f, make_net())
    for module in net.modules():
        if isinstance(module, f.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(factor)
    return list(steps(net))


def all_reduce_hook(f: Any, units: str) -> list[Any]:
    """Gradients of replicated shards are reduced by a hook."""
    mesh = mesh_2d()
    net = shard(f, make_net(), units, mesh=mesh["shard"])
    called = []

    def hook(reduced: Tensor) -> None:
        called.append(reduced.ndim)
        dist.all_reduce(reduced, group=mesh.get_group("replicate"))
        reduced.mul_(0.5)

    for module in net.modules():
        if isinstance(module, f.FSDPModule):
            module.set_all_reduce_hook(hook)
    return [*steps(net), called]


def lists(f: Any, count: int) -> list[Any]:
    net = make_net()
    blocks = list(net.get_submodule("blocks").children())
    f.fully_shard(blocks[:count], mesh=mesh_1d())
    f.fully_shard(net, mesh=mesh_1d())
    assert all(isinstance(block, f.FSDPModule) for block in blocks[:count])
    return list(steps(net))


def called_list(f: Any) -> list[Any]:
    """A subclass of nn.ModuleList that has a forward."""
    net = make_net()
    net.blocks = nn.ModuleList([Chunk(net.blocks)])
    try:
        chunk = f.fully_shard(net.blocks[0], mesh=mesh_1d())
        assert isinstance(chunk, f.FSDPModule)
    except ValueError:  # PyTorch refuses it in 2.11: there, the root shards its parameters
        assert f is not shardwise.fsdp
    f.fully_shard(net, mesh=mesh_1d())
    return list(steps(net))


def hints(f: Any) -> list[Any]:
    net = shard(f, make_net())
    blocks: Any = list(net.blocks)
    net.set_modules_to_forward_prefetch(blocks[:2])
    blocks[1].set_modules_to_backward_prefetch(blocks[:1])
    for block in blocks:
        block.set_unshard_in_backward(True)
    net.set_reshard_after_backward(True)
    net.set_is_last_backward(True)
    net.set_allocate_memory_from_process_group_for_comm(False)
    f.share_comm_ctx([net])
    return list(steps(net))


def other_method(f: Any) -> list[Any]:
    net = shard(f, make_net())
    f.register_fsdp_forward_method(net, "twice")
    f.register_fsdp_forward_method(nn.Linear(2, 2), "forward")
    loss = net.twice(batch(0, dist.get_rank())).pow(2).mean()
    loss.backward()
    return [loss.item(), gradients(net)]


def meta(f: Any, wrapped: str) -> list[Any]:
    with torch.device("meta"):
        net = Net().double()
    shard(f, net, wrapped)
    f.register_fsdp_forward_method(net, "twice")
    on_meta = [all(p.device.type == "meta" for p in net.parameters())]
    on_meta += [isinstance(block, f.FSDPModule) for block in net.blocks]
    net.to_empty(device="cpu")
    for name, parameter in net.named_parameters():
        nn.init.constant_(parameter, 0.01 * len(name))
    net.scale.fill_(1.0)
    return [on_meta, [str(p.device) for p in net.parameters()], *steps(net)]


def filled_from_whole(f: Any, wrapped: str) -> list[Any]:
    """Load full tensors with PyTorch's function."""
    with torch.device("meta"):
        net = Net().double()
    shard(f, net, wrapped)
    net.to_empty(device="cpu")
    saved = {name: value.clone() for name, value in make_net().state_dict().items()}
    set_model_state_dict(net, saved, options=StateDictOptions(full_state_dict=True))
    return [values(net), *steps(net)]


def filled_from_rank_0(f: Any, wrapped: str, moves: bool) -> list[Any]:
    """Only rank 0 has values, as in verl: it sends whole tensors to the others."""
    is_first = dist.get_rank() == 0
    with torch.device("cpu" if is_first else "meta"):
        net: Any = Net().double()
    if is_first:
        net.load_state_dict(make_net().state_dict())
    saved = net.state_dict() if is_first else {}
    shard(f, net, wrapped, offload_policy=None)
    f.register_fsdp_forward_method(net, "twice")
    kinds = [all(p.is_meta != is_first for p in net.parameters()), isinstance(net, f.FSDPModule)]
    if not is_first:
        net.to_empty(device="cpu")
    elif moves:
        net.to("cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, saved, options=options)
    dist.broadcast(net.scale, 0)
    net.set_requires_gradient_sync(True)
    read = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    loss = net.twice(batch(0, dist.get_rank())).sum()
    return [kinds, values(net), read, loss.item(), *steps(net)]


def assigned_from_whole(f: Any, wrapped: str) -> list[Any]:
    """Assign values to a model on the meta device, with one tensor per name of a tied parameter."""
    with torch.device("meta"):
        net = Net(tied=True).double()
        net.again.weight = net.embed.weight
    shard(f, net, wrapped)
    saved = make_net(tied=True).state_dict()
    sharded: dict[str, Any] = {"scale": saved["scale"].clone()}
    for name, on_meta in net.state_dict().items():
        if name != "scale":
            tensor = distribute_tensor(saved[name], on_meta.device_mesh, on_meta.placements)
            sharded[name] = nn.Parameter(tensor)
    net.load_state_dict(sharded, assign=True)
    loss = loss_of(net, 0)
    loss.backward()
    return [loss.item(), gradients(net)]


def inside_replicate(f: Any) -> list[Any]:
    """Units inside a model whose other gradients are averaged by DDP."""
    net = make_net()
    for block in net.blocks:
        f.fully_shard(block)
    replicate(net)
    seen: list[Any] = []
    for step in range(STEPS):
        loss = loss_of(net, step)
        loss.backward()
        seen += [loss.item(), gradients(net)]
        net.zero_grad()
    return seen


def sliced(f: Any) -> list[Any]:
    net = f.fully_shard(nn.Sequential(*[nn.Linear(4, 4).double() for _ in range(3)]))
    first = net[:2]
    return [isinstance(net, f.FSDPModule), isinstance(first, f.FSDPModule), type(first).__name__]


def shapes(f: Any) -> list[Any]:
    net = shard(f, make_net())
    return [
        [(n, tuple(p.shape), p.requires_grad, p.ndim) for n, p in net.named_parameters()],
        [isinstance(p, nn.Parameter) for p in net.parameters()],
        [sum(p.numel() for p in net.parameters())],
        [n for n, m in net.named_modules() if isinstance(m, f.FSDPModule)],
        [isinstance(net, Net), type(net).__name__],
        [[str(one) for one in p.placements] for p in net.parameters()],
        [p.device_mesh.size() for p in net.parameters()],
        [p.device_mesh.ndim for p in net.parameters()],
        sum(p.to_local().numel() for p in net.blocks.parameters()) > 0,
    ]


def placements_of_hybrid(f: Any, replicas: int) -> list[Any]:
    net = shard(f, make_net(), mesh=mesh_2d(replicas))
    return [[[str(one) for one in p.placements] for p in net.parameters()]]


def placement_function(f: Any) -> list[Any]:
    def choose(parameter: nn.Parameter) -> Shard | None:
        return Shard(0) if parameter.ndim > 1 else None

    return list(steps(shard(f, make_net(), shard_placement_fn=choose)))


def state_dict(f: Any, wrapped: str) -> list[Any]:
    net = shard(f, make_net(), wrapped)
    saved = net.state_dict()
    other = shard(f, make_net(seed=7), wrapped)
    missing = other.load_state_dict(saved)
    return [{k: whole(v) for k, v in saved.items()}, list(missing), values(other)]


def distributed_state_dict(f: Any, optimizer: str) -> list[Any]:
    net = shard(f, make_net())
    chosen = OPTIMIZERS[optimizer](net.parameters())
    loss_of(net, 0).backward()
    chosen.step()
    model_state, optimizer_state = get_state_dict(net, chosen)
    twin = shard(f, make_net(seed=5))
    other = OPTIMIZERS[optimizer](twin.parameters())
    set_state_dict(twin, other, model_state_dict=model_state, optim_state_dict=optimizer_state)
    seen: list[Any] = [list(model_state), sorted(optimizer_state["state"])]
    for model, opt in ((net, chosen), (twin, other)):
        opt.zero_grad()
        loss_of(model, 1).backward()
        opt.step()
        seen.append(values(model))
    return seen


def whole_state_dicts(f: Any, optimizer: str, cpu_offload: bool) -> list[Any]:
    net = shard(f, make_net())
    chosen = OPTIMIZERS[optimizer](net.parameters())
    loss_of(net, 0).backward()
    chosen.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    model_state, states = get_state_dict(net, chosen, options=options)
    again = get_model_state_dict(net, options=options)
    return [model_state, states.get("state"), again]


def several_forwards(f: Any) -> list[Any]:
    net = shard(f, make_net())
    (loss_of(net, 0) + loss_of(net, 1)).backward()
    first = gradients(net)
    net.zero_grad()
    losses = [loss_of(net, 2), loss_of(net, 3)]
    for loss in losses:
        loss.backward()
    return [first, gradients(net)]


def sharded_twice(f: Any) -> list[Any]:
    """Both implementations refuse the same mistakes."""
    refused = []
    for wrong in (nn.ModuleList([nn.Linear(2, 2)]), None):
        try:
            f.fully_shard(wrong, mesh=mesh_1d())
        except Exception as error:  # noqa: BLE001 (its type differs)
            refused.append(isinstance(error, Exception))
    return refused


def gradient_hooks(f: Any) -> list[Any]:
    net = shard(f, make_net())
    called: list[str] = []
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _p, name=name: called.append(name))
    loss_of(net, 0).backward()
    return [sorted(called), gradients(net)]


def gradient_hooks_of_a_forward(f: Any, reshard: bool = True) -> list[Any]:
    """Hooks that the first forward of a unit registers on its gathered parameters."""
    net: Any = make_net()
    seen: list[bool] = []

    def triple(parameter: Tensor) -> None:
        seen.append(parameter.grad is not None)
        if parameter.grad is not None:
            parameter.grad.mul_(3)

    def register(block: nn.Module, _args: Any) -> None:
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(triple)  # type: ignore[no-untyped-call]
            parameter.register_hook(lambda gradient: gradient + 1)  # type: ignore[no-untyped-call]
        handle.remove()

    linear = next(m for m in net.blocks[0].modules() if isinstance(m, nn.Linear))
    handle = linear.register_forward_pre_hook(register)
    shard(f, net, reshard_after_forward=reshard)
    found: list[Any] = []
    for step in range(STEPS):
        loss_of(net, step).backward()
        found.append(gradients(net))
        net.zero_grad()
    return [*found, seen]


def _local(tensor: Any) -> Tensor:
    local = tensor.to_local()
    plain: Tensor = getattr(local, "a", getattr(local, "data_", local))
    return plain.clone()


def extensions(
    f: Any, kind: str, reshard: bool = True, policy: dict[str, Any] | None = None
) -> list[Any]:
    """Weights of a class with all-gather extensions."""
    net: Any = make_net()
    make: Any = InBfloat16 if kind == "bfloat16" else lambda w: Pair(w.clone(), w.clone())
    replace_weights(net, make, uneven=kind != "pair")
    mp_policy = f.MixedPrecisionPolicy(**(policy or {}))
    shard(f, net, reshard_after_forward=reshard, mp_policy=mp_policy)
    chosen = torch.optim.Adam(net.parameters(), lr=0.01, foreach=True)
    seen: list[Any] = [type(p.to_local()).__name__ for p in net.parameters()]
    for step in range(STEPS):
        loss = loss_of(net, step)
        loss.backward()
        seen += [getattr(loss, "a", loss).item()]
        seen += [_local(p.grad) for p in net.parameters()]
        chosen.step()
        chosen.zero_grad()
    return [*seen, *map(_local, net.parameters())]
