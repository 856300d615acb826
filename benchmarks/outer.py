"""``python -m benchmarks.outer``: replicas on a slow network, compared with synchronous training.

A small GPT trains on the text of the standard library in three runs, each with two replicas of two
ranks and the same batches: synchronous replicas (strategy "hsdp"), replicas that synchronize at a
hub every few steps, and the latter with one replica that is killed and restarted. All runs continue
from one checkpoint after ``--warm`` synchronous steps, at the same position of one schedule. A
relay between each replica and the hub limits the rate to 10 Mbit/s in each direction and counts
bytes.

Goodput is the number of useful tokens, relative to the tokens that two replicas would train in the
same time. Steps of the killed replica since its last synchronization are not useful.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise as sw
from shardwise.comm.communicator import communicator
from shardwise.outer.serving import HubThread
from shardwise.runtime.module import runtime_of_root
from shardwise.tensor.sharding import local_of
from shardwise.train.config import Config
from shardwise.train.data import VOCABULARY, Sequences, open_corpus
from shardwise.train.model import GPT, Block, gpt_shape

RANKS = 2  # ranks per replica
REPLICAS = 2
FORKS = multiprocessing.get_context("forkserver")
VALIDATION_BATCHES = 48
RESULTS = Path(__file__).parent / "results" / "outer.json"


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
    parser = argparse.ArgumentParser("python -m benchmarks.outer", description=__doc__)
    numbers = {"steps": 800, "warm": 400, "every": 16, "fragments": 2, "delay": 1, "block": 256}
    numbers |= {"batch": 4, "context": 64, "width": 64, "layers": 2}
    for key, value in numbers.items():
        parser.add_argument(f"--{key}", type=int, default=value)
    factors = {"lr": 1.2e-2, "outer-lr": 0.5, "outer-momentum": 0.8, "mixing": 0.0, "mbit": 10.0}
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
    rank, is_replica = dist.get_rank(), options.worker == "outer"
    torch.manual_seed(0)
    shape = gpt_shape(VOCABULARY, options.context, options.width, options.layers, heads=2)
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
        outer = sw.outer_optimizer(
            model,
            optimizer,
            _outer_of(options),
            hub=options.hub,
            replica=options.replica,
            num_replicas=REPLICAS,
        )
    runtime = runtime_of_root(model)
    comm = communicator(runtime.mesh.world, runtime.pools.device)
    log = Path(f"{options.out}-{rank}.jsonl").open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
    step = first + (outer.join() if outer is not None else 0)
    log.write(json.dumps({"begins": step, "time": time.time()}) + "\n")
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
            line["outer_bytes"] = outer.exchange.sent_bytes
            line["state_bytes"] = outer.exchange.state_bytes
        log.write(json.dumps(line) + "\n")
    if options.worker == "warm":
        sw.save(options.checkpoint, model=model, optimizer=optimizer)
    found = _losses(model, batches(text=corpus.validation, seed=1), outer)
    if outer is not None:
        outer.remove()
    log.write(json.dumps({"validation": found}) + "\n")
    dist.destroy_process_group()


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
        deadline=120.0,
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


# -- the network ---------------------------------------------------------------------------------


class Relay:
    """Relays to ``target`` with at most ``bytes_per_second`` in each direction (token bucket)."""

    def __init__(self, target: str, bytes_per_second: float) -> None:
        self.target = target
        self.rate = bytes_per_second
        self.passed = {"up": 0, "down": 0}
        self._free_at = {"up": 0.0, "down": 0.0}  # when the next byte may pass
        started: Future[int] = Future()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._serve(started))
        threading.Thread(target=self._run, daemon=True).start()
        self.address = f"127.0.0.1:{started.result()}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)

    async def _serve(self, started: "Future[int]") -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 16)
        started.set_result(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            to_reader, to_writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            self._pass("up", reader, to_writer), self._pass("down", to_reader, writer)
        )

    async def _pass(
        self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with closing(writer), suppress(OSError):
            while piece := await reader.read(1 << 13):
                now = time.monotonic()
                begins = max(now, self._free_at[direction])
                self._free_at[direction] = begins + len(piece) / self.rate
                await asyncio.sleep(self._free_at[direction] - now)
                self.passed[direction] += len(piece)
                writer.write(piece)
                await writer.drain()


# -- runs ----------------------------------------------------------------------------------------


def _start(options: Namespace, worker: str, ranks: int, out: Path, **more: Any) -> list[Any]:
    """Start the ranks of one world by forking a process that has imported torch."""
    port = _free_port()
    own = Namespace(**{**vars(options), **more, "worker": worker, "out": out})
    environments = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(ranks)
    ]
    processes = [FORKS.Process(target=_work, args=(own, one)) for one in environments]
    for process in processes:
        process.start()
    return processes


def _free_port() -> int:
    with HubThread() as hub:  # its port is free again after the block
        return int(hub.address.rpartition(":")[2])


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


def _slow_axis(options: Namespace, folder: Path) -> dict[str, Any]:
    found, relays = _with_hub(options, folder / "outer", kills=False)
    lines, lines_of_1 = (_read(folder / f"outer-{replica}") for replica in range(REPLICAS))
    steps = [line for line in lines if "step" in line]
    return {
        **_summary(lines),
        "outer_bytes_per_step": steps[-1]["outer_bytes"] / len(steps),
        "validation": {
            key: (loss + lines_of_1[-1]["validation"][key]) / REPLICAS
            for key, loss in lines[-1]["validation"].items()
        },
        "relay_bytes_per_step": sum(relays[0].passed.values()) / 2 / RANKS / len(steps),
        **found,
    }


def _killed(options: Namespace, folder: Path) -> dict[str, Any]:
    found, _ = _with_hub(options, folder / "killed", kills=True)
    return {"validation": _read(folder / "killed-0")[-1]["validation"], **found}


def _with_hub(options: Namespace, out: Path, *, kills: bool) -> tuple[dict[str, Any], list[Relay]]:
    with HubThread() as hub:
        relays = [Relay(hub.address, options.mbit * 1e6 / 8) for _ in range(REPLICAS)]

        def start(replica: int) -> list[Any]:
            own = {"replica": replica, "hub": relays[replica].address}
            return _start(options, "outer", RANKS, Path(f"{out}-{replica}"), **own)

        replicas = [start(replica) for replica in range(REPLICAS)]
        found = {}
        if kills:
            while not _at_step(
                Path(f"{out}-1"), options.warm + (options.steps - options.warm) // 3
            ):
                time.sleep(0.05)
            for process in replicas[1]:
                process.kill()
            for process in replicas[1]:
                process.join()
            replicas[1] = start(1)
        for processes in replicas:
            _finish(processes)
        if kills:
            found = _goodput(options, Path(f"{out}-0"), Path(f"{out}-1"))
        for relay in relays:
            relay.stop()
    return found, relays


def _at_step(out: Path, step: int) -> bool:
    lines = _read(out)
    return bool(lines) and lines[-1].get("step", 0) >= step


def _goodput(options: Namespace, stayed: Path, killed: Path) -> dict[str, Any]:
    lines = _read(killed)
    first, second = (i for i, line in enumerate(lines) if "begins" in line)
    killed_after = lines[second - 1]["step"]
    own = [line for line in _read(stayed) if "step" in line]
    trained = [line["step"] for line in lines[first + 1 :] if "step" in line]
    useful = len(own) + len(trained) - _unshared_steps(options, killed_after - options.warm)
    return {
        "killed_after_step": killed_after,
        "returned_at_step": lines[second]["begins"],
        "away_seconds": lines[second]["time"] - lines[second - 1]["time"],
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
    if {"synchronous", "outer"} <= found.keys():
        synchronous, outer = found["synchronous"], found["outer"]
        # Bytes that the replicas of the synchronous run send each other.
        axis = synchronous["inner_bytes_per_step"] - outer["inner_bytes_per_step"]
        result["synchronous_outer_bytes_per_step"] = axis
        result["fewer_bytes"] = axis / outer["outer_bytes_per_step"]
        result["fewer_bytes_with_everything"] = axis / outer["relay_bytes_per_step"]
        base = synchronous["validation"]["own"]
        result["loss_ratio"] = outer["validation"]["shared"] / base
        result["loss_ratio_of_a_replica"] = outer["validation"]["own"] / base
    return result


RUNS = {"synchronous": _synchronous, "outer": _slow_axis, "killed": _killed}


if __name__ == "__main__":
    main()
