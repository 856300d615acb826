"""``python -m benchmarks.muon``: a step of Muon on owner ranks, compared with PyTorch's on FSDP2.

The blocks of a GPT are sharded and get random gradients. Only the optimizer step is measured, in
turns, for three optimizers. `torch.optim.Muon` on the DTensors of FSDP2 gathers a factor or reduces
over ranks in every matrix product. The same optimizer on whole copies gathers every gradient on
every rank, and every rank orthogonalizes every matrix. `sw.optim.Muon` runs with parameters that
are cut anywhere, and with matrices that are whole on one rank. All orthogonalize in bfloat16 with
one thread per rank. *Collectives* counts calls, and *bytes* what a rank sends: for torch, in the
collectives that DTensor calls; for shardwise, as its queues count.

``--picture`` instead trains a small GPT on the source of Python's standard library with AdamW, Muon
and SOAP at the same learning rate, and plots the losses.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardwise as sw
from benchmarks import make_parser, print_figures
from shardwise._private import TorchDispatchMode
from shardwise.bench import harness
from shardwise.bench.harness import Figures, Round
from shardwise.comm.communicator import Collectives, communicator
from shardwise.launch.world import World
from shardwise.train.config import DataConfig
from shardwise.train.model import GPT, gpt_shape
from shardwise.train.text import STDLIB, Text, find_files, split_files

BASE = "torch.optim.Muon, on DTensors"
RATE, STEPS, SEQUENCES, CONTEXT = 3e-3, 300, 16, 64  # for the plot
_SMOOTH = 20  # number of steps that the plot averages
_GATHER, _REDUCE, _SCATTER = "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"


def main() -> None:
    """Parse the command line, run, print."""
    parser = make_parser("muon", __doc__, ranks=4, rounds=7)
    parser.add_argument("--width", type=int, default=256, help="width of the GPT")
    parser.add_argument("--layers", type=int, default=4, help="layers of the GPT")
    parser.add_argument("--picture", type=Path, help="train instead, and plot losses to this file")
    options = parser.parse_args()
    if options.picture is not None:
        draw(train(), options.picture)
        return
    rounds = harness.merge(harness.run_ranks(options.ranks, measure, options))
    rows: dict[str, Figures | dict[str, Any]] = {
        name: {
            **harness.medians(rounds, name),
            "ratio": harness.ratio(rounds, name, BASE).median,
            "cpu_ratio": harness.ratio(rounds, name, BASE, "cpu_seconds").median,
        }
        for name in rounds[0].cases
    }
    columns = (
        ("ms", "seconds", lambda seconds: f"{seconds * 1e3:.0f}"),
        ("/ torch", "ratio", "{:.2f}".format),
        ("CPU s", "cpu_seconds", "{:.3f}".format),
        ("/ torch", "cpu_ratio", "{:.2f}".format),
        ("collectives", "num_collectives", "{:.0f}".format),
        ("MB sent", "sent_bytes", lambda sent: f"{sent / 1e6:.2f}"),
    )
    setting = {name: getattr(options, name) for name in ("ranks", "width", "layers", "rounds")}
    title = f"optimizer step of Muon, {options.ranks} CPU ranks"
    print_figures(title, columns, rows, options.out, **setting)


# -- optimizer steps -------------------------------------------------------------------------------


def measure(world: World, options: Namespace) -> list[Round]:
    """Measure interleaved steps on this rank."""
    torch.set_num_threads(1)
    cases = {
        BASE: _torch_muon(options),
        "torch.optim.Muon, all gathered": _gathering_muon(options),
        "sw.optim.Muon": _ours(options, "element"),
        'sw.optim.Muon, granularity="tensor"': _ours(options, "tensor"),
    }
    visible = world.rank == 0
    return harness.interleave(cases, options.rounds, title="muon", warm_up=1, visible=visible)


def _gpt(options: Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(gpt_shape(256, 64, options.width, options.layers, heads=4))


def _torch_muon(options: Namespace) -> Callable[[int], Figures]:
    matrices = _fsdp2_matrices(options)
    optimizer: Optimizer = torch.optim.Muon(matrices)
    return partial(_step, matrices, optimizer.step, _count_of_dtensor)


def _gathering_muon(options: Namespace) -> Callable[[int], Figures]:
    matrices = _fsdp2_matrices(options)
    copies = [nn.Parameter(matrix.full_tensor().detach()) for matrix in matrices]
    optimizer: Optimizer = torch.optim.Muon(copies)

    @torch.no_grad()
    def update() -> None:
        for matrix, copy in zip(matrices, copies, strict=True):
            assert isinstance(matrix.grad, DTensor)
            copy.grad = matrix.grad.full_tensor()
        optimizer.step()
        for matrix, copy in zip(matrices, copies, strict=True):
            num_ranks, rank = matrix.device_mesh.size(), matrix.device_mesh.get_local_rank()
            matrix.to_local().copy_(copy.chunk(num_ranks)[rank])

    return partial(_step, matrices, update, _count_of_dtensor)


def _fsdp2_matrices(options: Namespace) -> list[DTensor]:
    model = _gpt(options)
    for block in model.blocks:
        fully_shard(block)
    return [p for p in model.blocks.parameters() if isinstance(p, DTensor) and p.ndim > 1]


def _ours(options: Namespace, granularity: Any) -> Callable[[int], Figures]:
    model = _gpt(options)
    sw.fully_shard(model, units="auto", granularity=granularity)
    matrices = [p for p in model.blocks.parameters() if p.ndim > 1]
    optimizer = sw.optim.Muon(matrices, ns_dtype=torch.bfloat16)
    sharding = matrices[0].sharding  # type: ignore[attr-defined]
    comm = communicator(sharding.mesh.world, torch.device("cpu"))
    count = partial(_count_ours, (comm.gather, comm.reduce))
    return partial(_step, matrices, optimizer.step, count)


def _step(
    matrices: Sequence[Tensor],
    update: Callable[[], object],
    count: Callable[[Callable[[], object]], tuple[float, float]],
    number: int,
) -> Figures:
    torch.manual_seed(number)
    for parameter in matrices:
        parameter.grad = torch.full_like(parameter, 1e-3).mul_(parameter)
    began, began_cpu = time.perf_counter(), time.process_time()
    update()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    num_collectives, sent_bytes = count(update)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "num_collectives": num_collectives,
        "sent_bytes": sent_bytes,
    }


def _count_ours(queues: Sequence[Collectives], update: Callable[[], object]) -> tuple[float, float]:
    """Count collectives and the bytes that this rank sends with shardwise's own counters."""
    before = [queue.sent for queue in queues]
    update()
    pairs = [(queue.sent, sent) for queue, sent in zip(queues, before, strict=True)]
    calls, num_bytes = (sum(now[i] - then[i] for now, then in pairs) for i in (0, 1))
    return calls, num_bytes


def _count_of_dtensor(update: Callable[[], object]) -> tuple[float, float]:
    """Count collectives that DTensor calls, and the bytes that this rank sends in them."""
    with _DTensorCollectives() as counts:
        update()
    return counts.calls, counts.sent_bytes


class _DTensorCollectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.sent_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:  # let DTensor handle the op, so that it calls its collectives
            return NotImplemented
        name = func._schema.name.rpartition("::")[2]
        if func.namespace == "_c10d_functional" and name in (_GATHER, _REDUCE, _SCATTER):
            num_ranks = torch.distributed.get_world_size()
            factor = {_GATHER: 1.0, _REDUCE: 2 / num_ranks, _SCATTER: 1 / num_ranks}[name]
            self.calls += 1
            self.sent_bytes += factor * args[0].nbytes * (num_ranks - 1)
        return func(*args, **(kwargs or {}))


# -- training --------------------------------------------------------------------------------------


def train() -> dict[str, list[float]]:
    """Return the losses by optimizer, all from the same initial model and on the same batches."""
    shape = gpt_shape(vocabulary=256, context=CONTEXT, width=96, layers=3, heads=4)
    makers: dict[str, Callable[[nn.Module], Optimizer]] = {
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=RATE, fused=True),
        "Muon": lambda model: sw.optim.Muon(
            sw.optim.parameter_groups(model), lr=RATE, adjust_lr_fn="match_rms_adamw"
        ),
        "SOAP": lambda model: sw.optim.SOAP(sw.optim.parameter_groups(model), lr=RATE),
    }
    text = split_files(find_files(DataConfig(), STDLIB, "text"), 0.1)[0]
    losses: dict[str, list[float]] = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        model = GPT(shape)
        sw.fully_shard(model, units="auto")
        optimizer = make(model)
        losses[name] = [_train_step(model, optimizer, text, step) for step in range(STEPS)]
    return losses


def _train_step(model: nn.Module, optimizer: Optimizer, text: Text, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (SEQUENCES,), generator=generator).tolist()
    rows = [torch.from_numpy(text.read(start, CONTEXT + 1)) for start in starts]
    tokens = torch.stack(rows).long()
    for group in optimizer.param_groups:
        group["lr"] = RATE * min(1, (step + 1) / 20)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def draw(losses: dict[str, list[float]], path: Path) -> None:
    """Plot a curve for each optimizer."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (an optional dependency)

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in losses.items():
        means = torch.tensor(values).unfold(0, _SMOOTH, 1).mean(1)
        axes.plot(range(_SMOOTH, len(values) + 1), means.tolist(), label=f"{name} {means[-1]:.2f}")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, mean of {_SMOOTH} steps")
    axes.set_title("A GPT on the source of Python's standard library")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
