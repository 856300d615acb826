"""Compares the plan of a checkpoint with the ranges that ranks write and read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import save as saving
from shardwise.checkpoint.collect import WriteJob
from shardwise.checkpoint.coordination import Coordinator
from shardwise.checkpoint.write import write
from shardwise.errors import PlanError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecaster
from shardwise.forecast.machines.hardware import parse_cluster
from shardwise.forecast.machines.machine import Machine
from shardwise.forecast.models.model import resolve_model
from shardwise.forecast.time.saving import CheckpointPlan, FileRange, Storage, save_plan
from shardwise.plan.granularity import Dim, Granularity
from shardwise.plan.plan import Plan, make_plan
from tests.checkpoint.training import Training, adamw, options_for
from tests.models import CASES, build
from tests.ranks import run_on

SMALL = 100  # bytes per file, for several files


def plan_of(name: str, ranks: int, strategy: str, **options: Any) -> CheckpointPlan:
    model = build(name)
    return save_plan(
        model,
        _plan(model, ranks, strategy, units=CASES[name].units, **options),
        optimizer=adamw,
        max_file_bytes=SMALL,
    )


def _plan(model: nn.Module, ranks: int, strategy: str, **options: Any) -> Plan:
    shards, replicas = ranks, 1
    if strategy == "ddp":
        shards, replicas = 1, ranks
    elif strategy == "hsdp":
        shards, replicas = 2, ranks // 2
    elif strategy == "hfsdp":
        replicas = ranks // 2
    return make_plan(model, world_size=shards, replicas=replicas, strategy=strategy, **options)


@pytest.mark.parametrize(
    ("name", "ranks", "strategy", "options"),
    [
        ("gpt", 2, "fsdp", {}),
        ("frozen", 2, "zero2", {"granularity": "row"}),
        pytest.param("conv", 4, "hsdp", {}, marks=pytest.mark.thorough),
        pytest.param("tied", 3, "zero1", {}, marks=pytest.mark.thorough),
        pytest.param("mixed dtypes", 4, "hfsdp", {}, marks=pytest.mark.thorough),
        pytest.param("lora", 4, "ddp", {}, marks=pytest.mark.thorough),
        pytest.param("gpt", 1, "fsdp", {}, marks=pytest.mark.thorough),
        pytest.param("tiny", 4, "fsdp", {"granularity": "dim"}, marks=pytest.mark.thorough),
        pytest.param("stack", 4, "hsdp", {"granularity": "dim"}, marks=pytest.mark.thorough),
        ("gpt", 2, "fsdp", {"offload_policy": sw.CPUOffloadPolicy()}),
    ],
)
def test_planned_ranges_and_files_are_those_of_a_save(
    name: str, ranks: int, strategy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    found = run_on(ranks, _save_and_load, name, strategy, options, tmp_path / "x")
    given = {key.removesuffix("_policy"): value for key, value in options.items()}
    _compare(plan_of(name, ranks, strategy, **given), found, tmp_path / "x")


@pytest.mark.parametrize(
    ("strategy", "dim"),
    [
        ("hsdp", 0),
        ("fsdp", 1),
        pytest.param("ddp", 0, marks=pytest.mark.thorough),
        pytest.param("hsdp", 1, marks=pytest.mark.thorough),
    ],
)
def test_replicas_divide_large_shards_and_all_ranks_what_is_gathered(
    strategy: str, dim: int, tmp_path: Path
) -> None:
    found = run_on(4, _save_wide, strategy, dim, tmp_path / "x")
    model = _wide()
    plan = _plan(model, 4, strategy, units=nn.Linear, granularity=_granularity(dim))
    planned = save_plan(model, plan)
    assert planned.gathered == ["0.weight", "1.weight"] * dim
    _compare(planned, found, tmp_path / "x")


def test_a_load_on_other_ranks_reads_the_planned_bytes(tmp_path: Path) -> None:
    run_on(2, _save_and_load, "gpt", "fsdp", {}, tmp_path / "x")
    written, read = plan_of("gpt", 2, "fsdp"), plan_of("gpt", 3, "zero2")
    assert read.files == written.files
    found = run_on(3, _load, "gpt", "zero2", tmp_path / "x")
    assert read.load.tensor_bytes.tolist() == found


def test_thousands_of_ranks_write_every_byte_once() -> None:
    planned = plan_of("gpt", 2816, "fsdp")
    sizes = {file.name: len(file.head) for file in planned.files}
    for rank in range(2816):
        if planned.save.num_ranges[rank]:
            for one in planned.writes(rank):
                sizes[one.file] += one.num_bytes
    assert sizes == {file.name: file.num_bytes for file in planned.files}
    assert planned.save.num_bytes.sum() == planned.num_bytes


@pytest.mark.thorough
def test_thousands_of_ranks_with_tensor_and_pipeline_degrees_write_their_parts() -> None:
    """Of 2,816 ranks, 88 data-parallel ones share each of 8 x 4 parts, and gather no tensor."""
    machine = Machine.of(parse_cluster("2816xH100"))
    forecaster = Forecaster(resolve_model("llama-3.2-1b"), machine)
    divided = Configuration(shard_size=88, tensor=8, pipeline=4, sequence=8)
    assert divided.world_size == 2816
    whole = forecaster.checkpoint(Configuration(shard_size=2816, sequence=8))
    parts = [forecaster.checkpoint(divided, stage) for stage in range(4)]
    total = 8 * sum(part.tensor_bytes for part in parts)
    # All tensor-parallel ranks have the norms, and the last stage has a separate head.
    assert whole.tensor_bytes < total < 1.25 * whole.tensor_bytes
    for stage, part in enumerate(parts):
        assert part.num_ranks == 88
        assert part.gathered == []
        assert part.save.tensor_bytes.sum() == part.tensor_bytes
        held = 12 * sum(unit.shard_bytes for unit in forecaster.plan(divided, stage).units) // 4
        assert part.save.tensor_bytes.max() == pytest.approx(held, rel=0.01)
        assert part.save.num_files.max() <= len(part.files)


def test_the_slowest_part_of_the_storage_determines_the_time() -> None:
    save = plan_of("gpt", 4, "fsdp").save
    sizes = save.num_bytes.tolist()
    assert save.seconds(Storage(per_rank=10)) == max(sizes) / 10
    node = Storage(per_node=10, ranks_per_node=2)
    assert save.seconds(node) == max(sum(sizes[:2]), sum(sizes[2:])) / 10
    assert save.seconds(Storage(per_rank=1e9, total=10)) == sum(sizes) / 10
    assert save.seconds(Storage()) == 0


def test_states_have_the_dtype_of_the_master() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    planned = save_plan(model, make_plan(model, world_size=2), optimizer=_sgd)
    assert planned.tensor_bytes == 2 * 20 * 4
    assert model.weight.grad is None
    assert model.weight.device.type == "cpu"


def test_an_optimizer_that_reads_values_is_an_error() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(PlanError, match="Adafactor cannot take a step on the meta device"):
        save_plan(
            model,
            make_plan(model, world_size=2),
            optimizer=lambda module: torch.optim.Adafactor(module.parameters()),
        )


def _compare(planned: CheckpointPlan, found: list[tuple[list[FileRange], int]], path: Path) -> None:
    files = {file.name: file.num_bytes for file in planned.files} | planned.other_files
    assert files == {file.name: file.stat().st_size for file in path.iterdir()}
    assert planned.num_ranks == len(found)
    for rank, (ranges, bytes_read) in enumerate(found):
        assert planned.writes(rank) == ranges
        assert planned.save.tensor_bytes[rank] == sum(one.num_bytes for one in ranges)
        assert planned.save.num_files[rank] == len({one.file for one in ranges})
        assert planned.load.tensor_bytes[rank] == bytes_read


def _save_and_load(
    name: str, strategy: str, options: dict[str, Any], path: Path
) -> tuple[list[FileRange], int]:
    training = Training(name, **{**options_for(strategy), **options})
    training.step()
    ranges = _written(
        lambda: sw.save(
            path, model=training.model, optimizer=training.optimizer, max_file_bytes=SMALL
        )
    )
    return ranges, sw.load(path, model=training.model, optimizer=training.optimizer).bytes_read


def _load(name: str, strategy: str, path: Path) -> int:
    training = Training(name, **options_for(strategy))
    return sw.load(path, model=training.model, optimizer=training.optimizer).bytes_read


def _save_wide(strategy: str, dim: int, path: Path) -> tuple[list[FileRange], int]:
    model = sw.fully_shard(
        _wide(), units=nn.Linear, granularity=_granularity(dim), **options_for(strategy)
    )
    ranges = _written(lambda: sw.save(path, model=model))
    return ranges, sw.load(path, model=model).bytes_read


def _granularity(dim: int) -> Granularity:
    return Dim(dim) if dim else "element"


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(1101, 1030, bias=False), nn.Linear(1030, 3, bias=False))


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _written(run: Callable[[], object]) -> list[FileRange]:
    """Return the ranges that this rank writes during ``run``, which saves."""
    jobs: list[WriteJob] = []

    def spy(job: WriteJob, ranks: Coordinator) -> None:
        jobs.append(job)
        write(job, ranks)

    with mock.patch.object(saving, "write", spy):
        run()
    return [
        FileRange(file.name, offset + own.start_byte, own.elements.nbytes, name)
        for file in jobs[0].files
        for (name, offset), number in zip(
            file.offsets.items(), jobs[0].numbers[file.name], strict=True
        )
        if (own := jobs[0].slices.get(number)) is not None
    ]
