"""Training with DistributedDataParallel: `torchrun --nproc-per-node 2 ddp.py`. The numbers of the
steps are those of docs/dp_and_ddp.md.
"""

import gc
import os

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # every rank builds the same dataset
    dataset = TensorDataset(torch.randn(48, 8), torch.randint(2, (48,)))
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 2).to(device))  # 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler)  # the batch of one rank
    for epoch in range(2):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        for images, targets in loader:  # 2
            loss = functional.cross_entropy(model(images.to(device)), targets.to(device))  # 3
            loss.backward()  # 4
            optimizer.step()  # 5
            optimizer.zero_grad()
        if distributed.get_rank() == 0:
            print(f"epoch {epoch}: rank 0's loss {loss.item():.3f}")


main()
gc.collect()  # free the model before its process group: gloo's threads need a living interpreter
distributed.destroy_process_group()
