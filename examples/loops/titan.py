"""A training loop like torchtitan's: a mesh, accumulation, torch's distributed checkpoints.

    torchrun --nproc-per-node=2 examples/loops/titan.py OUT [--steps 3] [--engine ddp]

Compared with a program that uses FSDP2, one import changes. Run it again with more steps, and it
resumes.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shardwise.fsdp import MixedPrecisionPolicy, fully_shard  # torch.distributed.fsdp's

WORDS, WIDTH, PARTS = 64, 32, 2  # PARTS: micro-batches per step
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(engine: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = (nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.0, batch_first=True) for _ in range(2))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)).to(DEVICE)
    if engine == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model[1:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def main(out: Path, engine: str, steps: int) -> list[tuple[float, float]]:
    """Train up to ``steps``; return the loss and the gradient norm of each step."""
    model = make_model(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, history = {"step": 0}, []
    if checkpoints := sorted(out.glob(f"{engine}-step-*")):
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=checkpoints[-1])
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(model, optimizer, **states)
    for step in range(state["step"], steps):
        total = torch.zeros((), device=DEVICE)
        for part in range(PARTS):
            torch.manual_seed((step * PARTS + part) * dist.get_world_size() + dist.get_rank())
            tokens = torch.randint(WORDS, (4, 13)).to(DEVICE)
            if engine == "shardwise":
                model.set_requires_gradient_sync(part == PARTS - 1)
            logits = model(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / PARTS
            loss.backward()
            total += loss.detach() / dist.get_world_size()  # the mean over all ranks
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        history.append((float(total), float(norm)))
    state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    dcp.save(state | {"step": steps}, checkpoint_id=out / f"{engine}-step-{steps}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--engine", choices=["shardwise", "ddp"], default="shardwise")
    parser.add_argument("--steps", type=int, default=3)
    dist.init_process_group()
    options = parser.parse_args()
    history = main(options.out, options.engine, options.steps)
    if dist.get_rank() == 0:
        (options.out / f"{options.engine}-{options.steps}.json").write_text(json.dumps(history))
    dist.destroy_process_group()
