"""The safetensors library reads the files, whose bytes depend on the tensors alone."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

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
    found = parse_header("x", content[8 : 8 + length], len(content) - 8 - length)
    assert found["a"][0] == Spec("a", "F32", (2, 3))
    assert found["b"][0] == Spec("b", "BF16", (5,))
    assert {start for _, start in found.values()} == {0, 24}


A = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'
B = '"b": {"dtype": "U8", "shape": [2, 2], "data_offsets": [8, 12]}'


def _with(old: str, new: str) -> str:
    """A header of both, with something else in place of a part of B."""
    return f"{{{A}, {B.replace(old, new)}}}"


MALFORMED = {
    "": "Expecting value",
    "[1]": "list",
    "[" * 100_000: "recursion",
    '{"a": 3}': "a: expected a dtype",
    '{"a": {"dtype": "F32"}}': "a: expected a dtype",
    _with(B, A): "a is listed twice",
    _with("data_offsets", "shape"): "shape is listed twice",
    _with("U8", "F99"): "b has the unknown dtype F99",
    _with("U8", "U16"): "b has data_offsets that do not match its shape",
    _with("[2, 2]", "[2, 3]"): "b has data_offsets that do not match its shape",
    _with("[8, 12]", "[12, 8]"): "b has data_offsets that do not match its shape",
    _with("[8, 12]", "[4, 8]"): "b begins at byte 4, but a ends at byte 8",
    _with("[8, 12]", "[0, 4]"): "a begins at byte 0, but b ends at byte 4",
    _with("[8, 12]", "[9, 13]"): "b begins at byte 9, but a ends at byte 8",
    f"{{{B}}}": "b begins at byte 8, but the header ends at byte 0",
    f"{{{A}}}": "no tensor contains the bytes from 8 to 12",
    "{}": "no tensor contains the bytes from 0 to 12",
    _with('[2, 2], "data_offsets": [8, 12]', '[5], "data_offsets": [8, 13]'): "before b does",
    **{
        _with("[8, 12]", offsets): "b: expected a dtype"
        for offsets in (
            *("[8.0, 12]", "[8, 12.0]", '["8", "12"]', "[-4, 0]", "[8]", "[8, 12, 16]"),
            *("null", "[NaN, 12]", "[8, true]", '"ab"', '{"8": 12}'),
        )
    },
    **{
        _with("[2, 2]", shape): "b: expected a dtype"
        for shape in ("[2.0, 2]", "[-2, -2]", "[4, true]", '"4"', '["4"]', "4", "null", "[[4]]")
    },
    **{_with('"U8"', dtype): "b: expected a dtype" for dtype in ("1", "null", '["U8"]', "{}")},
}


@pytest.mark.parametrize("header", MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_header_is_named(header: str, tmp_path: Path) -> None:
    content = header.encode()
    (tmp_path / "x").write_bytes(len(content).to_bytes(8, "little") + content + bytes(12))
    with pytest.raises(sw.CheckpointError, match=re.escape(MALFORMED[header])) as caught:
        sw.load(tmp_path / "x", model=nn.Linear(1, 2), source="hf")
    assert str(tmp_path / "x") in str(caught.value)


def test_a_header_that_is_cut_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x08", (9).to_bytes(8, "little") + b"{}", b"\xff" * 9):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(sw.CheckpointDamaged, match="x: not a safetensors"):
            sw.load(tmp_path / "x", model=nn.Linear(1, 2), source="hf")


def test_empty_tensors_and_any_order_are_read() -> None:
    header = f'{{{B}, "e": {{"dtype": "F32", "shape": [0, 3], "data_offsets": [8, 8]}}, {A}}}'
    found = parse_header("x", header.encode(), 12)
    assert {name: start for name, (_, start) in found.items()} == {"a": 0, "b": 8, "e": 8}


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for file in ("1.safetensors", "2.safetensors"):
        save_file({"weight": torch.ones(2, 1), f"bias{file[0]}": torch.ones(2)}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"weight": "1.safetensors", "bias2": "2.safetensors"}}')
    with pytest.raises(sw.CheckpointDamaged, match=r"2\.safetensors: weight is also in .*1\.safe"):
        sw.load(tmp_path, model=nn.Linear(1, 2), source="hf")
    index.write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(sw.CheckpointDamaged, match=r"index\.json: .*a is listed twice"):
        sw.load(tmp_path, model=nn.Linear(1, 2), source="hf")


def test_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(sw.CheckpointError, match=r"w: safetensors has no torch\.complex128"):
        spec_of("w", torch.zeros(2, dtype=torch.complex128))
