"""Training with nn.DataParallel: `python dp.py`. Steps are numbered as in docs/dp_and_ddp.md."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

device = "cuda:0" if torch.cuda.is_available() else "cpu"
dataset = TensorDataset(torch.randn(48, 8), torch.randint(2, (48,)))
model = nn.DataParallel(nn.Linear(8, 2).to(device))  # the one line
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, targets in DataLoader(dataset, batch_size=12, shuffle=True):
    loss = functional.cross_entropy(model(images.to(device)), targets.to(device))  # steps 1 to 4
    loss.backward()  # 5
    optimizer.step()  # 6
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
