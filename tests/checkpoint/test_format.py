"""The safetensors library reads the files, whose bytes depend on the tensors alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardwise as sw
from shardwise.checkpoint.format import DTYPES, Spec, index_of, pack, parse_header, spec_of


def test_the_library_reads_every_dtype(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(3, dtype=torch.uint8).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(7.0), "nothing": torch.empty(0, 4)}
    (file,) = pack("model", [spec_of(*item) for item in tensors.items()], 10**9)
    content = file.head + b"".join(
        tensors[spec.name].reshape(-1).view(torch.uint8).numpy().tobytes() for spec in file.specs
    )
    assert len(content) == file.num_bytes
    (tmp_path / file.name).write_bytes(content)
    read = load_file(tmp_path / file.name)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].to(torch.complex64), tensor.to(torch.complex64)), name
        assert file.offsets[name] % tensor.itemsize == 0, "not aligned"


def test_tensors_are_assigned_to_files_by_name() -> None:
    specs = [
        Spec(name, "F32", (size,)) for name, size in zip("cabde", (10, 10, 20, 1, 30), strict=True)
    ]
    files = pack("model", specs, 100)
    assert [[spec.name for spec in file.specs] for file in files] == [
        ["a"],
        ["b"],
        ["c", "d"],
        ["e"],
    ]
    assert [file.name for file in files][:1] == ["model-00001-of-00004.safetensors"]
    index = json.loads(index_of(files))
    assert index["weight_map"]["d"] == "model-00003-of-00004.safetensors"
    assert index["metadata"]["total_size"] == 71 * 4
    assert pack("model", reversed(specs), 100) == files


def test_headers_of_the_library_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}, tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    found = parse_header("x", content[8 : 8 + length])
    assert found["a"][0] == Spec("a", "F32", (2, 3))
    assert found["b"][0] == Spec("b", "BF16", (5,))
    assert {start for _, start in found.values()} == {0, 24}


def test_malformed_headers_are_named() -> None:
    for header in (b"", b"[1]", b'{"a": {"dtype": "F32"}}', b'{"a": 3}'):
        with pytest.raises(sw.CheckpointDamaged, match="file1"):
            parse_header("file1", header)
    lying = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    with pytest.raises(
        sw.CheckpointDamaged, match="a has data_offsets that do not match its shape"
    ):
        parse_header("file1", lying)
    with pytest.raises(sw.CheckpointError, match="F99"):
        parse_header("file1", lying.replace(b"F32", b"F99"))


def test_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(sw.CheckpointError, match=r"w: safetensors has no torch\.complex128"):
        spec_of("w", torch.zeros(2, dtype=torch.complex128))
