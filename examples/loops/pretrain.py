"""A plain training loop with FSDP2's calls, a stateful loader, a checkpoint and a profile.

    torchrun --nproc-per-node=2 examples/loops/pretrain.py OUT [--steps 3] [--engine ddp]

Run it again with more steps, and it resumes with the next batch.
"""

import argparse
import json
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import shardwise as sw
from shardwise.integrations.profiler import unit_ranges


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
    blocks = (nn.TransformerEncoderLayer(32, 2, **layer) for _ in range(2))
    return nn.Sequential(nn.Embedding(64, 32), *blocks, nn.Linear(32, 64))


def main(out: Path, engine: str, steps: int) -> list[tuple[float, float]]:
    """Train up to ``steps``; return the loss and the gradient norm of each step."""
    model = make_model()
    if engine == "ddp":
        model = DistributedDataParallel(model)
    else:
        for block in model[1:-1]:
            sw.fully_shard(block)
        sw.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = torch.randint(64, (64, 13), generator=torch.Generator().manual_seed(1))
    sampler = DistributedSampler(TensorDataset(texts), seed=2)
    loader = StatefulDataLoader(TensorDataset(texts), batch_size=4, sampler=sampler)
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    step = 0
    if engine == "shardwise" and (last := sw.latest(out)) is not None:
        step = sw.load(last, **state).state["step"]
    history = []
    with nullcontext() if engine == "ddp" else unit_ranges(model), profile() as trace:
        for (tokens,) in loader:
            step += 1
            scores = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss := loss.detach())
            history.append((float(loss) / dist.get_world_size(), float(norm)))
            if step == steps:
                break
    if engine == "shardwise":
        sw.save(out / f"step-{step}", **state, step=step)
        if dist.get_rank() == 0:
            trace.export_chrome_trace(str(out / "trace.json"))
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    history = main(options.out, options.engine, options.steps)
    if dist.get_rank() == 0:
        (options.out / f"{options.engine}-{options.steps}.json").write_text(json.dumps(history))
    dist.destroy_process_group()
