"""``python -m benchmarks.local_steps``: replicas that train alone for many steps.

A small GPT trains on the text of the standard library in three runs, each with two replicas of two
ranks and the same batches: synchronous replicas (strategy "hsdp"), replicas that synchronize every
few steps through a torchft manager, and the latter with one replica that is killed and started
again. All runs continue from one checkpoint after ``--warm`` synchronous steps, at the same
position of one schedule.

Goodput is the number of useful tokens, relative to the tokens that two replicas would train in the
same time. Steps of the killed replica since its last synchronization are not useful.
"""

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise as sw
from shardwise.comm.communicator import communicator
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import local_of
from shardwise.train.config import Config
from shardwise.train.data import Sequences, open_corpus
from shardwise.train.model import GPT, Block, gpt_shape

RANKS = 2  # ranks per replica
REPLICAS = 2
FORKS = multiprocessing.get_context("forkserver")
VALIDATION_BATCHES = 48
_STORES: list[TCPStore] = []  # of the worlds, which end with this process
TIMEOUT = timedelta(seconds=60)
RESULTS = Path(__file__).parent / "results" / "local_steps.json"


def main() -> None:
    """Run the selected runs and print a report."""
    options = _parser().parse_args()
    FORKS.set_forkserver_preload(["shardwise.public", "shardwise.train.data"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options.checkpoint = options.checkpoint or str(folder / "checkpoint")
        if not Path(options.checkpoint).exists():
            _finish(_start(options, "warm", 1, folder / "warm"))
        found = {
            run: {"options": _setting(options), **RUNS[run](options, folder)}
            for run in options.runs
        }
    if RESULTS.exists():
        found = json.loads(RESULTS.read_text())["runs"] | found
    report = {"runs": found, **_compared(found)}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.local_steps", description=__doc__)
    numbers = {"steps": 800, "warm": 400, "every": 16, "fragments": 2, "delay": 1, "block": 256}
    numbers |= {"batch": 4, "context": 64, "width": 64, "layers": 2}
    for key, value in numbers.items():
        parser.add_argument(f"--{key}", type=int, default=value)
    factors = {"lr": 1.2e-2, "outer-lr": 0.5, "outer-momentum": 0.8, "mixing": 0.0}
    for key, factor in factors.items():
        parser.add_argument(f"--{key}", type=float, default=factor)
    parser.add_argument("--dtype", default="int4")
    parser.add_argument(
        "--checkpoint", default="", help="checkpoint after the warm steps; made if missing"
    )
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS))
    return parser


def _setting(options: Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(options).items() if key not in ("runs", "checkpoint")}


# -- ranks ---------------------------------------------------------------------------------------


def _work(options: Namespace, environment: dict[str, str]) -> None:
    """Train on one rank."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, is_replica = dist.get_rank(), options.worker == "local"
    torch.manual_seed(0)
    shape = gpt_shape(256, options.context, options.width, options.layers, heads=2)
    is_synchronous = options.worker == "synchronous"
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS)) if is_synchronous else None
    model = sw.fully_shard(GPT(shape), units=Block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    corpus, world = open_corpus(Config()), dist.get_world_size()
    batches = partial(
        Sequences,
        context=options.context,
        global_batch=REPLICAS * RANKS * options.batch,
        rank=RANKS * options.replica + rank if is_replica else rank,
        world_size=REPLICAS * RANKS if is_replica else world,
    )
    data = batches(text=corpus.train, seed=0)
    first, last = options.warm, options.steps
    if options.worker == "warm":
        first, last = 0, options.warm
    else:
        sw.load(options.checkpoint, model=model, optimizer=optimizer)
    outer = None
    if is_replica:
        manager = _manager_of(options, rank)
        outer = sw.outer_optimizer(model, optimizer, _outer_of(options), manager=manager)
    runtime = runtime_of_root(model)
    comm = communicator(runtime.mesh.world, runtime.pools.device)
    log = Path(f"{options.out}-{rank}.jsonl").open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
    step = first
    log.write(json.dumps({"begins": step, "time": time.time()}) + "\n")
    _wait_for(options)
    while step < last:
        for group in optimizer.param_groups:
            group["lr"] = options.lr * _schedule(step / options.steps)
        loss = _loss(model, data[step])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step = step + 1 if outer is None else first + outer.local_steps
        sent = comm.gather.sent[1] + comm.reduce.sent[1]
        line = {"step": step, "time": time.time(), "loss": loss.item(), "inner_bytes": sent}
        if outer is not None:
            line["outer_bytes"] = outer.sent_bytes
        log.write(json.dumps(line) + "\n")
    if options.worker == "warm":
        sw.save(options.checkpoint, model=model, optimizer=optimizer)
    found = _losses(model, batches(text=corpus.validation, seed=1), outer)
    log.write(json.dumps({"validation": found}) + "\n")
    log.flush()
    os._exit(0)  # a manager has threads that do not end


def _manager_of(options: Namespace, rank: int) -> Any:
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415

    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=rank,
        world_size=RANKS,
        store_addr="localhost",
        store_port=options.store,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica{options.replica}",
        hostname="localhost",
        init_sync=False,
    )


def _wait_for(options: Namespace) -> None:
    """Begin together with the other replica: the lighthouse awaits those that it knows."""
    until = time.monotonic() + TIMEOUT.total_seconds()
    while options.begins and not Path(options.begins).exists() and time.monotonic() < until:
        time.sleep(0.05)


def _outer_of(options: Namespace) -> sw.Outer:
    return sw.Outer(
        every=options.every,
        fragments=options.fragments,
        dtype=options.dtype,
        block=options.block,
        delay=options.delay,
        mixing=options.mixing,
        optimizer=partial(
            torch.optim.SGD,
            lr=options.outer_lr,
            momentum=options.outer_momentum,
            nesterov=options.outer_momentum > 0,
        ),
    )


def _schedule(share: float) -> float:
    """Return a factor on the rate: a warm-up, then half a cosine down to 1/50."""
    return min((share + 1e-3) / 0.1, 0.51 + 0.49 * math.cos(math.pi * max(0.0, share - 0.1) / 0.9))


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())


def _losses(
    model: nn.Module, held_out: Sequences, outer: sw.OuterOptimizer | None
) -> dict[str, float]:
    """Return validation losses of the model and of the shared parameters, which replace its own."""
    found = {"own": _validate(model, held_out)}
    if outer is not None:
        with torch.no_grad():
            for parameter, state in outer.state.items():
                local_of(parameter).copy_(local_of(state["anchor"]))
                torch.autograd.graph.increment_version(parameter)
        found["shared"] = _validate(model, held_out)
    return found


@torch.no_grad()
def _validate(model: nn.Module, data: Sequences) -> float:
    total = torch.stack([_loss(model, data[i]) for i in range(VALIDATION_BATCHES)]).mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# -- runs ----------------------------------------------------------------------------------------


def _start(options: Namespace, worker: str, ranks: int, out: Path, **more: Any) -> list[Any]:
    """Start the ranks of one world by forking a process that has imported torch."""
    world = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    own = {**vars(options), "begins": "", **more, "worker": worker, "out": out}
    environment = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(world.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "RUST_LOG": "error",
    }
    _STORES.append(world)
    processes = []
    for rank in range(ranks):
        environment["RANK"] = str(rank)
        process = FORKS.Process(target=_work, args=(Namespace(**own), dict(environment)))
        process.start()
        processes.append(process)
    return processes


def _finish(processes: Sequence[Any]) -> None:
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(f"a rank ended with {process.exitcode}")


def _read(out: Path, rank: int = 0) -> list[dict[str, Any]]:
    path = Path(f"{out}-{rank}.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [line for line in lines if "step" in line]
    # From the second step on, because the first one records the order of the gathers.
    per_step = (steps[-1]["inner_bytes"] - steps[0]["inner_bytes"]) / (len(steps) - 1)
    return {
        "validation": lines[-1]["validation"],
        "inner_bytes_per_step": per_step,
        "seconds": steps[-1]["time"] - steps[0]["time"],
    }


def _synchronous(options: Namespace, folder: Path) -> dict[str, Any]:
    out = folder / "synchronous"
    _finish(_start(options, "synchronous", REPLICAS * RANKS, out))
    return _summary(_read(out))


def _local(options: Namespace, folder: Path) -> dict[str, Any]:
    _with_manager(options, folder / "local", kills=False)
    lines, lines_of_1 = (_read(folder / f"local-{replica}") for replica in range(REPLICAS))
    steps = [line for line in lines if "step" in line]
    return {
        **_summary(lines),
        "outer_bytes_per_step": steps[-1]["outer_bytes"] / len(steps),
        "validation": {
            key: (loss + lines_of_1[-1]["validation"][key]) / REPLICAS
            for key, loss in lines[-1]["validation"].items()
        },
    }


def _killed(options: Namespace, folder: Path) -> dict[str, Any]:
    found = _with_manager(options, folder / "killed", kills=True)
    return {"validation": _read(folder / "killed-0")[-1]["validation"], **found}


def _with_manager(options: Namespace, out: Path, *, kills: bool) -> dict[str, Any]:
    from torchft.coordination import LighthouseServer  # noqa: PLC0415

    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=2_000
    )
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"

    def start(replica: int) -> list[Any]:
        _STORES.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        own = {"replica": replica, "store": _STORES[-1].port, "lighthouse": address}
        begins = str(out.with_suffix(".begins"))
        return _start(options, "local", RANKS, Path(f"{out}-{replica}"), **own, begins=begins)

    replicas = [start(replica) for replica in range(REPLICAS)]
    outputs = [Path(f"{out}-{replica}") for replica in range(REPLICAS)]
    while not all(_read(path, rank) for path in outputs for rank in range(RANKS)):
        time.sleep(0.05)
    out.with_suffix(".begins").touch()
    if kills:
        while not _at_step(outputs[1], options.warm + (options.steps - options.warm) // 3):
            time.sleep(0.05)
        for process in replicas[1]:
            process.kill()
        for process in replicas[1]:
            process.join()
        replicas[1] = start(1)
    for processes in replicas:
        _finish(processes)
    lighthouse.shutdown()
    return _goodput(options, *outputs) if kills else {}


def _at_step(out: Path, step: int) -> bool:
    lines = _read(out)
    return bool(lines) and lines[-1].get("step", 0) >= step


def _goodput(options: Namespace, stayed: Path, killed: Path) -> dict[str, Any]:
    lines = _read(killed)
    first, second = (i for i, line in enumerate(lines) if "begins" in line)
    killed_after = lines[second - 1]["step"]
    own = [line for line in _read(stayed) if "step" in line]
    back = next(line for line in lines[second + 1 :] if "step" in line)  # with the other's steps
    trained = [line["step"] for line in lines[first + 1 :] if "step" in line and line is not back]
    useful = len(own) + len(trained) - _unshared_steps(options, killed_after - options.warm)
    return {
        "killed_after_step": killed_after,
        "returned_at_step": back["step"],
        "away_seconds": back["time"] - lines[second - 1]["time"],
        "goodput": useful / (REPLICAS * len(own)),
        "longest_step_of_the_other": max(
            after["time"] - before["time"] for before, after in pairwise(own)
        ),
    }


def _unshared_steps(options: Namespace, after: int) -> float:
    """Return the steps that other replicas have not received, as a mean over fragments."""
    outer = _outer_of(options)
    shared = [
        max(
            (step for step in range(1, after - outer.delay) if fragment in outer.sent_after(step)),
            default=0,
        )
        for fragment in range(outer.fragments)
    ]
    return after - sum(shared) / outer.fragments


def _compared(found: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if {"synchronous", "local"} <= found.keys():
        synchronous, outer = found["synchronous"], found["local"]
        # Bytes that the replicas of the synchronous run send each other.
        axis = synchronous["inner_bytes_per_step"] - outer["inner_bytes_per_step"]
        result["synchronous_outer_bytes_per_step"] = axis
        result["fewer_bytes"] = axis / outer["outer_bytes_per_step"]
        base = synchronous["validation"]["own"]
        result["loss_ratio"] = outer["validation"]["shared"] / base
        result["loss_ratio_of_a_replica"] = outer["validation"]["own"] / base
    return result


RUNS = {"synchronous": _synchronous, "local": _local, "killed": _killed}


if __name__ == "__main__":
    main()
