"""Checks on several ranks of one card, which exchange through `tests.gpu.staged`."""

import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.tensor.sharding import local_of
from tests.gpu import staged
from tests.gpu.one_rank import Failing, make
from tests.gpu.registry import Context, check
from tests.gpu.training import Pair, adamw, compare, is_reached
from tests.lossless import lossless_wires
from tests.models import WIDTH
from tests.runtime.modules import FailingLinear

RANKS = "ranks"
STEPS_OF_WIRES = 2


def staged_on(ranks: int, **more: Any) -> dict[str, Any]:
    return {"ranks": ranks, "group": "staged", "seconds": 50.0, **more}


MONITORED = {"ranks": 2, "group": "monitored", "seconds": 50.0}


@check(RANKS, "one rank raises in forward", MONITORED, {"where": "forward"})
@check(RANKS, "one rank raises in backward", MONITORED, {"where": "backward"})
def _one_rank_raises(context: Context, where: str) -> None:
    raise_on_one_rank(context, where)


@check(RANKS, "collectives of the backend", staged_on(4, kinds=("cuda", "cpu")))
def _collectives(context: Context) -> None:
    """The backend itself: each operation against its result."""
    if context.kind == "cuda":
        context.report("streams wait for flags", staged.flags_work())
    device, own, size = context.device, context.rank, context.num_ranks
    ranks = torch.arange(size, device=device)
    for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn):
        whole = torch.zeros(size * 3, dtype=torch.float32, device=device).to(dtype)
        slot = whole[own * 3 : own * 3 + 3]
        slot.copy_(torch.full((3,), float(own % 2)).to(dtype))
        dist.all_gather_into_tensor(whole, slot)
        assert torch.equal(whole.float(), (ranks % 2).float().repeat_interleave(3)), dtype
    sums = (torch.arange(size * 2, device=device) + own).double()
    scattered = sums[own * 2 : own * 2 + 2]
    dist.reduce_scatter_tensor(scattered, sums)
    expected = size * (torch.arange(2, device=device) + 2 * own) + ranks.sum()
    assert torch.equal(scattered, expected.double())
    largest = torch.tensor([own, -own], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.tolist() == [size - 1, 0]
    received, sent = torch.zeros(size, device=device), own + 10.0 * ranks.float()
    dist.all_to_all_single(received, sent)
    assert torch.equal(received, ranks.float() + 10.0 * own)
    parts = [torch.full((peer,), float(own), device=device) for peer in range(size)]
    outputs = [torch.empty(own, device=device) for _ in range(size)]
    dist.all_to_all(outputs, parts)
    assert all(bool((one == peer).all()) for peer, one in enumerate(outputs))
    values: list[Any] = [None] * size
    dist.all_gather_object(values, own)
    assert values == list(range(size))


for strategy in ("ddp", "zero1", "zero2", "fsdp", "hsdp", "hfsdp"):
    for ranks in (2, 4):
        check(RANKS, f"{strategy}, {ranks} ranks", staged_on(ranks), {"strategy": strategy})(
            compare
        )
PROGRAMS: dict[str, dict[str, Any]] = {
    "granularity dim": {"granularity": "dim"},
    "tied, no prefetch": {"name": "tied", "prefetch": 0},
    "unused and reused": {"name": "unused and reused", "prefetch": 2},
    "groups of 2 gather again": {"reshard_after_forward": 2},
    "clipped, two micro-batches": {"accumulate": 2, "clip": 0.1},
    "optimizer in backward": {"in_backward": True},
    "offload": {"offload_policy": sw.CPUOffloadPolicy()},
    "offload of activations": {
        "around": sw.offload_activations, "name": "wide stack"
    },
    "Muon": {"make": lambda model: make("muon", model), "name": "stack"},
    "SOAP": {"make": lambda model: make("soap", model), "name": "stack"},
}  # fmt: skip
for name, values in PROGRAMS.items():
    check(RANKS, f"{name}, 4 ranks", staged_on(4), values)(compare)


@check(RANKS, "wires that round nothing", staged_on(4), {"strategy": "hsdp"})
def _lossless_wires(context: Context, strategy: str) -> None:
    with lossless_wires():
        wire = sw.Wire("int8", "int4", block=8, error_feedback=True)
        compare(context, "stack", strategy=strategy, wire=wire)


@check(RANKS, "wires in float8 and int8: replicas have the same bits", staged_on(4))
def _wires(context: Context) -> None:
    pair = Pair(context, "stack", strategy="hsdp", wire=sw.Wire("fp8", "int8", block=8))
    for _ in range(STEPS_OF_WIRES):
        pair.loss(pair.batch()).backward()  # type: ignore[no-untyped-call]
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.step_number += 1
    digests: list[Any] = [None] * context.num_ranks
    dist.all_gather_object(digests, digest(pair.model))
    assert digests[:2] == digests[2:]


def digest(model: nn.Module) -> int:
    parts = [local_of(p).detach().cpu().reshape(-1).view(torch.uint8) for p in model.parameters()]
    return zlib.crc32(b"".join(bytes(part.tolist()) for part in parts))


def raise_on_one_rank(context: Context, where: str) -> None:
    """The others raise, too, and the next step gives the numbers of plain PyTorch."""
    torch.manual_seed(0)
    reference = Failing().double().to(context.device)
    model = Failing().double().to(context.device)
    model.load_state_dict(reference.state_dict())
    sw.fully_shard(model, units={nn.Linear, FailingLinear})
    optimizers = adamw(model), adamw(reference)
    middle = model[1]
    assert isinstance(middle, FailingLinear)

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
        net(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(4):
        batch = torch.randn(8, WIDTH, dtype=torch.float64).to(context.device)
        own = batch.chunk(context.num_ranks)[context.rank]
        if number % 2:
            raises = context.rank == context.num_ranks - 1
            middle.where = where if raises else ""
            began = time.monotonic()
            error = ValueError if raises else sw.PeerAborted
            with is_reached(error), sw.transaction(model, optimizers[0]):
                step(model, optimizers[0], own)
            context.report(f"seconds until step {number} had ended", time.monotonic() - began)
            middle.where = ""
        step(model, optimizers[0], own)
        step(reference, optimizers[1], batch)
        for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
            whole = mine.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, expected.detach(), rtol=1e-10, atol=1e-12)
