"""Checks on one rank, with NCCL on a card."""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

import shardwise as sw
from tests.fsdp.extended import InBfloat16, replace_weights
from tests.gpu.registry import CHECKPOINTS, Context, check
from tests.gpu.training import WIDE, Pair, WideStack, adamw, compare, is_reached
from tests.models import CASES, WIDTH
from tests.runtime.modules import FailingLinear

ONE = "one rank"
STEPS = 3
# Plain modules compute with the same kernels, but cuBLAS may choose others for other alignments.
LOW = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float8_e4m3fn: 1e-9}
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "hfsdp")
OPTIONAL = {"pydantic", "zlib_ng", "tomli_w", "psutil", "rich", "typer", "transformers", "pytest"}

for name in STRATEGIES:
    check(ONE, name, values={"strategy": name})(compare)
PROGRAMS: dict[str, dict[str, Any]] = {
    "granularity dim": {"granularity": "dim"},
    "granularity row": {"granularity": "row"},
    "no prefetch, no reshard": {"prefetch": 0, "reshard_after_forward": False},
    "two micro-batches, clipped": {"accumulate": 2, "clip": 0.1, "prefetch": 2},
    "zero2, two micro-batches": {"strategy": "zero2", "accumulate": 2},
    "optimizer in backward": {"in_backward": True},
    "Muon": {"make": lambda model: make("muon", model), "name": "wide stack"},
    "8-bit Adam": {"make": lambda model: make("adam8bit", model), "granularity": "row"},
    "SOAP": {"make": lambda model: make("soap", model), "name": "stack"},
    "offload of parameters, gradients, states": {"offload_policy": sw.CPUOffloadPolicy()},
    "offload of gradients and states": {"offload_policy": sw.CPUOffloadPolicy(parameters=False)},
    "offload of activations": {"around": sw.offload_activations},
    "offload of wide activations": {
        "around": sw.offload_activations, "name": "wide stack"
    },
    "fused weight gradients": {"name": "wide stack"},
    "fused weight gradients, two micro-batches": {"name": "wide stack", "accumulate": 2},
}  # fmt: skip
for name, values in PROGRAMS.items():
    check(ONE, name, values=values)(compare)


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    from tests.fuzz.optimizers import make_optimizer  # noqa: PLC0415

    return make_optimizer(kind, list(model.parameters()))


@check(ONE, "the core imports torch and numpy only", {"group": "none", "kinds": ("cuda", "cpu")})
def _imports(_context: Context) -> None:
    found = OPTIONAL & {name.partition(".")[0] for name in sys.modules}
    assert "shardwise.api" in sys.modules
    assert not found - {"pytest"}, found  # pytest, if a test runs this


@check(ONE, "every model of the tests", {"seconds": 90.0})
def _every_model(context: Context) -> None:
    for name in CASES:
        if context.kind == "cuda" or name in {"stack", "tied", "mixed dtypes", "conv"}:
            compare(context, name, steps=2)


# -- low precision -----------------------------------------------------------------------------


class Plain:
    """Plain mixed precision: float32 masters, and copies in which the model computes."""

    def __init__(self, model: nn.Module, low: nn.Module, cast: Callable[[Tensor], Tensor]) -> None:
        self.masters, self.low, self._cast = list(model.parameters()), low, cast

    def refresh(self) -> None:
        with torch.no_grad():
            for master, low in zip(self.masters, self.low.parameters(), strict=True):
                low.copy_(self._cast(master))

    def collect(self) -> None:
        for master, low in zip(self.masters, self.low.parameters(), strict=True):
            assert low.grad is not None
            master.grad, low.grad = low.grad.float(), None


@check(ONE, "bfloat16", values={"dtype": torch.bfloat16})
@check(ONE, "float16 with a scaler", values={"dtype": torch.float16})
def _low_precision(context: Context, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    reference = WideStack().to(context.device)
    model: Any = WideStack().to(context.device)
    model.load_state_dict(reference.state_dict())
    low = WideStack().to(context.device).to(dtype)
    policy = sw.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    sw.fully_shard(model, units="auto", mp_policy=policy)
    plain = Plain(reference, low, lambda t: t.to(dtype))
    _train_beside(context, model, reference, plain, dtype, scaled=dtype is torch.float16)


@check(ONE, "float8 gathers", {"kinds": ("cuda", "cpu")})
def _float8(context: Context) -> None:
    torch.manual_seed(0)
    reference = WideStack().to(context.device)
    model: Any = WideStack().to(context.device)
    model.load_state_dict(reference.state_dict())
    low = WideStack().to(context.device)
    replace_weights(model, InFloat8)
    sw.fully_shard(model, units="auto", granularity="dim")
    plain = Plain(reference, low, lambda t: InFloat8.rounded(t) if t.ndim > 1 else t)
    _train_beside(context, model, reference, plain, torch.float8_e4m3fn)


class InFloat8(InBfloat16):
    """A tensor that is gathered in float8 and computes in its own dtype."""

    @staticmethod
    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(torch.float8_e4m3fn).to(tensor.dtype)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        (padded,), metadata = super().fsdp_pre_all_gather(mesh, outer_size, stride, module, policy)
        padded = torch.zeros_like(padded, dtype=torch.float8_e4m3fn)
        padded[: self.shape[0]].copy_(self.data_)  # type: ignore[attr-defined]
        return (padded,), metadata


def _train_beside(
    context: Context,
    model: Any,
    reference: nn.Module,
    plain: Plain,
    dtype: torch.dtype,
    *,
    scaled: bool = False,
) -> None:
    scalers = [
        torch.amp.GradScaler(context.device.type, init_scale=1024.0, enabled=scaled)
        for _ in range(2)
    ]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, reference)]
    kind = next(plain.low.parameters()).dtype
    for _ in range(STEPS):
        batch = torch.randn(64, WIDE).to(context.device)
        plain.refresh()
        for net, own in ((model, batch), (plain.low, batch.to(kind))):
            scalers[0].scale(net(own).float().square().mean()).backward()
        plain.collect()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.scale(torch.ones((), device=context.device))  # makes its factor
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    worst, same = 0.0, True
    for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
        found = own.full_tensor().detach()
        found = getattr(found, "data_", found)
        error = (found - expected).norm() / expected.norm().clamp(min=1e-3)
        worst, same = max(worst, float(error)), same and torch.equal(found, expected)
    context.report("relative error", worst)
    context.report("same bits", same)
    assert worst <= LOW[dtype], worst


# -- compile -------------------------------------------------------------------------------------


@check(ONE, "compiled blocks", {"kinds": ("cuda", "cpu"), "seconds": 100.0}, {"whole": False})
@check(ONE, "compiled whole", {"kinds": ("cuda", "cpu"), "seconds": 100.0}, {"whole": True})
def _compiled(context: Context, *, whole: bool) -> None:
    has_compiler = context.kind == "cuda" and has_triton()
    backend = "inductor" if has_compiler else "aot_eager"
    context.report("backend", backend)
    pair = Pair(context, "wide stack")
    if whole:
        pair.model = torch.compile(pair.model, backend=backend)
        loss = pair.loss(pair.batch())
        loss.backward()  # type: ignore[no-untyped-call]
        pair.optimizer.zero_grad()
        pair.model = pair.model._orig_mod
        pair.model.compile(backend=backend)
    else:
        for block in pair.model:
            block.compile(backend=backend)
    for _ in range(2):
        pair.step()


# -- errors ----------------------------------------------------------------------------------------


class Failing(nn.Sequential):
    """Two blocks around a layer that raises on demand."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), FailingLinear(), nn.Linear(WIDTH, WIDTH))


@check(ONE, "an exception in forward, then a step", values={"where": "forward"})
@check(ONE, "an exception in backward, then a step", values={"where": "backward"})
@check(ONE, "an exception in a transaction", values={"where": "backward", "undoes": True})
def _exception(context: Context, where: str, *, undoes: bool = False) -> None:
    torch.manual_seed(0)
    reference = Failing().double().to(context.device)
    model = Failing().double().to(context.device)
    model.load_state_dict(reference.state_dict())
    sw.fully_shard(model, units={nn.Linear, FailingLinear})
    optimizers = [adamw(net) for net in (model, reference)]
    pair = [model, reference]
    middle = model[1]
    assert isinstance(middle, FailingLinear)
    for number in range(4):
        batch = torch.randn(5, WIDTH, dtype=torch.float64).to(context.device)
        if number % 2:
            middle.where = where
            with is_reached(ValueError, "it hurts"):
                _step(model, optimizers[0], batch, undoes=undoes)
            middle.where = ""
            if not undoes:
                optimizers[0].zero_grad()
        for net, optimizer in zip(pair, optimizers, strict=True):
            _step(net, optimizer, batch)
        for own, expected in zip(model.parameters(), reference.parameters(), strict=True):
            whole = own.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(whole, expected.detach(), rtol=1e-10, atol=1e-12)


def _step(
    net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, *, undoes: bool = False
) -> None:
    def run() -> None:
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if undoes:
        with sw.transaction(net, optimizer):
            run()
    else:
        run()


@check(ONE, "out of memory, then a step", {"kinds": ("cuda",)}, {"undoes": False})
@check(ONE, "out of memory in a transaction", {"kinds": ("cuda",)}, {"undoes": True})
def _out_of_memory(context: Context, *, undoes: bool) -> None:
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(2e9, free) / total)
    pair = Pair(context, "wide stack")
    pair.step()
    rows = 1 << 21  # 4 GiB in float64
    with is_reached(torch.OutOfMemoryError):
        if undoes:
            with sw.transaction(pair.model, pair.optimizer):
                pair.model(torch.randn(rows // 16, WIDE).double().to(context.device).repeat(16, 1))
        else:
            x = torch.randn(rows // 16, WIDE, dtype=torch.float64, device=context.device)
            pair.model(x).square().mean().backward()
    pair.optimizer.zero_grad()
    torch.cuda.empty_cache()
    for _ in range(2):
        pair.step()


# -- around a run --------------------------------------------------------------------------------


@check(ONE, "save and load", {"modules": CHECKPOINTS, "kinds": ("cuda", "cpu")})
def _save_and_load(context: Context) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = compare(context, steps=2)
        sw.save(Path(folder) / "step", model=first.model, optimizer=first.optimizer)
        second = Pair(context)
        sw.load(Path(folder) / "step", model=second.model, optimizer=second.optimizer)
        second.reference, second.plain_optimizer = first.reference, first.plain_optimizer
        second.step_number = first.step_number
        second.step()


@check(ONE, "the recorder", {"modules": ("pydantic",), "kinds": ("cuda", "cpu")})
def _recorder(context: Context) -> None:
    from shardwise.recording.format import read_recording  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(context)
        with sw.record(pair.model, folder, steps=range(10), optimizer=pair.optimizer):
            for _ in range(3):
                pair.step()
        (rank,) = read_recording(Path(folder))
        spans = [(event.began, event.ended) for event in rank.events]
        assert len(rank.steps) == 3
        assert spans
        assert all(began <= ended for began, ended in spans)


@check(ONE, "initialization from the meta device", {"kinds": ("cuda", "cpu")})
def _initialization(context: Context) -> None:
    whole = WideStack().to(context.device)
    sw.initialize(whole, 7)
    with torch.device("meta"):
        model = WideStack()
    sw.fully_shard(model, units="auto", init=sw.Initialization(7))
    for own, expected in zip(model.parameters(), whole.parameters(), strict=True):
        found = own.full_tensor().detach()  # type: ignore[attr-defined]
        assert found.device.type == context.device.type
        assert torch.equal(found, expected)


@check(ONE, "asleep, and on the host")
def _asleep(context: Context) -> None:
    pair = compare(context, "wide stack", steps=1)
    for way in ("sleep", "move"):
        before = _device_bytes(context)
        if way == "sleep":
            sw.sleep(pair.model, pair.optimizer)
        else:
            pair.model.to("cpu")
            whole = [p.to(context.device).full_tensor() for p in pair.model.state_dict().values()]
            for own, plain in zip(whole, pair.reference.parameters(), strict=True):
                torch.testing.assert_close(own, plain.detach(), rtol=1e-10, atol=1e-12)
        after = _device_bytes(context)
        context.report(f"bytes freed, {way}", before - after)
        assert context.kind != "cuda" or after < before
        if way == "sleep":
            sw.wake(pair.model, pair.optimizer)
        else:
            pair.model.to(context.device)
        pair.step()


def _device_bytes(context: Context) -> int:
    return torch.cuda.memory_allocated() if context.kind == "cuda" else 0


@check(ONE, "whole parameters, state dicts, evaluation")
def _whole(context: Context) -> None:
    pair = compare(context, "wide stack", steps=1)
    with sw.gathered(pair.model), torch.no_grad():
        for own, plain in zip(pair.model.parameters(), pair.reference.parameters(), strict=True):
            torch.testing.assert_close(own.detach(), plain.detach(), rtol=1e-10, atol=1e-12)
    pair.model.eval()
    with torch.inference_mode():
        batch = pair.batch()
        found, expected = pair.model(batch), pair.reference(batch)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    pair.model.train()
    assert all(t.device.type == context.device.type for t in pair.model.state_dict().values())
    pair.step()
