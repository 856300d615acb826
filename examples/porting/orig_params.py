"""Parameter groups and backward prefetch (FSDP1, ``use_orig_params=True``).

torchrun --nproc-per-node 2 examples/porting/orig_params.py
"""

import torch
import torch.distributed as dist
from torch import nn
from shardwise.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from shardwise.fsdp import FullyShardedDataParallel as FSDP
from shardwise.fsdp.wrap import ModuleWrapPolicy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return FSDP(
        nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 3), nn.Linear(16, 8)),
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        use_orig_params=True,
        device_id=DEVICE,
    )


def make_optimizer(model):
    decayed = [p for name, p in model.named_parameters() if "weight" in name]
    others = [p for name, p in model.named_parameters() if "weight" not in name]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def main():
    model = make_model()
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(4):
        data = torch.randn(3, 5, 8, generator=generator).to(DEVICE)
        loss = (model(data) - data.flip(1)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    ):
        saved, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    losses += [float(len(saved)), float(len(states.get("state", {})))]
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
