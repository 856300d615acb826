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
from shardwise.tensor.sharding import local_of
from tests.models import WIDTH, Block
from tests.ranks import on_ranks, run_on
from tests.runtime.modules import FailingLinear
from tests.runtime.one_process import (
    comm_of,
    full,
    options_of,
    own_part,
    runtime_of,
)

WIRE = sw.Wire(gather="int8", reduce="int4", block=64)
HALF = sw.MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)


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
    sharded: Any = sw.fully_shard(model, wire=sw.Wire(reduce="int4"), **options_of(strategy))
    comm = comm_of(model)
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
def test_a_backward_that_fails_leaves_no_rounding_errors() -> None:
    """Those of gradients that were dropped would be added to the next ones."""

    def gradients(*places: str) -> list[Tensor]:
        """Those of a backward after backwards that fail in ``places``."""
        torch.manual_seed(0)
        failing = FailingLinear()
        failing.ranks = dist.group.WORLD
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
