"""Training with quantized gathers and reductions."""

import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.blockwise import Blocks
from shardwise.comm.communicator import communicator
from shardwise.runtime.unit import FlatParameters
from shardwise.tensor.sharding import local_of
from tests.covering import covered_first
from tests.lossless import lossless_wires
from tests.models import WIDTH, Block
from tests.ranks import on_ranks, run_on
from tests.runtime.modules import FailingLinear
from tests.runtime.one_process import (
    assert_equal_training,
    full,
    options_of,
    own_part,
    runtime_of,
)

CASES_WITH_WIRES = (
    *("gpt", "unused and reused", "frozen", "tied", "mixed dtypes", "checkpointed", "tiny"),
    *("lora", "recurrent", "two uses"),
)
STRATEGIES = ("fsdp", "zero1", "zero2", "ddp", "hsdp", "hsdp-zero2", "hfsdp")
WIRE = sw.Wire(gather="int8", reduce="int4", block=64)
HALF = sw.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
OTHERWISE: dict[str, dict[str, Any]] = {
    "two micro-batches": {"accumulate": 2},
    "offload": {"offload_policy": sw.CPUOffloadPolicy()},
    "copies on the device": {"offload_policy": sw.CPUOffloadPolicy(parameters=False)},
    "dim": {"granularity": "dim"},
    "subgroup": {"reshard_after_forward": 2},
    "kept": {"reshard_after_forward": False},
    "hosts": {"wire": sw.Wire(gather="fp8", reduce="int8", ranks_per_host=2)},
    "feedback": {"wire": sw.Wire(reduce="int4", error_feedback=True)},
    "clipped": {"clip": 0.1},
}


@on_ranks(4)
@pytest.mark.parametrize(
    ("case", "strategy", "option"),
    covered_first(
        [
            (case, strategy, option)
            for case in CASES_WITH_WIRES
            for strategy in STRATEGIES
            for option in OTHERWISE
            if strategy == "fsdp" or option != "subgroup"
            if strategy != "hfsdp" or option != "dim"
        ]
    ),
)
def test_nothing_but_rounding_differs(case: str, strategy: str, option: str) -> None:
    """Compare with one process, in a format that does not round."""
    with lossless_wires():
        assert_equal_training(case, **{"wire": WIRE, **options_of(strategy), **OTHERWISE[option]})


@on_ranks(2, thorough=(4,))
@pytest.mark.parametrize(
    ("strategy", "policy"),
    [
        ("fsdp", sw.MixedPrecisionPolicy()),
        ("hsdp", HALF),
        ("ddp", sw.MixedPrecisionPolicy()),
        *(
            pytest.param(strategy, HALF, marks=pytest.mark.thorough)
            for strategy in ("fsdp", "ddp", "hfsdp")
        ),
    ],
    ids=str,
)
def test_replicas_stay_equal_and_shards_are_not_rounded(
    strategy: str, policy: sw.MixedPrecisionPolicy
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block()).float()
    options: dict[str, Any] = {"units": Block, "mp_policy": policy, **options_of(strategy)}
    exact = sw.fully_shard(_copy_of(model), **options)
    sw.fully_shard(model, wire=WIRE, **options)
    before = [local_of(parameter).clone() for parameter in model.parameters()]
    norms = []
    for one in (model, exact):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        torch.manual_seed(1)
        for _ in range(6):
            one(own_part(torch.randn(24, WIDTH))).square().mean().backward()
            norms.append(full(sw.clip_grad_norm_(one.parameters(), 1.0)))
            unchanged = zip(before, model.parameters(), strict=True)
            assert norms[1:] or all(torch.equal(a, local_of(b)) for a, b in unchanged)
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(torch.stack(norms[:6]), torch.stack(norms[6:]), rtol=0.1)
    assert norms[0] != norms[6]
    with sw.gathered(model):
        assert len(set(_of_all_ranks(_digest(model.parameters())))) == 1
    local = (runtime_of(model).mesh.rank, _digest([local_of(p) for p in model.parameters()]))
    assert len(set(_of_all_ranks(local))) == runtime_of(model).mesh.size


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["hsdp", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_gradients_of_several_backwards_are_quantized_once(strategy: str) -> None:
    """They add up locally, and are reduced with those of the last micro-batch."""
    model = Block()
    sharded = sw.fully_shard(model, wire=sw.Wire(reduce="int4"), **options_of(strategy))
    assert isinstance(sharded, sw.FSDPModule)
    comm = communicator(runtime_of(model).mesh.world, runtime_of(model).pools.device)
    sent = []
    for is_last in (False, True):
        sharded.set_requires_gradient_sync(is_last)
        before = comm.reduce.sent[1]
        model(torch.ones(2, WIDTH)).sum().backward()
        sent.append(comm.reduce.sent[1] - before)
    assert sent[0] < 64 < sent[1], "flags of used parameters at most"
    own = [full(p.grad) for p in model.parameters() if p.grad is not None]
    assert len(set(_of_all_ranks(_digest(own)))) == 1


@on_ranks(2)
def test_compute_sees_what_the_wire_carries() -> None:
    """Every rank uses its own slot in the decoded form that the other ranks get."""
    model = nn.Linear(96, 64)
    shown: list[Tensor] = []
    model.register_forward_hook(lambda module, *_: shown.append(module.weight.detach().clone()))
    sw.fully_shard(model, wire=sw.Wire(gather="fp8", block=128))
    model(torch.zeros(1, 96))
    (flat,) = runtime_of(model).units[0].flats
    assert isinstance(flat, FlatParameters)
    slots = [torch.empty(flat.layout.shard_elements) for _ in range(dist.get_world_size())]
    dist.all_gather(slots, flat.codec.shard)
    blocks = Blocks("fp8", 128)
    decoded = [torch.empty_like(slot) for slot in slots]
    for slot, to in zip(slots, decoded, strict=True):
        encoded = torch.empty(blocks.num_bytes(len(slot)), dtype=torch.uint8)
        blocks.encode(slot, encoded)
        blocks.decode(encoded, to)
    extent = next(one for one in flat.layout.extents if one.parameter.name == "weight")
    weight = torch.cat(decoded)[extent.offset : extent.stop].view(64, 96)
    assert torch.equal(shown[0], weight)
    assert not torch.equal(shown[0], full(model.weight.detach()))


@on_ranks(2)
def test_bytes_are_a_quarter_and_an_eighth() -> None:
    sent = []
    for wire in (sw.Wire(), sw.Wire(gather="int8", reduce="int4", block=256)):
        model = sw.fully_shard(nn.Linear(512, 512, bias=False), wire=wire)
        comm = communicator(runtime_of(model).mesh.world, runtime_of(model).pools.device)
        before = [queue.sent[1] for queue in (comm.gather, comm.reduce)]
        model(torch.ones(1, 512)).sum().backward()
        after = [queue.sent[1] for queue in (comm.gather, comm.reduce)]
        sent.append([b - a for a, b in zip(before, after, strict=True)])
    (gathered, reduced), (int8, int4) = sent
    assert 0.25 <= int8 / gathered <= 0.27
    assert 0.125 <= int4 / reduced <= 0.15


@on_ranks(2)
def test_a_backward_that_fails_leaves_no_rounding_errors() -> None:
    """Those of gradients that were dropped would be added to the next ones."""

    def gradients(*places: str) -> list[Tensor]:
        """Those of a backward after backwards that fail in ``places``."""
        torch.manual_seed(0)
        failing = FailingLinear()
        model = nn.Sequential(failing, Block(), Block())
        wire = sw.Wire(reduce="int4", block=8, error_feedback=True)
        sw.fully_shard(model, units={FailingLinear, Block}, wire=wire)
        x = torch.randn(4, WIDTH)
        for where in (*places, ""):
            model.zero_grad()
            failing.where = where
            fails = pytest.raises(ValueError, match="it hurts")
            with fails if where else contextlib.nullcontext():
                model(x).square().mean().backward()
        return [full(p.grad) for p in model.parameters() if p.grad is not None]

    def are_equal(some: list[Tensor], others: list[Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))

    expected = gradients()
    assert are_equal(gradients("backward"), expected)
    assert not are_equal(gradients(""), expected), "those of a backward that ends are added"


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "hsdp"])
def test_a_gradient_that_is_no_number_on_one_rank_is_found_on_all(strategy: str) -> None:
    torch.manual_seed(0)
    wire = sw.Wire(gather="int8", reduce="int4", error_feedback=True)
    model = sw.fully_shard(Block(), wire=wire, **options_of(strategy))
    norms = []
    for value in (1.0, torch.nan if dist.get_rank() == 2 else 1.0, 1.0):
        model(torch.full((2, WIDTH), value)).square().mean().backward()
        norms.append(full(sw.clip_grad_norm_(model.parameters(), 1.0)))
        model.zero_grad()
    assert [bool(norm.isnan()) for norm in norms] == [False, True, False]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gather": "int7"}, r"Wire\(gather='int7'\): expected one of int8, int4, fp8"),
        ({"reduce": "int8", "block": 7}, r"Wire\(block=7\): expected an even number"),
        (
            {"reduce": "int8", "ranks_per_host": 0},
            r"ranks_per_host=0\): expected a number of ranks",
        ),
        ({"error_feedback": True}, r"expected a format to reduce in"),
    ],
)
def test_wires_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(sw.PlanError, match=words):
        sw.Wire(**options)


@on_ranks(3)
def test_wires_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        sw.PlanError, match=r"root: Wire\(ranks_per_host=2\): .*divides the 3 ranks"
    ):
        sw.fully_shard(nn.Linear(2, 2), wire=sw.Wire(reduce="int8", ranks_per_host=2))
    with pytest.raises(sw.PlanError, match=r"wire='int8': expected sw.Wire"):
        sw.fully_shard(nn.Linear(2, 2), wire="int8")  # type: ignore[arg-type]


@on_ranks(2)
def test_a_wire_is_not_verified_without_a_tolerance() -> None:
    with pytest.raises(sw.PlanError, match=r"pass tolerance=\. With Wire"):
        sw.verify(Block, lambda _: torch.randn(8, WIDTH), wire=sw.Wire(gather="int8"), quiet=True)


def _save_trained(path: str) -> Tensor:
    model, optimizer = _with_feedback()
    for _ in range(2):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sw.save(path, model=model, optimizer=optimizer)
    return _whole(model)


def _load(path: str) -> Tensor:
    model, optimizer = _with_feedback()
    sw.load(path, model=model, optimizer=optimizer)
    loaded = _whole(model)
    model(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()
    assert _whole(model).isfinite().all()
    return loaded


def _with_feedback() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    wire = sw.Wire("int8", "int4", error_feedback=True)
    model = sw.fully_shard(nn.Sequential(Block(), Block()), units=Block, wire=wire)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _whole(model: nn.Module) -> Tensor:
    return torch.cat([full(parameter.detach()).reshape(-1) for parameter in model.parameters()])


def test_a_checkpoint_has_shards_that_are_not_rounded(tmp_path: Path) -> None:
    """On another number of ranks, too, where error feedback begins with nothing."""
    path = str(tmp_path / "saved")
    saved, loaded = run_on(2, _save_trained, path)[0], run_on(3, _load, path)[0]
    assert torch.equal(saved, loaded)


def _copy_of(model: nn.Module) -> nn.Module:
    copied = nn.Sequential(Block(), Block(), Block()).float()
    copied.load_state_dict(model.state_dict())
    return copied


def _of_all_ranks(value: Any) -> list[Any]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _digest(tensors: Any) -> str:
    joined = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(joined).hexdigest()
