"""A model created on the meta device, loaded from a state dict, and saved with DCP (FSDP2).

torchrun --nproc-per-node 2 examples/porting/meta.py
"""

import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from shardwise.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, width=16, depth=3, vocabulary=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make():
    """A sharded model whose parameters are not initialized, and its optimizer."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    model.to_empty(device=DEVICE)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, generator):
    losses = []
    for _ in range(4):
        tokens = torch.randint(32, (4, 9), generator=generator).to(DEVICE)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    model, optimizer = make()
    torch.manual_seed(0)
    whole = Transformer().state_dict()  # usually loaded from a file
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = train(model, optimizer, generator)

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])

    model, optimizer = make()
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    losses += train(model, optimizer, generator)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
