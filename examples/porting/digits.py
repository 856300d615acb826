"""A classifier of handwritten digits, wrapped by module size (FSDP1).

torchrun --nproc-per-node 2 examples/porting/digits.py
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from shardwise.fsdp import FullyShardedDataParallel as FSDP
from shardwise.fsdp.wrap import size_based_auto_wrap_policy
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(x), dim=1)


def digits(part):
    """Handwritten digits of 8 x 8 in ten classes."""
    found = load_digits()
    images = torch.tensor(found.images[part], dtype=torch.float32)[:, None] / 16
    return TensorDataset(images, torch.tensor(found.target[part]))


def train(model, loader, optimizer):
    model.train()
    total = torch.zeros(2, device=DEVICE)
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(DEVICE)), target.to(DEVICE), reduction="sum")
        loss.backward()
        optimizer.step()
        total += torch.stack([loss.detach(), torch.tensor(float(len(data)), device=DEVICE)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def test(model, loader):
    model.eval()
    total = torch.zeros(2, device=DEVICE)
    with torch.no_grad():
        for data, target in loader:
            right = model(data.to(DEVICE)).argmax(dim=1).eq(target.to(DEVICE)).sum()
            total += torch.stack([right.float(), torch.tensor(float(len(data)), device=DEVICE)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, testing = digits(slice(0, 256)), digits(slice(256, 320))
    sampler = DistributedSampler(training, world_size, rank, shuffle=True)
    train_loader = DataLoader(training, 32, sampler=sampler)
    test_loader = DataLoader(testing, 32, sampler=DistributedSampler(testing, world_size, rank))
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    model = FSDP(Net(), auto_wrap_policy=policy, device_id=DEVICE)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    results = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        results += [train(model, train_loader, optimizer), test(model, test_loader)]
        scheduler.step()
    states = model.state_dict()  # on all ranks
    results.append(sum(value.double().sum().item() for value in states.values()))
    return results


if __name__ == "__main__":
    dist.init_process_group()
    print(main())
    dist.destroy_process_group()
