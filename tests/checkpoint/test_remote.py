"""Checkpoints in a store of whole objects have the bytes of local ones."""

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.registry import known_implementations
from torch import nn

import shardwise as sw
from shardwise.checkpoint import upload
from shardwise.checkpoint.format import File, Spec
from shardwise.checkpoint.offline import examine
from shardwise.checkpoint.read import read_manifest
from shardwise.checkpoint.stores import folder_at
from shardwise.checkpoint.upload import assign_files
from shardwise.cli import main
from tests.checkpoint.s3 import FakeS3, reach, serving
from tests.checkpoint.training import (
    Training,
    differing,
    digests,
    load_wide,
    options_for,
    save_wide,
    wide,
)
from tests.covering import leaving
from tests.forked import run_forked
from tests.ranks import run_on

SMALL = 100  # bytes: several files
HOPS = [(3, "zero2", SMALL), (4, "hsdp", 10**9), (1, "ddp", SMALL), (2, "fsdp", 10**9)]
WIDE = 20 << 20  # elements


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with serving() as fake:
        yield fake


# -- the same bytes ------------------------------------------------------------------------------


def test_every_hop_keeps_every_bit_and_every_file(s3: FakeS3, tmp_path: Path) -> None:
    run_on(2, _begin, s3.endpoint, tmp_path / "several", "s3://bucket/0")
    run_on(2, _begin_whole, s3.endpoint, tmp_path / "whole")
    expected = {SMALL: digests(tmp_path / "several"), 10**9: digests(tmp_path / "whole")}
    assert len(expected[SMALL]) > len(expected[10**9]) > 2
    assert s3.digests("0/") == expected[SMALL]
    for number, (ranks, strategy, size) in enumerate(HOPS, start=1):
        urls = f"s3://bucket/{number - 1}", f"s3://bucket/{number}"
        assert run_on(ranks, _hop, s3.endpoint, strategy, size, *urls) == [[]] * ranks
        assert s3.digests(f"{number}/") == expected[size], f"{strategy} on {ranks} ranks"
    assert not s3.uploads


def test_s3fs_writes_and_reads_the_same_objects(s3: FakeS3) -> None:
    """The extra ``s3`` installs s3fs; the other tests use obstore, which starts no threads."""
    sw.save("s3://bucket/obstore", model=_small())
    assert run_forked(partial(_save_and_load_with_s3fs, s3.endpoint))
    assert s3.digests("s3fs/") == s3.digests("obstore/")


def _small() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(30, 40)


def _save_and_load_with_s3fs(endpoint: str) -> bool:
    fsspec.register_implementation("s3", "s3fs.S3FileSystem")
    fsspec.config.conf["s3"] = {
        "key": "somebody",
        "secret": "secret",
        "endpoint_url": endpoint,
        "client_kwargs": {"region_name": "nowhere"},
    }
    saved, loaded = _small(), nn.Linear(30, 40)
    sw.save("s3://bucket/s3fs", model=saved)
    sw.load("s3://bucket/s3fs", model=loaded)
    return torch.equal(saved.weight, loaded.weight)


@pytest.mark.parametrize("strategy", leaving(["fsdp"], ["fsdp", "hsdp"]))
def test_tensors_that_are_cut_inside_blocks(strategy: str, s3: FakeS3, tmp_path: Path) -> None:
    run_on(4, _write_wide, s3.endpoint, strategy, "s3://bucket/x")
    sw.save(tmp_path / "x", model=wide(3613))
    assert s3.digests("x/") == digests(tmp_path / "x")
    sizes = run_on(3, _read_wide, s3.endpoint, "s3://bucket/x")
    (file,) = read_manifest(folder_at("s3://bucket/x")).files
    ranges = s3.read(".safetensors")
    assert [found for found in ranges if not found[0]] == [(0, len(file.head))] * 3
    total = sum(stop - start for start, stop in ranges if start)
    assert total == sum(sizes), "read more than the shards"


def test_files_are_assigned_by_size() -> None:
    files = [File(str(size), (Spec("x", "U8", (size,)),)) for size in (10, 4000, 3000, 900, 2000)]
    names = [[file.name for file in row] for row in assign_files(files, 2)]
    assert names == [["4000", "900", "10"], ["3000", "2000"]]
    assert assign_files(files[:1], 2) == [files[:1], []]


def test_saves_to_other_file_systems(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    for root in (f"file://{tmp_path}/a/b", "memory://runs"):
        for step in (9, 10):
            kept = sw.save(f"{root}/step-{step}", model=model, retention=sw.Retention(1))
        assert sw.latest(root) == kept.path == f"{root}/step-10"
        assert sw.load(f"{root}/step-10", model=nn.Linear(2, 3)).bytes_read == 36
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["step-10"]


def test_an_upload_needs_a_few_megabytes(tmp_path: Path) -> None:
    """The file has 80 MB; one rank sends it, and another rank holds half of it."""
    grown = run_on(2, _grow, f"file://{tmp_path}/x")
    assert max(grown) < 24 << 20, grown
    assert (tmp_path / "x" / "model.safetensors").stat().st_size > 4 * WIDE


# -- errors --------------------------------------------------------------------------------------


def test_a_save_killed_at_any_moment_leaves_the_previous_checkpoint(s3: FakeS3) -> None:
    model = nn.Linear(400, 3)
    url = "s3://bucket/run/step-"
    sw.save(url + "1", model=model, max_file_bytes=SMALL)
    moments: list[dict[str, bytes]] = []
    s3.refuses = lambda _request: moments.append(dict(s3.objects)) or False  # type: ignore[func-returns-value]
    sw.save(url + "2", model=model, max_file_bytes=SMALL, retention=sw.Retention(1))
    s3.refuses = lambda _request: False
    whole = dict(s3.objects)
    assert len(moments) > 10
    found = set()
    for objects in moments:
        s3.objects = dict(objects)
        last = sw.latest("s3://bucket/run")
        assert last is not None
        assert examine(last) == []
        found.add(last)
        if last == url + "1":
            sw.save(url + "2", model=model, max_file_bytes=SMALL, retention=sw.Retention(1))
        else:  # it was removing step-1
            sw.save(url + "3", model=model, max_file_bytes=SMALL, retention=sw.Retention(1))
            s3.objects = {k.replace("step-3", "step-2"): x for k, x in s3.objects.items()}
        assert s3.objects == whole, "files were not removed"
    assert found == {url + "1", url + "2"}


def test_a_failed_upload_is_raised_on_all_ranks(s3: FakeS3) -> None:
    """Also on a rank that is sending a large file."""
    s3.refuses = lambda request: "/model-00003" in request.key
    run_on(2, _fail_and_go_on, s3.endpoint)
    assert s3.names("run/") == [], "the unfinished save was not removed"
    s3.refuses = lambda _request: False
    run_on(2, _save_twice, s3.endpoint)
    assert s3.digests("run/step-1/") == s3.digests("run/step-2/")


def test_an_error_on_one_rank_ends_the_save_on_all(s3: FakeS3) -> None:
    run_on(2, _run_out_of_memory, s3.endpoint)
    assert s3.names("run/step-1/") == []


def test_damage_is_named(s3: FakeS3, capsys: pytest.CaptureFixture[str]) -> None:
    model, url = nn.Linear(2, 3), "s3://bucket/run/x"
    sw.save(url, model=model, rng=torch.ones(3))
    assert main(["doctor", url]) == 0
    assert f"{url}: intact" in capsys.readouterr().out
    name = "run/x/model.safetensors"
    s3.objects[name] = s3.objects[name][:-1] + bytes([s3.objects[name][-1] ^ 1])
    with pytest.raises(sw.CheckpointDamaged, match="weight: bytes 0 to 1048576 differ"):
        sw.load(url, model=model)
    del s3.objects["run/x/rng.safetensors"]
    s3.objects["run/x/more.safetensors"] = b""
    with pytest.raises(
        sw.CheckpointDamaged, match=f"{url}/rng.safetensors: missing; it contains value"
    ):
        sw.load(url, model=model)
    assert main(["doctor", url]) == 1
    output = capsys.readouterr().err
    assert "weight of model: bytes 0 to 24 are damaged" in output
    assert f"{url}/more.safetensors: foreign" in output
    s3.objects[name] = s3.objects[name][:-4]
    assert f"{url}/model.safetensors: {len(s3.objects[name])} bytes long" in examine(url)[0]


def test_loading_a_prefix_without_a_checkpoint_is_refused(s3: FakeS3) -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(sw.CheckpointError, match="s3://bucket/run: not a checkpoint: no such"):
        sw.load("s3://bucket/run", model=model)
    sw.save("s3://bucket/run/step-1/", model=model)
    with pytest.raises(
        sw.CheckpointError, match="it contains checkpoints, such as s3://bucket/run/step-1 "
    ):
        sw.load("s3://bucket/run", model=model)
    with pytest.raises(sw.CheckpointError, match="contains a complete checkpoint"):
        sw.save("s3://bucket/run/step-1", model=model)
    s3.objects["other/model.safetensors"] = s3.objects["run/step-1/model.safetensors"]
    with pytest.raises(sw.CheckpointError, match=r"contains model\.safetensors"):
        sw.save("s3://bucket/other", model=model)
    for url in ("s3://bucket/other", "s3://bucket/other/model.safetensors"):
        loaded = sw.load(url, model=model, source="hf")
        assert loaded.bytes_read == 36
    s3.objects["run/step-1/checkpoint.json.partial"] = b""
    del s3.objects["run/step-1/checkpoint.json"]
    with pytest.raises(sw.CheckpointError, match="a save that is unfinished or was killed"):
        sw.load("s3://bucket/run/step-1", model=model)
    with pytest.raises(sw.CheckpointError, match="source='dcp' reads local files only"):
        sw.load("s3://bucket/run", model=model, source="dcp")


def test_an_unknown_protocol_or_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    with pytest.raises(sw.CheckpointError, match=r"nosuch://a/b: .* expected a directory or a URL"):
        sw.save("nosuch://a/b", model=model)
    missing = {"class": "nosuch.FileSystem", "err": "Install nosuch"}
    monkeypatch.setitem(known_implementations, "lacking", missing)
    with pytest.raises(sw.CheckpointError, match=r"Install nosuch \(pip install nosuch\)"):
        sw.latest("lacking://a/b")


# -- retention and export -------------------------------------------------------------------------


def test_retention_in_a_store(s3: FakeS3) -> None:
    model = nn.Linear(2, 3)
    s3.objects["run/notes/mine.txt"] = b"of the user"
    for step in range(9, 15):
        s3.objects[f"run/step-{step}/plots/loss.png"] = b"of the user, too"
        sw.save(f"s3://bucket/run/step-{step}", model=model, retention=sw.Retention(2, every=5))
    kept = sorted({name.split("/")[0] for name in s3.names("run/")})
    assert kept == ["notes", "step-10", "step-13", "step-14"]
    assert "step-14/plots/loss.png" in s3.names("run/")
    assert sw.latest("s3://bucket/run") == "s3://bucket/run/step-14"
    assert sw.latest("s3://bucket/run/notes") is None


def test_export_from_a_store(s3: FakeS3, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    sw.save("s3://bucket/x", model=model)
    assert main(["export", "s3://bucket/x", str(tmp_path / "out")]) == 0
    exported = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert exported == s3.objects["x/model.safetensors"]


# -- on the ranks --------------------------------------------------------------------------------


def _begin(endpoint: str, *places: str | Path) -> None:
    training = _trained()
    with reach(endpoint):
        for place in places:
            sw.save(place, model=training.model, optimizer=training.optimizer, max_file_bytes=SMALL)


def _begin_whole(_endpoint: str, path: Path) -> None:
    training = _trained()
    sw.save(path, model=training.model, optimizer=training.optimizer)


def _trained() -> Training:
    training = Training("tiny")
    for number in range(2):
        training.step(number)
    return training


def _hop(endpoint: str, strategy: str, size: int, source: str, url: str) -> list[str]:
    """Load and save; return the names of the tensors that changed."""
    training = Training("tiny", seed=5, **options_for(strategy))
    again = Training("tiny", seed=6, **options_for(strategy))
    with reach(endpoint):
        loaded = sw.load(source, model=training.model, optimizer=training.optimizer)
        assert loaded.bytes_read == training.own_bytes()
        sw.save(url, model=training.model, optimizer=training.optimizer, max_file_bytes=size)
        sw.load(url, model=again.model, optimizer=again.optimizer)
    return differing(training.bits(), again.bits())


def _write_wide(endpoint: str, strategy: str, url: str) -> None:
    with reach(endpoint):
        save_wide(3613, strategy, url)


def _read_wide(endpoint: str, url: str) -> int:
    with reach(endpoint):
        return load_wide(3613, url)


def _grow(url: str) -> int:
    model = nn.Linear(1024, WIDE // 1024, bias=False)
    sw.fully_shard(model)
    sw.save(f"{url}-first", model=sw.fully_shard(nn.Linear(1024, 16)))  # imports, connections
    # The least of three saves: one save grows by 8 to 24 MiB, as malloc reuses blocks or does not.
    return min(_growth(f"{url}{suffix}", model) for suffix in ("-second", "-third", ""))


def _growth(url: str, model: nn.Module) -> int:
    """The growth of the peak memory during a save."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = _peak()
    sw.save(url, model=model)
    return _peak() - before


def _peak() -> int:
    """The peak memory of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _raise_memory_error(*_: object) -> None:
    raise MemoryError


def _run_out_of_memory(endpoint: str) -> None:
    model = sw.fully_shard(nn.Linear(500, 300))
    with reach(endpoint):
        for _ in range(2):
            fails = dist.get_rank() == 1
            error: type[Exception] = MemoryError if fails else sw.CheckpointError
            with (
                mock.patch.object(
                    upload, "_joined", _raise_memory_error if fails else upload._joined
                ),
                pytest.raises(error),
            ):
                sw.save("s3://bucket/run/step-1", model=model, max_file_bytes=SMALL)


def _fail_and_go_on(endpoint: str) -> None:
    training = Training("gpt")
    training.step()
    before = training.bits()
    values: dict[str, Any] = {"model": training.model, "max_file_bytes": SMALL}
    large = nn.Sequential(nn.Linear(701, 3613), nn.Linear(300, 500), nn.Linear(300, 500))
    sw.fully_shard(large, units=nn.Linear)
    with reach(endpoint):
        url = r"s3://bucket/run/step-\d/model-00003\S*: \w+: .*full"
        with pytest.raises(sw.CheckpointError, match=url):
            sw.save("s3://bucket/run/step-1", **values)
        later = sw.save("s3://bucket/run/step-1", **values, wait=False)
        with pytest.raises(sw.CheckpointError, match=url):
            later.wait()
        with pytest.raises(sw.CheckpointError, match=url):
            sw.save("s3://bucket/run/step-2", model=large, max_file_bytes=700_000)
        gc.collect()  # uploads that were not closed
    assert training.bits() == before
    training.step(1)


def _save_twice(endpoint: str) -> None:
    training = Training("tiny")
    training.step()
    with reach(endpoint):
        sw.save("s3://bucket/run/step-1", model=training.model, max_file_bytes=SMALL)
        later = sw.save(
            "s3://bucket/run/step-2", model=training.model, max_file_bytes=SMALL, wait=False
        )
        training.step(1)
        later.wait()
