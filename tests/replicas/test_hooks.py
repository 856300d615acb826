"""The program of an FSDP2 user of torchft, as it is: a hook and two callbacks."""

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
import shardwise.fsdp
from shardwise.tensor.sharding import local_of
from tests.models import WIDTH, Stack
from tests.replicas.job import Job, Seat

STEPS = 12
DIES_AT, WAITS_AT = 4, 7


def digest(model: nn.Module) -> int:
    """Of this rank's bits of the parameters."""
    total = 0
    for parameter in model.parameters():
        local = local_of(parameter).detach().contiguous().reshape(-1)
        total = zlib.crc32(local.view(torch.uint8).numpy().tobytes(), total)
    return total


def batch_of(seat: Seat, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * seat.number + seat.rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def program(
    seat: Seat, *, drop_in: bool, dies: bool, waits: bool, seed: int, is_async: bool
) -> None:
    torch.manual_seed(seed)  # replicas begin with different values
    model = Stack().double()
    shard: Any = shardwise.fsdp.fully_shard if drop_in else sw.fully_shard
    for layer in model.layers:
        shard(layer)
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        seat.log("healed", step=manager.current_step())

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = seat.manager(load_state_dict=load, state_dict=save, use_async_quorum=is_async)
    for module in model.modules():
        if isinstance(module, sw.FSDPModule):
            module.set_all_reduce_hook(lambda t: manager.allreduce(t).wait())
    seat.log("ready")
    seat.wait_for("start")
    while manager.current_step() < STEPS:
        step = manager.current_step()
        if waits and step == WAITS_AT:
            seat.wait_for("go on")
        manager.start_quorum()
        loss = model(batch_of(seat, step)).square().mean()
        if dies and step == DIES_AT:
            seat.die()
        loss.backward()
        if manager.should_commit():
            optimizer.step()
            seat.log("step", step=manager.current_step(), digest=digest(model))
        optimizer.zero_grad()
    manager.shutdown(wait=False)


@pytest.mark.parametrize(
    ("drop_in", "is_async"),
    [
        (False, True),
        pytest.param(False, False, marks=pytest.mark.thorough),
        pytest.param(True, False, marks=pytest.mark.thorough),
        pytest.param(True, True, marks=pytest.mark.thorough),
    ],
)
def test_a_killed_replica_heals_through_the_state_dicts(drop_in: bool, is_async: bool) -> None:
    options = {"drop_in": drop_in, "is_async": is_async}
    with Job(num_ranks=2) as job:
        stays = job.start(0, program, dies=False, waits=True, seed=3, **options)
        dies = job.start(1, program, dies=True, waits=False, seed=4, **options)
        job.allow_when_ready(2)
        dies.join_killed()
        job.wait_until(lambda: job.lines(0, 0, "step")[-1]["step"] >= WAITS_AT)
        back = job.start(1, program, dies=False, waits=False, seed=5, **options)
        job.wait_until_asked()
        job.allow("go on")
        job.finish(stays, back)
        for rank in range(2):
            own = {line["step"]: line["digest"] for line in job.lines(0, rank, "step")}
            others = {line["step"]: line["digest"] for line in job.lines(1, rank, "step")}
            assert list(own) == list(range(1, STEPS + 1)), "the survivor finishes every step"
            first = min(step for step in others if step > DIES_AT)
            assert first <= WAITS_AT + 2
            assert all(own[step] == others[step] for step in others)
            assert job.lines(1, rank, "healed")[-1]["step"] == first - 1
