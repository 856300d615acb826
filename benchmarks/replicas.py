"""``python -m benchmarks.replicas``: what the manager of replicas costs while nobody dies.

Four processes train the same GPT as two replicas of two ranks, alternately in two ways: strategy
"hsdp" over all four ranks of one world, and "fsdp" over the two ranks of each replica with
`sw.elastic`, whose replicas meet through a lighthouse. It prints the median time of a step of each,
and the median of the ratios of neighboring blocks of steps.

With ``--hosts 2``, the ranks of "hsdp" behave as if each replica were on a host of its own: they
share no memory with the other replica, so that both ways average over sockets.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise as sw
from shardwise.host import handshake
from shardwise.train.model import GPT, Block, gpt_shape

REPLICAS, RANKS = 2, 2
RESULTS = Path(__file__).parent / "results" / "replicas.json"
TIMEOUT = timedelta(minutes=2)


def main() -> None:
    """Start the processes and print the result of the first one."""
    os.environ.setdefault("RUST_LOG", "error")  # torchft reads it when it is imported
    from torchft.coordination import LighthouseServer  # noqa: PLC0415

    options = _parser().parse_args()
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=REPLICAS)
    address = f"http://localhost:{lighthouse.address().rpartition(':')[2]}"
    stores = [TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for _ in range(3)]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ports = [store.port for store in stores]
    processes = [
        context.Process(target=_rank, args=(rank, ports, address, options, results), daemon=True)
        for rank in range(REPLICAS * RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if not results.empty():
        _print(results.get())
    lighthouse.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12, help="blocks of steps of each kind")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--hosts", type=int, default=1, choices=(1, REPLICAS), help='of "hsdp"')
    return parser


def _rank(rank: int, ports: list[int], address: str, options: Namespace, results: Any) -> None:
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415

    torch.set_num_threads(1)
    store = TCPStore("localhost", ports[0], is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=REPLICAS * RANKS)
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("replicate", "shard"))
    replica, shard = mesh.get_local_rank("replicate"), mesh.get_local_rank("shard")
    if options.hosts > 1:
        _leave_host_to(replica)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=REPLICAS,
        timeout=TIMEOUT,
        rank=shard,
        world_size=RANKS,
        store_addr="localhost",
        store_port=ports[1 + replica],
        lighthouse_addr=address,
        replica_id=f"replica{replica}",
        hostname="localhost",
        init_sync=False,
    )
    plain, plain_optimizer = _model(options, mesh=mesh, strategy="hsdp")
    model, optimizer = _model(options, mesh=mesh["shard"], strategy="fsdp")
    replicas = sw.elastic(model, optimizer, manager)
    tokens = torch.randint(256, (options.batch, options.sequence + 1))
    kinds = {
        "hsdp": partial(_steps, plain, plain_optimizer, nullcontext, tokens, options.steps),
        "elastic": partial(_steps, model, optimizer, replicas.step, tokens, options.steps),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for block in range(options.blocks + 1):
        for kind, run in kinds.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            if block:  # the first one allocates and connects
                seconds[kind].append((time.perf_counter() - began) / options.steps)
    if rank == 0:
        results.put(seconds)
    dist.barrier()
    manager.shutdown(wait=False)


def _leave_host_to(replica: int) -> None:
    """Let groups of all ranks take those of other replicas for ranks of other hosts."""
    connect = handshake.connect

    def connect_in_replica(own: int, identities: Sequence[handshake.Identity]) -> Any:
        here = range(replica * RANKS, (replica + 1) * RANKS)
        if len(identities) == REPLICAS * RANKS:
            elsewhere = handshake.Identity.unpack(b"")
            identities = [one if rank in here else elsewhere for rank, one in enumerate(identities)]
        return connect(own, identities)

    handshake.connect = connect_in_replica


def _model(options: Namespace, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    shape = gpt_shape(256, options.sequence, options.width, options.layers, heads=4)
    model = sw.fully_shard(GPT(shape), units=Block, **how)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def _steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    around: Any,
    tokens: torch.Tensor,
    num_steps: int,
) -> None:
    for _ in range(num_steps):
        with around():
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()


def _print(seconds: dict[str, list[float]]) -> None:
    for kind, values in seconds.items():
        print(f"{kind:8} {1e3 * statistics.median(values):8.1f} ms a step")  # noqa: T201
    pairs = zip(seconds["elastic"], seconds["hsdp"], strict=True)
    ratios = sorted(elastic / hsdp for elastic, hsdp in pairs)
    middle = statistics.median(ratios)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    report = {"seconds": medians, "ratio": middle, "ratios": ratios}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"ratio    {middle:8.3f} (from {ratios[0]:.3f} to {ratios[-1]:.3f})")  # noqa: T201


if __name__ == "__main__":
    main()
