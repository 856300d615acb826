"""Mismatches are listed, and only what was selected is loaded."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.matching import LoadReport, OptimizerStates, Selection
from shardwise.checkpoint.read import open_checkpoint
from shardwise.checkpoint.stores import folder_at
from tests.checkpoint.training import Training, differing
from tests.models import Block, Gpt, GptBlock, Stack, build
from tests.ranks import on_ranks, run_on
from tests.runtime.one_process import full


def test_strict_lists_missing_and_unexpected_tensors(tmp_path: Path) -> None:
    sw.save(tmp_path / "x", model=Stack(3))
    deeper = Stack(4)
    before = {name: x.clone() for name, x in deeper.state_dict().items()}
    deeper.extra = nn.Linear(2, 2)
    with pytest.raises(sw.CheckpointError) as caught:
        sw.load(tmp_path / "x", model=deeper)
    assert "missing in the checkpoint: 6\n  layers.3.up.weight" in str(caught.value)
    assert "extra.bias" in str(caught.value)
    assert all(torch.equal(deeper.state_dict()[name], x) for name, x in before.items())
    with pytest.raises(sw.CheckpointError, match=r"unexpected in the checkpoint: 4\n  layers\.2"):
        sw.load(tmp_path / "x", model=Stack(2))


def test_only_selected_tensors_are_loaded(tmp_path: Path) -> None:
    whole, other = Stack(3), Stack(4)
    sw.save(tmp_path / "x", model=whole)
    kept = other.layers[0].up.weight.clone()  # type: ignore[union-attr, operator]
    loaded = sw.load(tmp_path / "x", model=other, only=["layers.[12].*"])
    assert not str(loaded.report)
    assert torch.equal(other.layers[0].up.weight, kept)  # type: ignore[union-attr, arg-type]
    assert torch.equal(other.layers[2].up.weight, whole.layers[2].up.weight)  # type: ignore[union-attr, arg-type]
    loaded = sw.load(tmp_path / "x", model=other, strict=False)
    assert len(loaded.report.missing) == 4
    assert torch.equal(other.layers[0].up.weight, whole.layers[0].up.weight)  # type: ignore[union-attr, arg-type]
    with pytest.raises(sw.CheckpointError, match="missing in the checkpoint"):
        sw.load(tmp_path / "x", model=other, only=["layers.3.*"])
    for strict in (True, False):
        with pytest.raises(sw.CheckpointError, match=r"only=.*a tensor with the name 'blocks\.\*'"):
            sw.load(tmp_path / "x", model=other, only=["layers.1.*", "blocks.*"], strict=strict)


def test_other_shapes_and_narrower_dtypes_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    sw.save(tmp_path / "x", model=model)
    with pytest.raises(sw.CheckpointError, match=r"weight: expected \(3, 5\), found \(3, 4\)"):
        sw.load(tmp_path / "x", model=nn.Linear(5, 3), strict=False)
    wider = nn.Linear(4, 3, dtype=torch.float64)
    report = sw.load(tmp_path / "x", model=wider).report
    assert report.retyped == [
        "weight: expected torch.float64, found torch.float32",
        "bias: expected torch.float64, found torch.float32",
    ]
    assert torch.equal(wider.weight, model.weight.double())
    narrower = nn.Linear(4, 3, dtype=torch.bfloat16)
    with pytest.raises(sw.CheckpointError, match="would be rounded"):
        sw.load(tmp_path / "x", model=narrower)
    sw.load(tmp_path / "x", model=narrower, cast=True)
    assert torch.equal(narrower.weight, model.weight.bfloat16())


@pytest.mark.parametrize(
    ("saved", "own", "is_exact"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.float8_e5m2, torch.float8_e4m3fn, False),
        (torch.float16, torch.bfloat16, False),
        (torch.int64, torch.float32, False),
        (torch.int16, torch.float32, True),
        (torch.uint8, torch.int8, False),
        (torch.uint32, torch.int64, True),
        (torch.bool, torch.float16, True),
        (torch.float32, torch.complex64, True),
        (torch.float64, torch.complex64, False),
    ],
)
def test_conversions_that_may_round_are_refused(
    saved: torch.dtype, own: torch.dtype, is_exact: bool, tmp_path: Path
) -> None:
    save_file({"x": torch.ones(3).to(saved)}, tmp_path / "model.safetensors")
    model, own_tensor = nn.Module(), torch.zeros(3).to(own)
    model.register_buffer("x", own_tensor)
    if not is_exact:
        with pytest.raises(sw.CheckpointError, match=r"would be rounded.*\n  x: "):
            sw.load(tmp_path, model=model, source="hf")
    report = sw.load(tmp_path, model=model, source="hf", cast=not is_exact).report
    assert (len(report.retyped), len(report.narrowed)) == (is_exact, not is_exact)
    assert own_tensor.to(torch.complex64).tolist() == [1, 1, 1]


@pytest.mark.parametrize("source", ["shardwise", "torch"])
def test_other_values_of_a_tied_tensor_are_named(source: Any, tmp_path: Path) -> None:
    tied, untied = Gpt(), Gpt()
    untied.head.weight = nn.Parameter(untied.embedding.weight.detach() + 1)
    for number in range(2):
        path = tmp_path / f"{number}"
        if source == "torch":
            torch.save({k: x.clone() for k, x in untied.state_dict().items()}, path)
        else:
            sw.save(path, model=untied)
        if number == 0:
            with pytest.raises(sw.CheckpointError, match=r"unexpected.*: 1\n.*tied to .* in the"):
                sw.load(path, model=tied, source=source)
            untied.head.weight.data.copy_(untied.embedding.weight)
    assert not str(sw.load(path, model=tied, source=source).report)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    sw.save(tmp_path / "x", model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(sw.CheckpointError, match=r"unexpected.*\n  bias in the optimizer"):
        sw.load(tmp_path / "x", model=model, optimizer=torch.optim.SGD([model.weight]))
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    swapped = torch.optim.SGD(groups)
    with pytest.raises(
        sw.CheckpointError, match=r"param_groups: expected 2 groups of 1, 1, found 1"
    ):
        sw.load(tmp_path / "x", model=model, optimizer=swapped)
    other = nn.Linear(2, 2)
    both = nn.ModuleDict({"one": model, "other": other})
    optimizer = torch.optim.SGD(both.parameters())
    with pytest.raises(sw.CheckpointError, match=r"is not one of the model's.*nn\.ModuleDict"):
        sw.save(tmp_path / "y", model=model, optimizer=optimizer, other=other)
    sw.save(tmp_path / "y", model=both, optimizer=optimizer)
    with pytest.raises(
        sw.CheckpointError, match="scheduler: not in the checkpoint, which contains"
    ):
        sw.load(tmp_path / "x", model=model, scheduler=1)


@on_ranks(2)
def test_save_and_load_inside_gathered_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    training = Training("stack", units=Block)
    with (
        sw.gathered(training.model),
        pytest.raises(sw.CheckpointError, match=r"first\.weight is gathered"),
    ):
        sw.save(path, model=training.model)
    sw.save(path, model=training.model)
    before = training.bits()
    with sw.gathered(training.model), pytest.raises(sw.CheckpointError, match="is gathered"):
        sw.load(path, model=training.model)
    assert differing(training.bits(), before) == []


def test_parameters_that_are_not_sharded_are_saved_and_loaded(tmp_path: Path) -> None:
    model, other = Stack(2), Stack(2)
    for one in (model, other):
        ignored = {one.layers[0].up.weight}  # type: ignore[union-attr]
        sw.fully_shard(one, units=Block, ignored_params=ignored)  # type: ignore[arg-type]
    sw.save(tmp_path / "x", model=model)
    assert not str(sw.load(tmp_path / "x", model=other).report)
    loaded = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(full(loaded[name]), full(parameter)), name
    with sw.gathered(model), pytest.raises(sw.CheckpointError, match="is gathered"):
        sw.save(tmp_path / "y", model=model)


def test_the_weights_are_a_hugging_face_checkpoint(tmp_path: Path) -> None:
    model = Gpt()
    sw.save(tmp_path / "x", model=model)
    read = load_file(tmp_path / "x" / "model.safetensors")
    assert "head.weight" not in read, "tied weights were written twice"
    assert set(read) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(read[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hugging_face_checkpoints_are_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    """Several files, a tied weight under its other name, 16 bits to float32, meta device."""
    torch.manual_seed(4)
    tensors = {name: x.to(dtype).clone() for name, x in Gpt().state_dict().items()}
    del tensors["embedding.weight"]  # head.weight is the same
    names = sorted(tensors)
    _write_hf(tmp_path, {"a": names[:5], "b": names[5:]}, tensors)
    for ranks in (1, 3):
        run_on(ranks, _load_hf, tmp_path, tensors)
    with pytest.raises(sw.CheckpointError, match=r"expected model\.safetensors"):
        sw.load(tmp_path / "nothing", model=Gpt(), source="hf")


def _write_hf(path: Path, files: dict[str, list[str]], tensors: dict[str, Any]) -> None:
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, path / f"{file}.safetensors")
    where = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    index = json.dumps({"metadata": {}, "weight_map": where})
    (path / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def _load_hf(path: Path, tensors: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Gpt()
    sw.fully_shard(model, units=GptBlock, init=sw.Initialization(init_fn=_zeros))
    loaded = sw.load(path, model=model, source="hf")
    itemsize = next(iter(tensors.values())).itemsize
    shards = [x for x in model.parameters() if isinstance(x, sw.ShardedTensor)]
    held = sum(len(x.sharding.run) for x in shards)
    assert loaded.bytes_read == held * itemsize, "read more than its shards"
    for name, parameter in model.named_parameters():
        expected = tensors["head.weight" if name == "embedding.weight" else name]
        assert parameter.dtype is torch.float32
        assert torch.equal(parameter.full_tensor(), expected.float()), name  # type: ignore[attr-defined]


def _zeros(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def test_options_are_loaded_although_other_parameters_are_new(tmp_path: Path) -> None:
    saved, deeper = Stack(2), Stack(3)
    optimizer = torch.optim.SGD(saved.parameters(), lr=0.0625)
    sw.save(tmp_path / "x", model=saved, optimizer=optimizer)
    loaded = torch.optim.SGD(deeper.parameters(), lr=1.0)
    loaded.add_param_group({"params": [], "lr": 0.75})
    sw.load(tmp_path / "x", model=deeper, optimizer=loaded, strict=False)
    assert [group["lr"] for group in loaded.param_groups] == [0.0625, 0.75]
    in_two = torch.optim.SGD(saved.layers[0].parameters(), lr=0.0625)
    in_two.add_param_group({"params": saved.layers[1].parameters(), "lr": 0.5})
    sw.save(tmp_path / "y", model=saved, optimizer=in_two)
    in_one = torch.optim.SGD(saved.layers.parameters(), lr=1.0)
    lost = r"options of param_groups\[0\]: expected the .* of one saved group, found those of 2"
    with pytest.raises(sw.CheckpointError, match=lost):
        sw.load(tmp_path / "y", model=saved, optimizer=in_one, only=["layers.*"])
    report = sw.load(tmp_path / "y", model=saved, optimizer=in_one, strict=False).report
    assert "options of param_groups[0]" in str(report)
    assert in_one.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize("saved_fused", [True, False])
def test_steps_are_on_the_device_that_the_loaded_options_need(
    saved_fused: bool, tmp_path: Path
) -> None:
    model = nn.Linear(2, 3)
    saved = torch.optim.AdamW(model.parameters(), fused=saved_fused)
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    sw.save(tmp_path / "x", model=model, optimizer=saved)
    model.to("meta")  # in place of an accelerator
    own = torch.optim.AdamW(model.parameters(), capturable=not saved_fused)
    with contextlib.ExitStack() as cleanup:
        component = open_checkpoint(folder_at(tmp_path / "x"), cleanup).components["optimizer"]
        states = OptimizerStates(own, model, component, Selection(), LoadReport())
    devices = {target.name: target.tensor.device.type for target in states.targets}
    assert devices["state/weight/exp_avg"] == "meta"
    assert devices["state/weight/step"] == ("meta" if saved_fused else "cpu")


class _Scaled(nn.Linear):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(2, 3)
        self.scale = nn.Parameter(torch.full(shape, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class _Numbered(torch.optim.NAdam):
    """Keeps a number in a tensor of shape [1], as QHAdam and AdaNorm of pytorch_optimizer do."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state["weight"] = torch.cat([state.get("weight", torch.ones(1)) / 2])
        return loss


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, _Numbered])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_states_of_a_parameter_of_one_element_that_are_numbers_are_not_sharded(
    kind: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    models = [sw.fully_shard(_Scaled(shape)) for _ in range(2)]
    saved, loaded = [kind(model.parameters(), lr=0.01) for model in models]
    step(models[0], saved)
    sw.save(tmp_path / "x", model=models[0], optimizer=saved)
    sw.load(tmp_path / "x", model=models[1], optimizer=loaded)
    states = [one.state[model.scale] for one, model in zip((saved, loaded), models, strict=True)]
    assert {k: type(x) for k, x in states[0].items()} == {k: type(x) for k, x in states[1].items()}
    for model, optimizer in zip(models, (saved, loaded), strict=True):
        step(model, optimizer)
    assert torch.equal(full(models[1].scale), full(models[0].scale))


class _Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift) ** 2


def test_states_that_are_numbers_are_not_sharded_if_all_parameters_have_one_element(
    tmp_path: Path,
) -> None:
    models = [sw.fully_shard(_Scalars()) for _ in range(2)]
    optimizers = [torch.optim.NAdam(model.parameters(), lr=0.01) for model in models]
    models[0](torch.ones(2)).sum().backward()
    optimizers[0].step()
    sw.save(tmp_path / "x", model=models[0], optimizer=optimizers[0])
    sw.load(tmp_path / "x", model=models[1], optimizer=optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    for stepped, loaded in zip(*(model.parameters() for model in models), strict=True):
        assert stepped.equal(loaded)


def test_an_optimizer_that_was_built_before_sharding_is_saved_and_loaded(tmp_path: Path) -> None:
    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        return sw.fully_shard(model), optimizer

    model, saved = trained()
    sw.save(tmp_path / "before", model=model, optimizer=saved)
    model(torch.ones(1, 2)).sum().backward()
    saved.step()
    sw.save(tmp_path / "after", model=model, optimizer=saved)
    model, loaded = trained()
    sw.load(tmp_path / "before", model=model, optimizer=loaded)
    model, loaded = trained()
    sw.load(tmp_path / "after", model=model, optimizer=loaded)
    states, expected = loaded.state[model.weight], next(iter(saved.state.values()))  # type: ignore[index]
    assert torch.equal(full(states["exp_avg"]), full(expected["exp_avg"]))
    model(torch.ones(1, 2)).sum().backward()
    loaded.step()
    assert loaded.state[model.weight]["step"] == 2  # type: ignore[index]


def test_tensors_in_param_groups_are_loaded_on_the_cpu(tmp_path: Path) -> None:
    def trained(rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(rate), capturable=False)
        return model, optimizer

    model, optimizer = trained(0.5)
    sw.save(tmp_path / "x", model=model, optimizer=optimizer)
    model, optimizer = trained(0.1)
    with torch.device("meta"):  # torch's default device
        sw.load(tmp_path / "x", model=model, optimizer=optimizer)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))


class _Counting(torch.optim.SGD):
    """Keeps the number of its steps in ``state["k"]``, as MADGRAD does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)
        self.state["k"] = torch.tensor([0])  # type: ignore[index]


def test_states_that_belong_to_no_parameter_are_loaded(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    saved, loaded = _Counting(model.parameters()), _Counting(model.parameters())
    saved.state["k"] += 3  # type: ignore[index]
    sw.save(tmp_path / "x", model=model, optimizer=saved)
    sw.load(tmp_path / "x", model=model, optimizer=loaded)
    assert loaded.state["k"].tolist() == [3]  # type: ignore[index]
    sw.save(tmp_path / "y", model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(sw.CheckpointError, match=r"missing.*\n  k in the optimizer"):
        sw.load(tmp_path / "y", model=model, optimizer=loaded)
    saved.state[(1, 2)] = 3  # type: ignore[index]
    with pytest.raises(sw.CheckpointError, match=r"optimizer: other/\(1, 2\): a tuple"):
        sw.save(tmp_path / "z", model=model, optimizer=saved)


class _Flattened(torch.optim.SGD):
    """Keeps the first values, flattened, and means over rows, as Prodigy and Adafactor do."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["first"] = parameter.flatten()[:].clone()
            state["row"] = state.get("row", 0) + parameter.grad.square().mean(-1, keepdim=True)
            update = parameter.grad / (1 + state["row"].sqrt())
            distance = torch.dot(parameter.grad.flatten(), state["first"] - parameter.flatten())
            parameter.sub_(update, alpha=0.1 + distance.abs().item())


@on_ranks(1, 3)
def test_flattened_states_are_sharded_and_means_over_rows_are_not(tmp_path: Path) -> None:
    models = [build("stack") for _ in range(3)]
    for model in models[1:]:
        sw.fully_shard(model, units=Block)
    optimizers = [_Flattened(model.parameters(), lr=0.1) for model in models]
    _assert_resumes(models, optimizers, torch.ones(2, 6).double() / 3, tmp_path / "x")
    saved = optimizers[1].state.values()  # the loaded ones had the same types
    assert all(isinstance(x["first"], sw.ShardedTensor) for x in saved)
    assert all(type(x["row"]) is Tensor for x in saved)


def _assert_resumes(
    models: Sequence[nn.Module], optimizers: Sequence[Any], inputs: Tensor, path: Path
) -> None:
    """Step the first two, give the state of the second to the third, and step that as the first.

    The first model is whole, the others are sharded. Loaded states have the types of saved ones.
    """

    def step(*numbers: int) -> None:
        for number in numbers:
            models[number](inputs).square().mean().backward()
            optimizers[number].step()
            optimizers[number].zero_grad()

    step(0, 1)
    sw.save(path, model=models[1], optimizer=optimizers[1])
    sw.load(path, model=models[2], optimizer=optimizers[2])
    for parameters in zip(models[1].parameters(), models[2].parameters(), strict=True):
        saved, loaded = (o.state[p] for o, p in zip(optimizers[1:], parameters, strict=True))
        assert {k: type(x) for k, x in saved.items()} == {k: type(x) for k, x in loaded.items()}
    step(0, 2)
    for one, other in zip(models[2].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(full(one), other.detach(), rtol=1e-12, atol=1e-12)


class _Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 3, 2))
        self.column = nn.Parameter(torch.linspace(0.5, 1, 4).view(4, 1))
        self.shift = nn.Parameter(torch.zeros(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gain = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("bi,oij->bo", x + self.shift, self.kernel)
        return mixed @ self.column * self.scale * self.gain


class _Reshaped(torch.optim.SGD):
    """Has states in other shapes than their parameters, and a number for the value of zeros."""

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad
            if not state:
                state["sum"] = torch.zeros_like(parameter.flatten())
                state["rows"] = (
                    torch.zeros_like(parameter.view(len(parameter), -1)) if parameter.ndim else None
                )
                state["first"] = parameter.flatten().clone() if parameter.any() else torch.zeros(())
            state["sum"] += gradient.flatten()
            if parameter.ndim:
                state["rows"] += gradient.view(len(parameter), -1)
            if parameter.ndim > 1:
                state["mean"] = state.get("mean", 0) + gradient.square().flatten(1).mean(1)
            moved = (parameter.flatten() - state["first"]).norm()
            parameter.sub_(state["sum"].view_as(parameter), alpha=0.1 + moved.item())


@on_ranks(1, 3)
def test_reshaped_states_are_sharded_also_those_of_parameters_of_one_element(
    tmp_path: Path,
) -> None:
    models = [_Shapes().double() for _ in range(3)]
    for model in models[1:]:
        sw.fully_shard(model)
    optimizers = [_Reshaped(model.parameters(), lr=0.1) for model in models]
    _assert_resumes(models, optimizers, torch.ones(2, 3).double() / 3, tmp_path / "x")
