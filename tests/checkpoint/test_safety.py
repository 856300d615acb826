"""Damage is detected and named, and an unfinished save leaves the last checkpoint usable."""

import contextlib
import os
import pkgutil
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.offline import examine
from shardwise.checkpoint.read import read_manifest
from shardwise.checkpoint.stores import folder_at
from shardwise.cli import main
from tests.checkpoint.corruption import find_undetected
from tests.checkpoint.killing import kill_saves
from tests.checkpoint.training import Training
from tests.forked import run_forked
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import rank


def test_random_damage_is_always_detected(tmp_path: Path) -> None:
    undetected, tried = find_undetected(40, seed=1, folder=tmp_path)
    assert undetected == []
    assert len(tried) >= 7, "a kind of damage was never tried"


def test_all_ranks_name_the_damaged_tensor(tmp_path: Path) -> None:
    run_on(2, _save, tmp_path / "x")
    run_on(3, _load_damaged, tmp_path / "x")


def test_killed_saves_leave_the_previous_checkpoint(tmp_path: Path) -> None:
    run_forked(partial(kill_saves, tmp_path))


@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all_and_training_continues(tmp_path: Path) -> None:
    training = Training("gpt")
    training.step()
    sw.save(tmp_path / "step-0", model=training.model)
    before = training.bits()
    if rank() == 1:  # limit the size of files
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    with pytest.raises(sw.CheckpointError, match="larger than the system allows"):
        sw.save(tmp_path / "step-1", model=training.model)
    later = sw.save(tmp_path / "step-1", model=training.model, wait=False)
    with pytest.raises(sw.CheckpointError, match="larger than the system allows"):
        later.wait()
    if rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert training.bits() == before
    training.step(1)
    assert _names(tmp_path) == ["step-0"], "the unfinished save was not removed"
    sw.save(tmp_path / "step-1", model=training.model)
    assert examine(tmp_path / "step-1") == []
    missing = tmp_path / "step-0" if rank() == 0 else tmp_path / "step-1"
    with pytest.raises(sw.CheckpointError, match=r"but rank \d is not"):
        sw.load(missing, model=training.model)


@pytest.mark.parametrize("call", ["save", "load", "publish", "full_tensors"])
@on_ranks(2)
def test_an_interrupt_on_one_rank_is_raised_on_all_and_training_continues(
    call: str, tmp_path: Path
) -> None:
    training, state, path = Training("gpt"), _Numbered(), tmp_path / "x"
    training.step()
    model = training.model
    if call == "load":
        sw.save(path, model=model, state=state)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: sw.save(path, model=model, state=state),
        "load": lambda: sw.load(path, model=model, state=state),
        "publish": lambda: sw.publish(model, path),
        "full_tensors": lambda: list(sw.full_tensors(model, bucket_bytes=1)),
    }
    before = training.bits()
    # The first time, the other rank goes on to connect, the second time to exchange bytes.
    whole = "shardwise.weights.gather._Flight.outputs"
    second = whole if call in ("publish", "full_tensors") else f"{__name__}._Numbered.touch"
    for number, place in enumerate(["shardwise.checkpoint.coordination.across", second]):
        told = rf"rank 0 gave up in step \d+, sw\.{call}.*KeyboardInterrupt"
        error, text = (KeyboardInterrupt, "") if rank() == 0 else (sw.PeerAborted, told)
        with _interrupted(place), pytest.raises(error, match=text):
            calls[call]()
        sw.save(tmp_path / f"after {number}", model=model)
    assert training.bits() == before
    calls[call]()
    training.step(1)


@contextlib.contextmanager
def _interrupted(place: str) -> Iterator[None]:
    """Interrupt rank 0 at the end of its calls of the function at ``place``."""
    function = pkgutil.resolve_name(place)

    def interrupt(*args: object) -> None:
        function(*args)
        raise KeyboardInterrupt

    with mock.patch(place, interrupt if rank() == 0 else function):
        yield


class _Numbered:
    """A state that is saved and loaded."""

    def touch(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, int]:
        self.touch()
        return {"number": 1}

    def load_state_dict(self, _: dict[str, int]) -> None:
        self.touch()


@on_ranks(2)
def test_ranks_that_do_not_share_the_directory_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.checkpoint.directory.VISIBLE_SECONDS", 0.0)
    own = tmp_path / f"host-{rank()}"
    (own / "run" / "step-1").mkdir(parents=True)
    monkeypatch.chdir(own)
    model = sw.fully_shard(nn.Linear(2, 3))
    # The memory of each process, and a path that is another directory on each rank.
    for path in ("memory://run/step-1", "/proc/self/cwd/run/step-1"):
        with pytest.raises(sw.CheckpointError, match=r"not the directory .* all hosts share"):
            sw.save(path, model=model, max_file_bytes=16)  # each rank sends a file
    assert list(own.rglob("*.*")) == []


def test_new_directories_are_synced_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("shardwise.checkpoint.stores.sync", synced.append)
    sw.save(tmp_path / "run" / "checkpoints" / "step-1", model=nn.Linear(2, 3))
    run = tmp_path / "run"
    assert {tmp_path, run, run / "checkpoints", run / "checkpoints" / "step-1"} <= {*synced}


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    sw.save(tmp_path / "x", model=model)
    before = {file: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    with pytest.raises(sw.CheckpointError, match="contains a complete checkpoint"):
        sw.save(tmp_path / "x", model=model)
    assert {file: file.read_bytes() for file in (tmp_path / "x").iterdir()} == before
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "model.safetensors").write_bytes(b"somebody's")
    with pytest.raises(sw.CheckpointError, match=r"contains model\.safetensors"):
        sw.save(tmp_path / "y", model=model)
    assert (tmp_path / "y" / "model.safetensors").read_bytes() == b"somebody's"
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "config.json").write_text("{}", encoding="utf-8")
    sw.save(tmp_path / "z", model=model)
    assert examine(tmp_path / "z") == []
    assert (tmp_path / "z" / "config.json").exists()


def test_loading_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(sw.CheckpointError, match="no such directory"):
        sw.load(tmp_path / "nothing", model=model)
    sw.save(tmp_path / "step-1", model=model)
    with pytest.raises(sw.CheckpointError, match=r"it contains checkpoints, such as .*step-1"):
        sw.load(tmp_path, model=model)
    sw.save(tmp_path / "run" / "checkpoints" / "step-2", model=model)
    with pytest.raises(sw.CheckpointError, match=r"it contains checkpoints, such as .*step-2"):
        sw.load(tmp_path / "run", model=model)
    (tmp_path / "step-1" / "checkpoint.json").rename(
        tmp_path / "step-1" / "checkpoint.json.partial"
    )
    with pytest.raises(sw.CheckpointError, match="a save that is unfinished or was killed"):
        sw.load(tmp_path / "step-1", model=model)
    (tmp_path / "step-1" / "checkpoint.json.partial").unlink()
    with pytest.raises(sw.CheckpointError, match=r"checkpoint\.json is missing; pass source='hf'"):
        sw.load(tmp_path / "step-1", model=model)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(sw.CheckpointError, match="Not a directory"):
        sw.save(tmp_path / "file" / "x", model=model)


def test_doctor_lists_all_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sw.save(tmp_path / "x", model=nn.Linear(2, 3), rng=torch.ones(3))
    assert main(["doctor", str(tmp_path / "x")]) == 0
    assert "intact" in capsys.readouterr().out
    content = bytearray((tmp_path / "x" / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "x" / "model.safetensors").write_bytes(content)
    (tmp_path / "x" / "rng.safetensors").unlink()
    assert main(["doctor", str(tmp_path / "x")]) == 1
    output = capsys.readouterr().err
    assert "weight of model: bytes 0 to 24 are damaged" in output
    assert "rng.safetensors: missing; it contains value" in output


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(240))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 160, hard))
    try:
        sw.save(tmp_path / "x", model=model, max_file_bytes=1)
        sw.load(tmp_path / "x", model=model)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "x").glob("*.safetensors"))) == 240


def test_saving_to_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(sw.CheckpointError, match="no permission; choose another path"):
        sw.save(tmp_path / "x", model=nn.Linear(2, 3))
    tmp_path.chmod(0o700)
    shutil.rmtree(tmp_path)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _save(path: Path) -> None:
    training = Training("gpt")
    training.step()
    sw.save(path, model=training.model, optimizer=training.optimizer)


def _load_damaged(path: Path) -> None:
    training = Training("gpt")
    # No rank holds all of it, so no rank can detect the damage alone.
    name = next(n for n, x in training.model.named_parameters() if _is_cut(x))
    if rank() == 0:
        (file,) = read_manifest(folder_at(path)).components["model"].files
        content = bytearray((path / file.name).read_bytes())
        content[file.offsets[name] + 3] ^= 4
        (path / file.name).write_bytes(content)
    dist.barrier()
    with pytest.raises(sw.CheckpointDamaged, match=f"{name}: bytes 0 to 1048576 differ"):
        sw.load(path, model=training.model)
    with pytest.raises(sw.CheckpointError, match="no such directory"):
        sw.load(path / "elsewhere", model=training.model)


def _is_cut(parameter: Tensor) -> bool:
    assert isinstance(parameter, sw.ShardedTensor)
    return max(len(run) for run in parameter.sharding.runs) < parameter.numel()
