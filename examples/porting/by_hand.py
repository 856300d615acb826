"""Wrapping by hand, with parameters offloaded to the host (FSDP1).

torchrun --nproc-per-node 2 examples/porting/by_hand.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from shardwise.fsdp import CPUOffload
from shardwise.fsdp import FullyShardedDataParallel as FSDP
from shardwise.fsdp.wrap import enable_wrap, wrap

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = wrap(nn.Linear(8, 16))
        self.layer2 = nn.Linear(16, 16)
        self.layer3 = wrap(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))

    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))


def main():
    torch.manual_seed(0)
    offload = CPUOffload(offload_params=DEVICE.type == "cuda")
    with enable_wrap(wrapper_cls=FSDP, cpu_offload=offload, device_id=DEVICE):
        model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            data = torch.randn(6, 8, generator=generator).to(DEVICE)
            model(data).pow(2).mean().backward()
        data = torch.randn(6, 8, generator=generator).to(DEVICE)
        loss = model(data).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
