"""What a newcomer tries in the first minutes: it works, or the error says what to do instead."""

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.checkpoint import coordination
from shardwise.plan.plan import make_plan
from tests.ranks import on_ranks
from tests.runtime.one_process import runtime_of


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.GELU())


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), Block(), Block())


def make_sharded() -> nn.Sequential:
    return sw.fully_shard(make_model(), units="Block")


def weight_of(model: nn.Module) -> DTensor:
    weight = model.get_parameter("1.0.weight")
    assert isinstance(weight, DTensor)
    return weight


def train_step(model: nn.Module) -> None:
    model(torch.tensor([1, 2])).sum().backward()


A_CLASS: Any = Block


# -- fully_shard -----------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "units": (
        lambda: sw.fully_shard(make_model(), units="atuo"),
        r"units='atuo': expected .*; did you mean 'auto'\?",
    ),
    "mp_policy": (
        lambda: sw.fully_shard(make_model(), mp_policy=torch.bfloat16),  # type: ignore[arg-type]
        r"got torch.bfloat16; pass sw.MixedPrecisionPolicy\(param_dtype=torch.bfloat16\)",
    ),
    "a name of a dtype": (
        lambda: sw.MixedPrecisionPolicy("bfloat16"),  # type: ignore[arg-type]
        r"param_dtype='bfloat16': expected a floating-point torch.dtype",
    ),
    "offload_policy": (
        lambda: sw.fully_shard(make_model(), offload_policy=True),  # type: ignore[arg-type]
        r"offload_policy: .* got True; pass sw.CPUOffloadPolicy\(\)",
    ),
    "a class": (
        lambda: sw.fully_shard(A_CLASS),
        "takes a torch.nn.Module or a list of them, got type",
    ),
    "twice": (
        lambda: sw.fully_shard(make_sharded()),
        "^Sequential is sharded already",
    ),
    "not sharded": (
        lambda: sw.ledger(make_model()),
        "not sharded; call sw.fully_shard on it",
    ),
    "load(None)": (
        lambda: sw.load(None, model=make_sharded()),  # type: ignore[arg-type]
        "expected the path or URL of a checkpoint, got None; sw.latest found no checkpoint",
    ),
    "load": (
        lambda: sw.load("gone", model=make_sharded()),
        "gone: not a checkpoint: no such",
    ),
    "load: optimizer": (
        lambda: sw.load("x", model=make_sharded(), optimizer="adam"),  # type: ignore[arg-type]
        r"load: optimizer='adam': expected a torch.optim.Optimizer",
    ),
    "save: optimizer": (
        lambda: sw.save("x", model=make_sharded(), optimizer="adam"),  # type: ignore[arg-type]
        r"save: optimizer='adam': expected a torch.optim.Optimizer",
    ),
    "save: model": (
        lambda: sw.save("x", model=make_sharded().state_dict()),  # type: ignore[arg-type]
        r"model=OrderedDict\(\.\.\.\): expected .*; pass the model itself, not its state_dict\(\)",
    ),
    "optimizer_in_backward": (
        lambda: sw.optimizer_in_backward(make_sharded(), "adam"),  # type: ignore[arg-type]
        "takes a torch.optim.Optimizer, got str",
    ),
    "clipping a module": (
        lambda: sw.clip_grad_norm_(make_sharded(), 1.0),  # type: ignore[arg-type]
        r"expected parameters, got a module; pass its parameters\(\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_refused_at_the_call(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises((sw.ShardwiseError, TypeError), match=message):
        call()


def test_units_by_the_name_of_their_class() -> None:
    labels = [unit.label for unit in runtime_of(make_sharded()).plan.units]
    assert labels == ["Sequential", "1", "2"]


def test_under_torchrun_the_process_group_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    class Called(Exception):  # noqa: N818
        pass

    def init() -> None:
        raise Called

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", init)
    with pytest.raises(Called):
        make_sharded()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_processes_without_a_process_group_do_not_train_models_of_their_own(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(variable, "4")
    with pytest.raises(sw.PlanError, match=rf"{variable}=4: .*start them with torchrun, or call"):
        make_sharded()


def test_the_optimizer_may_be_built_before() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sw.fully_shard(model, units=Block)
    before = weight_of(model).full_tensor()
    train_step(model)
    optimizer.step()
    assert not before.equal(weight_of(model).full_tensor())


# -- looking at it ---------------------------------------------------------------------------------


def test_a_model_is_printed_as_before() -> None:
    assert repr(make_sharded()) == repr(make_model())


def test_what_is_printed_is_readable(tmp_path: Path) -> None:
    model = make_sharded()
    ledger = sw.ledger(model)
    assert repr(ledger) == "Ledger(no step yet, 3 units, at most 0 bytes gathered at once)"
    train_step(model)
    assert re.fullmatch(r"Ledger\(steps 0 to 0, 3 units, at most [\d,]+ bytes .*\)", repr(ledger))
    assert repr(sw.save(tmp_path / "x", model=model)) == f"Save('{tmp_path}/x', done)"
    assert repr(make_plan(make_model(), world_size=2, units="Block")) == (
        "Plan(fsdp over 2 ranks, 3 units, 72 parameters: 288 bytes, of which a rank keeps 192)"
    )
    weight = repr(weight_of(model))
    assert weight.startswith("ShardedTensor(1.0.weight, shape=(4, 4), dtype=torch.float32")


# -- the memory of a parameter ---------------------------------------------------------------------

WAYS_OUT = r"`with sw\.gathered\(model\):`, or use sw\.save, which"
ACCESSES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "safetensors": lambda model, path: save_file(model.state_dict(), path),
    "storage": lambda model, _: next(model.parameters()).untyped_storage().data_ptr(),
    "numpy": lambda model, _: next(model.parameters()).detach().numpy(),
    "tolist": lambda model, _: next(model.parameters()).tolist(),
}


@pytest.mark.parametrize("access", ACCESSES)
def test_what_needs_the_memory_of_a_parameter_names_the_ways_out(
    access: str, tmp_path: Path
) -> None:
    with pytest.raises(sw.ShardedTensorError, match=WAYS_OUT):
        ACCESSES[access](make_sharded(), tmp_path / "x")


def test_torch_save_of_a_module_names_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(sw.ShardedTensorError, match=r"Sequential is sharded.*sw\.save\(path"):
        torch.save(make_sharded(), tmp_path / "x")


@on_ranks(2)
def test_what_works_after_sharding() -> None:
    model = make_sharded()
    model.load_state_dict(make_model().state_dict())
    assert weight_of(model).full_tensor().equal(make_model().get_parameter("1.0.weight"))
    model.to("cpu").half()
    assert model(torch.tensor([1])).dtype == torch.float16
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "masters of trainable weights"
    train_step(model.float())
    sw.clip_grad_norm_(model.parameters(), 1.0)


@on_ranks(2)
def test_a_save_on_one_rank_alone_says_that_it_waits_for_the_others(tmp_path: Path) -> None:
    said, model = tmp_path / "said", make_sharded()
    if dist.get_rank() == 1:
        while not said.exists():
            time.sleep(0.01)
        sw.save(tmp_path / "x", model=model)
        return
    texts: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits in" in record.getMessage():
                texts.append(record.getMessage())
                said.touch()

    handler = Said()
    logging.getLogger("shardwise").addHandler(handler)
    try:
        with mock.patch.object(coordination, "PATIENCE_SECONDS", 0.05):
            sw.save(tmp_path / "x", model=model)
    finally:
        logging.getLogger("shardwise").removeHandler(handler)
    call = f"sw.save('{tmp_path}/x')"
    assert texts == [f"rank 0 waits in {call} for the other ranks: every rank must call it"]
