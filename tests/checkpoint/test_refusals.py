"""Mistakes and malformed input are refused with an error that names what is wrong."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint import write
from shardwise.checkpoint.checksums import crc32
from shardwise.checkpoint.offline import examine, export
from tests.waiting import PATIENCE_SECONDS

# -- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", None, 3, b"x"])
def test_invalid_paths_are_refused(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 3)
    for call in (sw.save, sw.load):
        with pytest.raises(sw.CheckpointError, match="expected the path or URL of a checkpoint"):
            call(path, model=model)
    with pytest.raises(sw.CheckpointError, match="expected the path or URL"):
        sw.latest(path)
    assert list(tmp_path.iterdir()) == []


def test_the_latest_checkpoint_in_a_checkpoint(tmp_path: Path) -> None:
    """With None, a program would start anew."""
    path = tmp_path / "step-1"
    sw.save(path, model=nn.Linear(2, 3))
    with pytest.raises(sw.CheckpointError, match="step-1: is a checkpoint; pass the directory"):
        sw.latest(path)
    sw.save(path / "step-2", model=nn.Linear(2, 3))
    assert sw.latest(path) == path / "step-2"


def test_no_latest_checkpoint_to_load(tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match=r"got None.*sw\.latest found no checkpoint"):
        sw.load(sw.latest(tmp_path), model=nn.Linear(2, 3))  # type: ignore[arg-type]


def test_a_relative_path_and_chdir_during_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gate = threading.Event()
    model = nn.Linear(2, 3)
    write_now = write.write

    def write_later(*args: Any) -> None:
        assert gate.wait(PATIENCE_SECONDS)
        write_now(*args)

    monkeypatch.setattr("shardwise.checkpoint.save.write", write_later)
    pending = sw.save("run/step-1", model=model, wait=False)
    (tmp_path / "elsewhere").mkdir()
    os.chdir("elsewhere")
    gate.set()
    pending.wait()
    assert list(tmp_path.glob("elsewhere/*")) == []
    assert pending.path == tmp_path / "run" / "step-1"
    sw.load(pending.path, model=model)


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", "", ".hidden", "a\\b", "a\0b", "x" * 300])
def test_state_names_become_file_names(name: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {name: torch.ones(2)}
    with pytest.raises(sw.CheckpointError, match="not a valid file name"):
        sw.save(tmp_path / "root" / "x", model=nn.Linear(2, 3), **state)
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_state_names_that_collide_with_split_files(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model-00001-of-00002": torch.ones(2)}
    with pytest.raises(
        sw.CheckpointError, match=r"model-00001-of-00002: .*is also a file of model"
    ):
        sw.save(tmp_path / "x", model=nn.Linear(2, 3), max_file_bytes=16, **state)


# -- values --------------------------------------------------------------------------------------


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"cursor: inner: .*object cannot be saved"),
        (torch.zeros(2, dtype=torch.complex128), r"cursor: inner: .*complex128"),
        (torch.eye(2).to_sparse(), r"cursor: inner: .*sparse"),
        (torch.ones(2, device="meta"), r"cursor: inner: .*meta"),
        (np.array([object()]), r"cursor: inner: .*object"),
        (np.array(["text"]), r"cursor: inner: .*array"),
        (np.datetime64("2026-01-01"), r"cursor: inner: .*date"),
        ({(1, 2): 3}, r"cursor: inner/\(1, 2\): .*tuple"),
        (_endless(), r"cursor: .*nested too deeply"),
    ],
)
def test_values_that_cannot_be_saved_are_named(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match=message):
        sw.save(tmp_path / "x", model=nn.Linear(2, 3), cursor={"inner": value})
    assert not (tmp_path / "x").exists()


def test_a_bare_value_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match=r"^cursor: a set cannot be saved"):
        sw.save(tmp_path / "x", model=nn.Linear(2, 3), cursor={1, 2})
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["extra"] = object()
    with pytest.raises(sw.CheckpointError, match=r"^optimizer: state/weight/extra: a object"):
        sw.save(tmp_path / "x", model=model, optimizer=optimizer)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(sw.CheckpointError, match=r"^model: mask: .*sparse"):
        sw.save(tmp_path / "x", model=model)


# -- optimizers ----------------------------------------------------------------------------------


def _stepped(model: nn.Module, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("strict", [True, False])
def test_states_of_another_optimizer_are_refused(strict: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    sw.save(tmp_path / "x", model=model, optimizer=_stepped(model, torch.optim.AdamW))
    sgd = torch.optim.SGD(model.parameters(), momentum=0.5)
    with pytest.raises(sw.CheckpointError, match=r"(?s)amsgrad, betas.*SGD.*dampening, momentum"):
        sw.load(tmp_path / "x", model=model, optimizer=sgd, strict=strict)
    assert not sgd.state
    assert "betas" not in sgd.param_groups[0]
    sw.save(tmp_path / "y", model=model, optimizer=_stepped(model, torch.optim.SGD, momentum=0.5))
    with pytest.raises(sw.CheckpointError, match=r"momentum_buffer.*AdamW"):
        sw.load(tmp_path / "y", model=model, optimizer=torch.optim.AdamW(model.parameters()))


def test_states_of_a_related_optimizer_or_another_release_are_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    adamw = _stepped(model, torch.optim.AdamW)
    torch.optim.lr_scheduler.LambdaLR(adamw, lambda _: 0.5)  # adds initial_lr
    for missing in ("foreach", "decoupled_weight_decay"):
        adamw.param_groups[0].pop(missing)
    sw.save(tmp_path / "x", model=model, optimizer=adamw)
    adam = torch.optim.Adam(model.parameters())
    sw.load(tmp_path / "x", model=model, optimizer=adam)
    assert torch.equal(adam.state[model.weight]["exp_avg"], adamw.state[model.weight]["exp_avg"])


# -- manifests -----------------------------------------------------------------------------------


def _reseal(path: Path, body: Any) -> None:
    """Write ``body`` as a manifest with a valid checksum."""
    text = json.dumps(body, sort_keys=True, indent=1)
    sealed = {"crc32": f"{crc32(text.encode()):08x}", "manifest": body}
    content = json.dumps(sealed, sort_keys=True, indent=1) + "\n"
    (path / "checkpoint.json").write_text(content, encoding="utf-8")


def _component(body: Any) -> Any:
    return body["components"]["model"]


def _file(body: Any) -> Any:
    return _component(body)["files"]["model.safetensors"]


def _set(container: Any, key: Any, value: Any) -> None:
    container[key] = value


MALFORMED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no components": (lambda b: b.pop("components"), "components"),
    "no version": (lambda b: b.pop("version"), "version"),
    "a list": (lambda b: b.clear(), "version"),
    "components are a list": (lambda b: _set(b, "components", []), "components"),
    "no kind": (lambda b: _component(b).pop("kind"), "model.kind"),
    "an unknown kind": (lambda b: _set(_component(b), "kind", "x"), "model.kind"),
    "negative bytes": (lambda b: _set(_file(b), "bytes", -1), "bytes"),
    "other bytes": (lambda b: _set(_file(b), "bytes", 7), "bytes"),
    "text for bytes": (lambda b: _set(_file(b), "bytes", "7"), "bytes"),
    "a checksum of the header": (lambda b: _set(_file(b), "head_crc32", "00000000"), "head_crc32"),
    "no checksum of the header": (lambda b: _set(_file(b), "head_crc32", "zz"), "head_crc32"),
    "a short tensor": (lambda b: _file(b)["tensors"][0].pop(), "tensors"),
    "a dtype": (lambda b: _set(_file(b)["tensors"][0], 1, "F99"), "F99"),
    "a shape": (lambda b: _set(_file(b)["tensors"][0], 2, [-1]), "tensors"),
    "text in a shape": (lambda b: _set(_file(b)["tensors"][0], 2, ["3"]), "tensors"),
    "a bool in a shape": (lambda b: _set(_file(b)["tensors"][0], 2, [3, True]), "tensors"),
    "a float in a shape": (lambda b: _set(_file(b)["tensors"][0], 2, [3.0, 2.0]), "tensors"),
    "a number for a name": (lambda b: _set(_file(b)["tensors"][0], 0, 3), "tensors"),
    "text for groups": (
        lambda b: _set(b["components"]["optimizer"]["tree"], "param_groups", "ab"),
        "param_groups",
    ),
    "text for parameters": (
        lambda b: _set(b["components"]["optimizer"]["tree"]["param_groups"][0], "params", "ab"),
        "params",
    ),
    "a number for a parameter": (
        lambda b: _set(b["components"]["optimizer"]["tree"]["param_groups"][0], "params", [1]),
        "params",
    ),
    "no checksums": (lambda b: _set(_file(b)["tensors"][0], 3, ""), "checksums"),
    "no number": (lambda b: _set(_file(b)["tensors"][0], 3, "xyz"), "checksum"),
    "a tensor twice": (
        lambda b: _file(b)["tensors"].append(_file(b)["tensors"][0]),
        "listed twice",
    ),
    "an alias of nothing": (lambda b: _set(_component(b), "aliases", {"a": "b"}), "b"),
    "another file": (
        lambda b: _set(_component(b), "files", {"../evil.safetensors": _file(b)}),
        "evil",
    ),
    "an absolute file": (
        lambda b: _set(_component(b), "files", {"/etc/passwd": _file(b)}),
        "passwd",
    ),
    "another whole file": (
        lambda b: _set(b, "others", {"../x": {"bytes": 0, "crc32": "00000000"}}),
        r"\.\./x",
    ),
    "negative bytes of a whole file": (
        lambda b: _set(b, "others", {"x.json": {"bytes": -1, "crc32": "00000000"}}),
        "bytes",
    ),
    "an unknown tensor in a tree": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$tensor": "nothing"}),
        "nothing",
    ),
    "an unknown mark in a tree": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$set": [1]}),
        "set",
    ),
    "a list for a tensor's name": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$tensor": [1]}),
        "cursor",
    ),
    "a bad dict in a tree": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$dict": [1]}),
        "cursor",
    ),
    "no dtype in a tree": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$dtype": "nn"}),
        "cursor",
    ),
    "a deque of a negative size": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$deque": [-1, []]}),
        "cursor|maxlen",
    ),
    "no list in a tree": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$dict": 3}),
        "cursor",
    ),
    "a bad key in a tree": (
        lambda b: _set(b["components"]["cursor"], "tree", {"$dict": [[[], 1]]}),
        "cursor",
    ),
    "an optimizer without groups": (
        lambda b: b["components"]["optimizer"]["tree"].pop("param_groups"),
        "param_groups",
    ),
    "an optimizer without states": (
        lambda b: _set(b["components"]["optimizer"], "tree", None),
        "optimizer",
    ),
    "a list of other states": (
        lambda b: _set(b["components"]["optimizer"]["tree"], "other", [1]),
        "other",
    ),
    "an optimizer whose groups have no parameters": (
        lambda b: b["components"]["optimizer"]["tree"]["param_groups"][0].pop("params"),
        "params",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_manifest_is_named(case: str, tmp_path: Path) -> None:
    damage, named = MALFORMED[case]
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    path = tmp_path / "x"
    sw.save(path, model=model, optimizer=optimizer, cursor={"at": torch.ones(1)})
    body = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))["manifest"]
    damage(body)
    _reseal(path, body)
    with pytest.raises(sw.CheckpointDamaged, match=named):
        sw.load(path, model=model, optimizer=optimizer)
    assert examine(path), "doctor found nothing"
    with pytest.raises(sw.CheckpointError, match=named):
        export(path, tmp_path / "out", "torch")


OPTIONS: dict[str, tuple[Any, ...]] = {
    "lr": ("fast", True, None, [0.1], {"a": 1}, {"$tuple": [0.1]}),
    "betas": (0.9, "ab", {"$tuple": [0.9]}, {"$tuple": [0.9, "x"]}, {"$tuple": [0.9, 0.9, 0.9]}),
    "weight_decay": ("0.1", None, False),
    "amsgrad": (1, "yes", 0.0),
    "foreach": ("no",),
    "initial_lr": ("fast",),
}


@pytest.mark.parametrize(("key", "value"), [(key, x) for key in OPTIONS for x in OPTIONS[key]])
def test_an_option_of_another_type_is_named(key: str, value: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    sw.save(tmp_path / "x", model=model, optimizer=optimizer)
    body = json.loads((tmp_path / "x" / "checkpoint.json").read_text(encoding="utf-8"))["manifest"]
    body["components"]["optimizer"]["tree"]["param_groups"][0][key] = value
    _reseal(tmp_path / "x", body)
    before = repr(optimizer.param_groups)
    with pytest.raises(
        sw.CheckpointError, match=rf"x/checkpoint\.json: optimizer: param_groups\[0\]\['{key}'\]"
    ):
        sw.load(tmp_path / "x", model=model, optimizer=optimizer)
    assert repr(optimizer.param_groups) == before


def test_options_of_an_equal_kind_are_loaded(tmp_path: Path) -> None:
    """A number may be a tensor or an int, and options that choose a kernel may be None."""
    model = nn.Linear(2, 3)
    saved = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), weight_decay=1)
    saved.param_groups[0].update(initial_lr=0.25, note="kept")
    sw.save(tmp_path / "x", model=model, optimizer=saved)
    loaded = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    sw.load(tmp_path / "x", model=model, optimizer=loaded)
    group = loaded.param_groups[0]
    found = [group[key] for key in ("lr", "weight_decay", "foreach", "initial_lr", "note")]
    assert found == [0.5, 1, None, 0.25, "kept"]


@pytest.mark.parametrize("opening", ["[", '{"crc32": "00000000", "manifest": [', '{"a":'])
def test_a_deeply_nested_manifest_is_damage(opening: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    sw.save(tmp_path / "x", model=model)
    (tmp_path / "x" / "checkpoint.json").write_text(opening * 100_000, encoding="utf-8")
    with pytest.raises(sw.CheckpointDamaged, match=r"checkpoint\.json: not a manifest"):
        sw.load(tmp_path / "x", model=model)
    assert "not a manifest" in examine(tmp_path / "x")[0]


def test_files_of_hugging_face_stay_in_their_directory(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    save_file(dict(model.state_dict()), tmp_path / "outside.safetensors")
    (tmp_path / "x").mkdir()
    index = tmp_path / "x" / "model.safetensors.index.json"
    contents: list[Any] = [
        {"weight_map": dict.fromkeys(model.state_dict(), "../outside.safetensors")},
        {"weight_map": {"weight": 3}},
        {"weight_map": 3},
        {},
        [],
    ]
    for content in contents:
        index.write_text(json.dumps(content), encoding="utf-8")
        with pytest.raises(sw.CheckpointDamaged, match=r"index\.json"):
            sw.load(tmp_path / "x", model=model, source="hf")


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, whose states are not in its own ``state``."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Slow(Wrapper):
    """Has states of its own as well, and other keys, as pytorch_optimizer's `Lookahead`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["slow"] = parameter.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {"slow": super(Wrapper, self).state_dict(), "inner": self.inner.state_dict()}


class Sharing(Wrapper):
    """Shares its state, as accelerate's `AcceleratedOptimizer`."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.state = inner.state


@pytest.mark.parametrize("kind", [Wrapper, Slow])
def test_optimizers_that_wrap_another_one_are_refused(kind: type[Wrapper], tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = kind(torch.optim.Adam(model.parameters()))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    with pytest.raises(
        sw.CheckpointError, match=rf"{kind.__name__}\.state_dict\(\) has states .*wraps"
    ):
        sw.save(tmp_path / "wrapper", model=model, optimizer=optimizer)
    sw.save(tmp_path / "inner", model=model, optimizer=optimizer.inner)
    with pytest.raises(sw.CheckpointError, match="wraps"):
        sw.load(tmp_path / "inner", model=model, optimizer=optimizer)


@pytest.mark.parametrize("kind", [Wrapper, Slow, Sharing])
def test_wrappers_of_optimizers_without_other_states_are_saved(
    kind: type[Wrapper], tmp_path: Path
) -> None:
    model = nn.Linear(2, 3)
    momentum = 0.9 if kind is Sharing else 0.0
    optimizer = kind(torch.optim.SGD(model.parameters(), momentum=momentum))
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    sw.save(tmp_path / "x", model=model, optimizer=optimizer)
    sw.load(tmp_path / "x", model=model, optimizer=optimizer)
