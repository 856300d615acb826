"""`sw.verify` checks any engine: it accepts torch's, and names planted faults and their causes."""

from functools import partial
from itertools import product
from operator import mul
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from shardwise.cli import main
from shardwise.verification.engines import ENGINES
from shardwise.verification.families import FAMILIES
from tests.ranks import on_ranks
from tests.verification.judging import judge

NAME = "blocks.1.mlp.0.weight"
# Without "moe": its ranks use different parameters, and FSDP2 cannot train it.
TENSOR_PARALLEL = ["gpt", "conv", "encoder-decoder", "lora", *FAMILIES]


@on_ranks(2)
@pytest.mark.parametrize("model", ["gpt", pytest.param("lora", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", list(ENGINES))
def test_engines_are_right(name: str, model: str) -> None:
    found = judge(model, engine=ENGINES[name])
    assert found.ok, found.explanation
    assert [one.strategy for one in found.comparisons] == [name]


@pytest.mark.thorough
@on_ranks(2)
@pytest.mark.parametrize("model", list(FAMILIES))
@pytest.mark.parametrize("name", list(ENGINES))
def test_there_is_no_false_alarm_on_hugging_face_models(name: str, model: str) -> None:
    found = judge(model, engine=ENGINES[name])
    assert found.ok, found.explanation


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("fsdp2", TENSOR_PARALLEL[0]),  # the next test covers shardwise with tensor parallelism
        *(
            pytest.param(name, model, marks=pytest.mark.thorough)
            for name, model in product(ENGINES, TENSOR_PARALLEL)
            if (name, model) != ("fsdp2", TENSOR_PARALLEL[0])
        ),
    ],
)
def test_engines_with_tensor_parallelism_are_right(name: str, model: str) -> None:
    divided: list[nn.Parameter] = []

    def engine(model: nn.Module, mesh: DeviceMesh | None, units: Any) -> Any:
        made = ENGINES[name](model, mesh, units)
        divided.extend(p for p in model.parameters() if name != "ddp" and p.device_mesh.ndim == 2)  # type: ignore[attr-defined]
        return made

    found = judge(model, engine=engine, mesh=dp2_tp2())
    assert found.ok, found.explanation
    # The only nn.Linear in gpt2 is its tied head, which is not divided.
    assert bool(divided) == (name != "ddp" and model != "gpt2")


def dp2_tp2() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def in_tensors(model: nn.Module, mesh: DeviceMesh | None, _units: Any) -> nn.Module:
    assert mesh is not None
    for block in model.blocks:  # type: ignore[union-attr]
        styles = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], styles)
    sw.fully_shard(model, mesh=mesh["dp"])
    assert model.get_parameter(NAME).device_mesh.ndim == 2  # type: ignore[attr-defined]
    return model


@on_ranks(4)
def test_a_function_makes_a_model_parallel() -> None:
    found = judge("gpt", engine=in_tensors, mesh=dp2_tp2())
    assert found.ok, found.explanation
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with pytest.raises(sw.PlanError, match="pass engine=FILE:FUNCTION"):
        judge("gpt", engine=ENGINES["fsdp2"], mesh=mesh)


def _changed(change: Any) -> Any:
    def engine(model: nn.Module, mesh: DeviceMesh | None, units: Any) -> nn.Module:
        model = ENGINES["ddp"](model, mesh, units)
        inner: Any = model.module
        inner.get_parameter(NAME).register_hook(change)
        return model

    return engine


def _dropped(gradient: Tensor) -> Tensor:
    """Drop the gradient of all ranks but the first; the hook runs before DDP's reduction."""
    return gradient * (dist.get_rank() == 0)


def _weighted(gradient: Tensor) -> Tensor:
    return gradient * (1.5 if dist.get_rank() == 0 else 0.5)


@on_ranks(2)
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (
            partial(mul, 2),
            (
                "is 2 times what is expected; possible causes: a sum over the 2 data-parallel "
                "ranks where a mean is expected, losses of 2 micro-batches that are not divided by "
                "their number, a wrong divisor, or a loss scale"
            ),
        ),
        (
            partial(mul, 0.5),
            (
                "is 0.5 times .*; possible causes: a gradient that is divided twice by the 2 "
                "data-parallel ranks, one that is divided but not summed, a wrong divisor, or"
            ),
        ),
        (partial(mul, 0.3), "is 0.3 times .*; possible causes: a wrong divisor, or a loss scale"),
        (partial(mul, 0), "is zero"),
        (
            _dropped,
            "lacks part 1 of the batch; possible causes: a rank whose .*, or a dropped micro",
        ),
        (_weighted, r"gives the parts .* the weights 0.75, 0.25, expected 0.5 each; .*: a mean"),
    ],
    ids=["sum", "mean of means", "scale", "zero", "dropped", "tokens"],
)
def test_planted_faults_are_named_with_their_causes(change: Any, cause: str) -> None:
    found = judge("gpt", engine=_changed(change))
    [one] = found.comparisons
    assert one.gradient.name == NAME
    with pytest.raises(sw.VerificationError, match=rf"the gradient of {NAME} in step 0 {cause}"):
        found.raise_for_difference()


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    """Return rows and a mask of those that count: the first half, and one or two more."""
    return torch.randn(16, 4), torch.arange(16) < 9 + step


def _sum_of_tokens(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, counted = batch
    return model(x).square().mean(-1)[counted].sum(), counted.sum()


class _OverTokens:
    """FSDP2 with a training loop that takes the mean over all tokens, or over ranks."""

    def __init__(self, *, over_ranks: bool) -> None:
        self.over_ranks = over_ranks

    def __call__(self, model: nn.Module, mesh: DeviceMesh | None, units: Any) -> Any:
        model = ENGINES["fsdp2"](model, mesh, units)

        def backward(loss_fn: Any, rows: Any) -> float:
            total, count = loss_fn(model, rows)
            if not self.over_ranks:
                dist.all_reduce(count, op=dist.ReduceOp.SUM)
                count = count / dist.get_world_size()
            loss = total / count
            loss.backward()
            return float(loss.detach())

        return model, backward


@on_ranks(2)
def test_a_mean_over_ranks_instead_of_tokens_is_named() -> None:
    def verify(**options: Any) -> sw.Verification:
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

        return sw.verify(build, _tokens, loss_fn=_sum_of_tokens, quiet=True, **options)

    for right in ({"strategies": ("fsdp", "ddp")}, {"engine": _OverTokens(over_ranks=False)}):
        found = verify(**right)
        assert found.ok, found.explanation
    found = verify(engine=_OverTokens(over_ranks=True))
    cause = r"equal weights, though they have 8, 1 tokens; possible causes: a mean over ranks where"
    with pytest.raises(sw.VerificationError, match=rf"the gradient of \d.* in step 0 .*{cause}"):
        found.raise_for_difference()


@on_ranks(2)
def test_noise_has_no_cause() -> None:
    noisy = _changed(lambda gradient: gradient + 1e-3 * torch.arange(len(gradient))[:, None])
    found = judge("gpt", engine=noisy)
    with pytest.raises(sw.VerificationError, match=rf"{NAME} in step 0 is off by"):
        found.raise_for_difference()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "dp2,tp2"], "name the --engine that uses it"),
        (["--engine", "fsdp2", "--mesh", "tp2"], "one of them beginning with dp"),
        (["--engine", "fsdp2", "--mesh", "dp"], "each with a size"),
        (["--engine", "fsdp3"], "expected one of shardwise, fsdp2, ddp; did you mean 'fsdp2"),
    ],
)
def test_the_command_names_mistakes(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "gpt", *options]) != 0
    assert message in capsys.readouterr().err
