"""A model of any interface and strategy loads what any other has saved, in every format."""

import contextlib
import copy
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import (
    async_save,
    save as save_distributed,
)
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from shardwise.fsdp.api import ShardingStrategy
from shardwise.fsdp.names import clean_name
from shardwise.fsdp.wrap import ModuleWrapPolicy
from tests.covering import covered_first
from tests.fsdp.both import DEADLINE
from tests.fsdp.models import Block, Net, batch, make_net
from tests.ranks import on_ranks
from tests.runtime.one_process import TOLERANCE, full, options_of, rank

PRESETS = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "hsdp-zero2", "hfsdp")
KINDS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
MODELS = [
    *product(("sw",), PRESETS),
    *product(("fsdp2",), PRESETS[:-1]),  # hfsdp does not shard along a dim
    *product(("fsdp1", "fsdp1 inside"), KINDS),
]
READERS = MODELS[9:] + MODELS[:9]  # so that the first rows have another writer than reader
TYPES = {kind.name: kind for kind in StateDictType}
WHOLE = StateDictOptions(full_state_dict=True)

Kind = tuple[str, str]  # an interface and a strategy


class Outer(nn.Module):
    """A model whose root is sharded or, with "fsdp1 inside", contains a wrapper."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


class Trained:
    """A model with AdamW after ``steps`` steps; ``kind`` None is one process."""

    def __init__(self, kind: Kind | None, seed: int, steps: int) -> None:
        self.is_alone = kind is None
        net = make_net(seed)
        self.model = Outer(net) if kind is None else _sharded(net, *kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, eps=1e-3)
        for number in range(steps):
            self.step(number)

    def step(self, number: int) -> None:
        ranks = range(dist.get_world_size()) if self.is_alone else (rank(),)
        x = torch.cat([batch(number, each) for each in ranks])
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> dict[str, Tensor]:
        """Every full parameter, buffer and state."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[clean_name(name)] = parameter
            for key, value in self.optimizer.state[parameter].items():
                found[f"{clean_name(name)}/{key}"] = value
        buffers = {clean_name(name): x for name, x in self.model.named_buffers()}
        return {name: full(x).detach().clone() for name, x in {**found, **buffers}.items()}


def _sharded(net: Net, interface: str, strategy: str) -> nn.Module:
    if interface in ("sw", "fsdp2"):
        shard: Any = sw.fully_shard if interface == "sw" else fully_shard
        model, options = Outer(net), options_of(strategy)
        for block in net.blocks:
            shard(block, **options)
        shard(model, **options)
        return model
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    arguments: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[strategy],
        "auto_wrap_policy": ModuleWrapPolicy({Block}),
        "device_mesh": mesh if "HYBRID" in strategy else None,
        "device_id": torch.device("cpu"),
    }
    if interface == "fsdp1":
        return FullyShardedDataParallel(Outer(net), **arguments)
    return Outer(FullyShardedDataParallel(net, **arguments))


# -- formats -------------------------------------------------------------------------------------


def _state_dicts(trained: Trained, options: StateDictOptions | None = None) -> dict[str, Any]:
    """As a program of the interface gets them: FSDP1 has a function for optimizer states."""
    model, optimizer = trained.model, trained.optimizer
    if FullyShardedDataParallel.fsdp_modules(model):
        return {
            "model": model.state_dict(),
            "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }
    weights, states = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": states}


def _save(how: str, path: Path, trained: Trained) -> None:
    match how:
        case "sw":
            sw.save(path, model=trained.model, optimizer=trained.optimizer)
        case "sw in the background":
            sw.save(path, model=trained.model, optimizer=trained.optimizer, wait=False).wait()
        case "dcp" | "sw from dcp":
            save_distributed(_state_dicts(trained), checkpoint_id=path)
        case "sw from torch":
            whole = _state_dicts(trained, WHOLE)
            if rank() == 0:
                torch.save(whole, path)
    dist.barrier()


def _load(how: str, path: Path, trained: Trained) -> None:
    model, optimizer = trained.model, trained.optimizer
    if how != "dcp":
        source: Any = how.rpartition(" from ")[2] if " from " in how else "shardwise"
        report = sw.load(path, model=model, optimizer=optimizer, source=source).report
        assert not str(report)
        return
    read = _state_dicts(trained)
    load_distributed(read, checkpoint_id=path)
    if FullyShardedDataParallel.fsdp_modules(model):
        model.load_state_dict(read["model"])
        states = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, read["optim"])
        optimizer.load_state_dict(states)
        return
    set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optim"])


FORMATS = ("sw", "sw in the background", "dcp", "sw from dcp", "sw from torch")
# Each writer with each reader; by default, each of them once.
ROWS = [
    pytest.param(
        FORMATS[(i + j) % len(FORMATS)],
        writer,
        reader,
        marks=() if i == j else pytest.mark.thorough,
    )
    for i, writer in enumerate(MODELS)
    for j, reader in enumerate(READERS)
]


@on_ranks(2, thorough=(4,), deadline=DEADLINE)
@pytest.mark.parametrize(("how", "writer", "reader"), ROWS)
def test_any_model_loads_what_any_other_saved(
    how: str, writer: Kind, reader: Kind, tmp_path: Path
) -> None:
    saved, loaded = Trained(writer, seed=0, steps=2), Trained(reader, seed=3, steps=1)
    _save(how, tmp_path / "x", saved)
    _load(how, tmp_path / "x", loaded)
    _assert_equal(loaded.values(), saved.values(), tolerance=0.0)
    loaded.step(2)
    _assert_equal(loaded.values(), Trained(None, seed=0, steps=3).values(), TOLERANCE)


@on_ranks(2, thorough=(4,), deadline=DEADLINE)
@pytest.mark.parametrize(
    ("name", "strategy", "interface"),
    covered_first(product(TYPES, KINDS, ("fsdp1", "fsdp1 inside"))),
)
def test_state_dict_types_of_fsdp1(
    name: str, strategy: str, interface: str, tmp_path: Path
) -> None:
    """A state dict of each type is loaded; `sw.save` and `sw.load` work with each type chosen."""
    if name == "LOCAL_STATE_DICT" and "HYBRID" in strategy:
        return  # refused, because it has a device mesh, as in PyTorch
    kind = (interface, strategy)
    saved = Trained(kind, seed=0, steps=2)
    expected = {key: x for key, x in saved.values().items() if "/" not in key}
    with _chosen(saved, name):
        state = saved.model.state_dict()
        sw.save(tmp_path / "x", model=saved.model, optimizer=saved.optimizer)
    for number, load in enumerate((None, sw.load)):
        loaded = Trained(kind, seed=3, steps=1)
        with _chosen(loaded, name):
            if load is None:
                loaded.model.load_state_dict(state)
            else:
                load(tmp_path / "x", model=loaded.model, optimizer=loaded.optimizer)
        found = loaded.values()
        wanted = saved.values() if number else expected
        _assert_equal({key: found[key] for key in wanted}, wanted, tolerance=0.0)


@contextlib.contextmanager
def _chosen(trained: Trained, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        context = FullyShardedDataParallel.state_dict_type(trained.model, TYPES[name])
        with context:
            yield


@on_ranks(2, thorough=(4,), deadline=DEADLINE)
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(*row, marks=pytest.mark.thorough if number % 2 else ())
        for number, row in enumerate(zip(MODELS, READERS, strict=True))
    ],
)
def test_full_state_dicts(writer: Kind, reader: Kind) -> None:
    saved, loaded = Trained(writer, seed=0, steps=1), Trained(reader, seed=3, steps=0)
    whole: Any = get_model_state_dict(saved.model, options=WHOLE)
    values = saved.values()
    expected = {key: x for key, x in values.items() if "/" not in key}
    _assert_equal(whole, expected, tolerance=0.0)
    states: Any = get_optimizer_state_dict(saved.model, saved.optimizer, options=WHOLE)["state"]
    found = {
        f"{clean_name(name)}/{key}": x for name, own in states.items() for key, x in own.items()
    }
    _assert_equal(found, {key: x for key, x in values.items() if "/" in key}, tolerance=0.0)
    if reader[0] == "fsdp2":  # torch's function cannot cut tensors into runs of elements
        set_model_state_dict(loaded.model, whole, options=WHOLE)
    else:
        loaded.model.load_state_dict(whole)
    _assert_equal(loaded.values(), expected, tolerance=0.0)


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


INFERENCE = [("sw", "ddp"), ("sw", "fsdp"), ("fsdp2", "fsdp"), ("fsdp1", "FULL_SHARD")]
INFERENCE += [("fsdp1 inside", "NO_SHARD")]


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize("kind", INFERENCE)
def test_inference_mode(kind: Kind, tmp_path: Path) -> None:
    """What is saved and loaded in inference mode has the same values, and training goes on."""
    saved, loaded = Trained(kind, seed=0, steps=2), Trained(kind, seed=3, steps=0)
    expected = saved.values()
    weights = {key: x for key, x in expected.items() if "/" not in key}
    with torch.inference_mode():
        state = saved.model.state_dict()
        whole: Any = get_model_state_dict(saved.model, options=WHOLE)
        sw.save(tmp_path / "x", model=saved.model, optimizer=saved.optimizer)
        loaded.model.load_state_dict(state)
    _assert_equal(loaded.values(), weights, tolerance=0.0)
    assert not any(x.is_inference() for x in state.values())
    for found in (state, whole):
        _assert_equal({name: full(x) for name, x in found.items()}, weights, tolerance=0.0)
    for types in TYPES if kind[0] == "fsdp1" else ():
        with torch.inference_mode(), _chosen(saved, types):
            state = saved.model.state_dict()
        with _chosen(loaded, types):
            loaded.model.load_state_dict(state)
        _assert_equal(loaded.values(), weights, tolerance=0.0)
    again = Trained(kind, seed=3, steps=0)
    with torch.inference_mode():
        sw.load(tmp_path / "x", model=again.model, optimizer=again.optimizer)
    _assert_equal(again.values(), expected, tolerance=0.0)
    again.step(2)
    _assert_equal(again.values(), Trained(None, seed=0, steps=3).values(), TOLERANCE)


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize("interface", ["fsdp1", "fsdp1 inside"])
def test_one_ranks_states_of_fsdp1_are_not_saved_for_all(interface: str, tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` would save them as if every rank had the same."""
    trained = Trained((interface, "FULL_SHARD"), seed=0, steps=1)
    state = trained.optimizer.state_dict()
    with pytest.raises(CheckpointException, match=r"optim_state_dict\(model, optimizer\)"):
        save_distributed({"optim": state}, checkpoint_id=tmp_path / "x")
    file = tmp_path / str(rank())
    torch.save(trained.optimizer.state_dict(), file)
    expected = trained.values()
    trained.step(1)
    trained.optimizer.load_state_dict(torch.load(file, weights_only=True))
    found = trained.values()
    _assert_equal(
        {name: x for name, x in found.items() if "/" in name},
        {name: x for name, x in expected.items() if "/" in name},
        tolerance=0.0,
    )


@on_ranks(2, deadline=DEADLINE)
def test_states_of_fsdp1_are_copied() -> None:
    state = Trained(("fsdp1", "FULL_SHARD"), seed=0, steps=1).optimizer.state_dict()["state"]
    copied = copy.deepcopy(state)
    for index, key in product(state, ("exp_avg", "exp_avg_sq")):
        assert torch.equal(copied[index][key], state[index][key])
        assert type(copied[index][key]) is type(state[index][key])


@on_ranks(4, deadline=DEADLINE)
@pytest.mark.parametrize("kind", [("sw", "fsdp"), ("sw", "ddp"), ("sw", "hsdp"), ("fsdp2", "fsdp")])
def test_asynchronous_saves_have_the_values_of_their_call(kind: Kind, tmp_path: Path) -> None:
    """torch keeps its copies in host memory for the next save."""
    trained = Trained(kind, seed=0, steps=2)
    for number in range(2):
        expected = trained.values()
        saving: Any = async_save(_state_dicts(trained), checkpoint_id=tmp_path / str(number))
        trained.step(number)
        saving.result()
        other = Trained(kind, seed=1, steps=1)
        state = _state_dicts(other)
        load_distributed(state, checkpoint_id=tmp_path / str(number))
        set_state_dict(
            other.model,
            other.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        _assert_equal(other.values(), expected, tolerance=0.0)


@on_ranks(2, deadline=DEADLINE)
@pytest.mark.parametrize("granularity", ["element", "row", "dim"])
def test_files_of_hugging_face_have_the_whole_tensors(granularity: Any, tmp_path: Path) -> None:
    """Their writer keeps one box of a tensor for each rank, and runs of elements may be more."""
    torch.manual_seed(0)
    model = sw.fully_shard(nn.Linear(5, 7), granularity=granularity)
    expected = {name: full(value) for name, value in model.state_dict().items()}
    writer = HuggingFaceStorageWriter(
        str(tmp_path), save_distributed=True, enable_consolidation=True
    )
    if granularity == "element":
        with pytest.raises(CheckpointException, match=r"one box .* pass granularity='row'"):
            save_distributed(model.state_dict(), storage_writer=writer)
        return
    save_distributed(model.state_dict(), storage_writer=writer)
    dist.barrier()
    read: dict[str, Tensor] = {}
    for file in tmp_path.glob("*.safetensors"):
        read |= load_file(file)
    _assert_equal(read, expected, tolerance=0.0)
    other = sw.fully_shard(nn.Linear(5, 7))  # elements
    state = other.state_dict()
    load_distributed(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
    other.load_state_dict(state)
    _assert_equal({n: full(x) for n, x in other.state_dict().items()}, expected, tolerance=0.0)
