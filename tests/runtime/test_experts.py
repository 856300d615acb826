"""Experts on their own ranks (expert parallelism) train as in one process."""

import copy
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import shardwise as sw
from shardwise.runtime import unit
from shardwise.runtime.buffers import ChunkedBuffer
from tests.lossless import lossless_wires
from tests.ranks import on_ranks
from tests.runtime.one_process import adamw, assert_close, assert_reduced_once, full, step_all

WIDTH, EXPERTS, ROWS = 6, 4, 8


class Experts(nn.Module):
    """The experts of this rank, called with rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        pieces = zip(torch.split(rows, counts.tolist()), up, down, strict=True)
        return torch.cat([(piece @ a).tanh() @ b for piece, a, b in pieces])


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.group: dist.ProcessGroup | None = None  # of the ranks with other experts

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        counts = torch.bincount(choice, minlength=EXPERTS)
        y = self._exchange(x[order], counts) if self.group else self.experts(x[order], counts)
        result: Tensor = torch.zeros_like(x).index_copy(0, order, y) * weight[:, None]
        return result

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        assert self.group is not None
        size = dist.get_world_size(self.group)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = (c.view(size, -1).sum(1).tolist() for c in (counts, theirs))
        came: Tensor = all_to_all_single_autograd(rows, received, sent, self.group)
        number = torch.arange(len(theirs)).repeat_interleave(theirs) % (EXPERTS // size)
        order = number.argsort(stable=True)
        ours = theirs.view(size, -1).sum(0)
        done = torch.zeros_like(came).index_copy(0, order, self.experts(came[order], ours))
        back: Tensor = all_to_all_single_autograd(done, sent, received, self.group)
        return back


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.moe = nn.Linear(WIDTH, WIDTH), MoE()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.linear(x))
        return y


def build(without: tuple[int, ...] = ()) -> nn.Sequential:
    """A model that routes nothing to the experts with the numbers ``without``."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2)).double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MoE):
                module.router.bias[list(without)] = -1e6
    return model


def split_experts(moe: MoE, mesh: DeviceMesh, *, as_dtensors: bool) -> None:
    """Keep only the experts of this rank."""
    moe.group = mesh.get_group()
    for name, whole in list(moe.experts.named_parameters()):
        own: Tensor = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        if as_dtensors:
            own = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(moe.experts, name, nn.Parameter(own))


def shard(
    model: nn.Sequential,
    mesh: DeviceMesh,
    dense: DeviceMesh,
    divisor: int | None = None,
    **options: Any,
) -> None:
    """Shard the model, with the size of ``dense`` as the divisor of experts by default."""
    dims = tuple(name for name in mesh.mesh_dim_names or () if name != "ep")
    of_experts = mesh[dims] if len(dims) > 1 else mesh[dims[0]]
    for name in ("0", "1"):
        block: Any = model.get_submodule(name)
        experts = block.moe.experts
        sw.fully_shard(experts, mesh=of_experts, **options)
        experts.set_gradient_divide_factor(divisor or dense.size())
        sw.fully_shard(block, mesh=dense, **options)
    sw.fully_shard(model, mesh=dense, **options)


def compare(actual: Any, expected: Tensor | None, what: str, mesh: DeviceMesh) -> None:
    """Compare a parameter or gradient; of experts that are plain tensors, this rank's part."""
    value = full(actual)
    if expected is not None and value.shape != expected.shape:
        expected = expected.chunk(mesh.size())[mesh.get_local_rank()]
    assert_close(value, expected, what)


def dense_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of all other parameters, with ``efsdp`` and ``ep`` in one dim."""
    if mesh.ndim == 2:
        return init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("dp",))
    shape, names = (mesh.size(0), mesh.size(1) * mesh.size(2)), ("dp_replicate", "dp_shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def check_training(
    mesh: DeviceMesh, *, as_dtensors: bool, without: tuple[int, ...] = (), **options: Any
) -> None:
    reference = build(without)
    model = copy.deepcopy(reference)
    for module in model.modules():
        if isinstance(module, MoE):
            split_experts(module, mesh["ep"], as_dtensors=as_dtensors)
    dense = dense_mesh(mesh)
    shard(model, mesh, dense, **options)
    optimizers = [adamw(m.parameters()) for m in (reference, model)]
    for step in range(3):
        x = torch.randn(dense.size() * ROWS, WIDTH).double()
        reference(x).square().mean().backward()
        model(x.chunk(dense.size())[dist.get_rank()]).square().mean().backward()
        assert_reduced_once(model)
        wanted = dict(reference.named_parameters())
        for name, one in model.named_parameters():
            compare(one.grad, wanted[name].grad, f"gradient of {name} in {step}", mesh["ep"])
        if as_dtensors:
            norm = sw.clip_grad_norm_(model.parameters(), 0.1)
            assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1), "norm")
        step_all(optimizers)
    for name, one in model.named_parameters():
        compare(one.detach(), wanted[name].detach(), name, mesh["ep"])


@on_ranks(4)
@pytest.mark.parametrize(
    "as_dtensors",
    [True, pytest.param(False, marks=pytest.mark.thorough)],
    ids=["dtensors", "plain"],
)
def test_training_equals_one_process(as_dtensors: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    check_training(mesh, as_dtensors=as_dtensors)


@pytest.mark.thorough
@on_ranks(4)
def test_a_wire_that_rounds_nothing_changes_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    with lossless_wires():
        check_training(mesh, as_dtensors=True, wire=sw.Wire("int8", "int4", block=8))


@on_ranks(4)
def test_ranks_that_are_late_keep_what_they_share_with_ranks_of_other_experts() -> None:
    unpack = ChunkedBuffer.unpack

    def late(buffer: ChunkedBuffer) -> None:
        time.sleep(0.02 * (dist.get_rank() % 2))  # others may gather their experts meanwhile
        unpack(buffer)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    with (
        mock.patch.object(ChunkedBuffer, "unpack", late),
        mock.patch.object(unit, "SMALL_UNIT_BYTES", 0),  # so that all units are in shared memory
    ):
        check_training(mesh, as_dtensors=True, granularity="dim")


@on_ranks(4)
def test_experts_without_tokens_get_zeros() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    check_training(mesh, as_dtensors=True, without=(0, 2, 3))  # some ranks have only 2 and 3


@on_ranks(4)
def test_verify_names_expert_gradients_times_ep() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))

    def verify(divisor: int) -> sw.Verification:
        def engine(model: Any, mesh: DeviceMesh | None, _units: Any) -> nn.Module:
            assert mesh is not None
            for module in model.modules():
                if isinstance(module, MoE):
                    split_experts(module, mesh["ep"], as_dtensors=True)
            shard(model, mesh, dense_mesh(mesh), divisor)
            whole: nn.Module = model
            return whole

        return sw.verify(
            build,
            lambda _step: torch.randn(4 * ROWS, WIDTH),
            loss_fn=lambda model, rows: model(rows).square().mean(),
            engine=engine,
            mesh=mesh,
            quiet=True,
        )

    found = verify(4)
    assert found.ok, found.explanation
    cause = (
        "is 2 times what is expected; possible causes: gradients of experts that are not divided"
    )
    with pytest.raises(sw.VerificationError, match=rf"\.moe\.experts\.\w+ in step 0 {cause}"):
        verify(2).raise_for_difference()


@pytest.mark.thorough
@on_ranks(8)
@pytest.mark.parametrize("as_dtensors", [True, False], ids=["dtensors", "plain"])
def test_training_with_replicas_equals_one_process(as_dtensors: bool) -> None:
    names = ("dp_replicate", "efsdp", "ep")
    check_training(
        init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names), as_dtensors=as_dtensors
    )


@on_ranks(4)
def test_experts_are_gathered_and_saved(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    models = [build(), build()]
    for model in models:
        for module in model.modules():
            if isinstance(module, MoE):
                split_experts(module, mesh["ep"], as_dtensors=True)
        shard(model, mesh, dense_mesh(mesh))
    saved, loaded = models
    with sw.gathered(saved, write_back=True), torch.no_grad():
        for parameter in saved.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.mul_(2)
    sw.save(tmp_path / "experts", model=saved)
    sw.load(tmp_path / "experts", model=loaded)
    whole = build()
    sw.load(tmp_path / "experts", model=whole)
    for name, expected in build().named_parameters():
        for model in models:
            assert torch.equal(full(model.get_parameter(name)), 2 * expected), name
        assert torch.equal(whole.get_parameter(name), 2 * expected), name


@on_ranks(4)
@pytest.mark.parametrize("dims", [("ep",), ("ep", "etp")])
def test_experts_beside_tensor_parallelism_are_saved(dims: tuple[str, ...], tmp_path: Path) -> None:
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sparse = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("efsdp", "ep", "etp"))
    plain = nn.Sequential(Experts(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for parameter in plain.parameters():
        dist.broadcast(parameter.detach(), 0)
    model: Any = copy.deepcopy(plain)
    for name, parameter in model[0].named_parameters():
        placements = [Shard(i) for i in range(len(dims))]
        whole = distribute_tensor(parameter.detach(), sparse[dims], placements)
        model[0].register_parameter(name, nn.Parameter(whole))
    parallelize_module(model[1], dense["tp"], ColwiseParallel())
    sw.fully_shard(model[0], mesh=sparse["efsdp"])
    model[0].set_gradient_divide_factor(2)
    sw.fully_shard(model, mesh=dense["dp"])
    sw.save(tmp_path / "experts", model=model)
    loaded = copy.deepcopy(plain)
    for one in (loaded, model):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.zero_()
        sw.load(tmp_path / "experts", model=one)
        for name, expected in plain.named_parameters():
            assert torch.equal(full(one.get_parameter(name)), expected), name


@on_ranks(4)
def test_experts_on_the_meta_device() -> None:
    """In torchtitan's order: shard, allocate storage, then initialize."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    reference = build()
    expected = copy.deepcopy(reference)
    for module in expected.modules():
        if isinstance(module, MoE):
            split_experts(module, mesh["ep"], as_dtensors=False)
    with torch.device("meta"):
        model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 2)).double()
    for module in model.modules():
        if isinstance(module, MoE):
            split_experts(module, mesh["ep"], as_dtensors=False)
    shard(model, mesh, dense_mesh(mesh))
    model.to_empty(device="cpu")
    with sw.gathered(model, write_back=True), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(expected.get_parameter(name))
    x = torch.randn(4 * ROWS, WIDTH).double()
    reference(x).square().mean().backward()
    model(x.chunk(4)[dist.get_rank()]).square().mean().backward()
    for name, parameter in model.named_parameters():
        compare(parameter.grad, reference.get_parameter(name).grad, name, mesh["ep"])


@on_ranks(4)
def test_plain_experts_are_not_saved(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = build()
    for module in model.modules():
        if isinstance(module, MoE):
            split_experts(module, mesh["ep"], as_dtensors=False)
    shard(model, mesh, dense_mesh(mesh))
    with pytest.raises(sw.CheckpointError, match=r"0\.moe\.experts\.up is sharded over 2 of"):
        sw.save(tmp_path / "experts", model=model)


@on_ranks(4)
def test_a_unit_inside_experts_needs_a_divisor_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 2))
    sw.fully_shard(model[0], mesh=mesh["efsdp"], units=nn.Linear)
    model[0].set_gradient_divide_factor(4)
    with pytest.raises(sw.PlanError, match=r"0\.0 is a unit inside one that has its own ranks and"):
        sw.fully_shard(model)


@on_ranks(4)
def test_experts_without_a_divisor_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = build()
    sw.fully_shard(model.get_submodule("0.moe.experts"), mesh=mesh["efsdp"])
    with pytest.raises(
        sw.PlanError, match=r"moe\.experts is sharded over .*set_gradient_divide_fac"
    ):
        sw.fully_shard(model, mesh=dense_mesh(mesh))
