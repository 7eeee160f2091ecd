"""Learn MNIST's digits as Horovod's pytorch_mnist.py does, with the same network and lines of output.

    python examples/mnist.py
    torchrun --standalone --nproc-per-node 2 examples/mnist.py
    horovodrun -np 2 python examples/mnist.py
    mpirun -np 2 python examples/mnist.py                  # also srun -n 2, and dualdist run -np 2

MNIST is downloaded to --data-dir. If that fails, the script says why, and learns scikit-learn's digits instead.
Needs `pip install '.[examples]'`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from data import DATA, Data
from report import log
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dualdist as hvd

parser = argparse.ArgumentParser(description="Learn MNIST on all processes.")
add = parser.add_argument
add("--data-dir", type=Path, default=Path("data"), help="folder of MNIST (%(default)s)")
add("--epochs", type=int, help="passes over the data (1 for MNIST, 20 for scikit-learn's digits)")
add("--batch-size", type=int, default=64, help="images per batch and process (%(default)s)")
add("--test-batch-size", type=int, default=1000, help="the same for testing (%(default)s)")
add("--lr", type=float, default=0.01, help="learning rate of one process (%(default)s)")
add("--momentum", type=float, default=0.5, help="of SGD (%(default)s)")
add("--seed", type=int, default=42, help="of the weights and the order (%(default)s)")
add("--log-interval", type=int, default=100, help="batches from one line to the next (%(default)s)")
add("--fp16-allreduce", action="store_true", help="send gradients as float16")
add("--use-adasum", action="store_true", help="combine gradients with Adasum")
settings = parser.parse_args()


def mnist_or_digits() -> tuple[Data, int]:
    """Return the data, and for how many epochs to learn. Collective."""
    try:
        return DATA["mnist"](settings.data_dir), settings.epochs or 1
    except RuntimeError as error:
        log(f"{error}\nLearning scikit-learn's digits instead.")
        return DATA["digits"](settings.data_dir), settings.epochs or 20


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Upsample(28),  # scikit-learn's digits have 8 x 8 pixels, MNIST's 28 x 28
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10)),
    )


def test(net: nn.Module, loader: DataLoader[Any]) -> None:
    """Print loss and accuracy over all test images. Collective: exactly one rank tests each image."""
    net.eval()
    losses, correct = hvd.metrics.Mean(), hvd.metrics.Mean()
    with torch.no_grad():
        for images, labels in loader:
            logits, labels = net(images.to(device)), labels.to(device)
            losses.update(F.cross_entropy(logits, labels, reduction="none"))
            correct.update((logits.argmax(1) == labels).float())
    loss, accuracy = losses.compute(), 100 * correct.compute()
    log(f"Test set: Average loss: {loss:.4f}, Accuracy: {accuracy:.2f}%\n")


hvd.init()  # joins the world that the launcher started
hvd.seed_everything(settings.seed, rank_offset=True)  # each rank draws its own dropout
device = hvd.device()  # this process's GPU, or the CPU
data, epochs = mnist_or_digits()
sampler = hvd.DistributedSampler(data.train)  # each process gets its share of the images
loader = DataLoader(data.train, settings.batch_size, sampler=sampler)
test_sampler = hvd.DistributedSampler(data.val, shuffle=False, pad=False)
test_loader = DataLoader(data.val, settings.test_batch_size, sampler=test_sampler)

net = make_net().to(device)
hvd.broadcast_parameters(net.state_dict(), root_rank=0)  # equal weights on all processes
lr = settings.lr if settings.use_adasum else hvd.lr.scaled(settings.lr)  # Adasum needs no scaling
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr, settings.momentum),
    named_parameters=net.named_parameters(),
    compression=hvd.Compression.fp16 if settings.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if settings.use_adasum else hvd.Average,
)
for epoch in range(1, epochs + 1):
    sampler.set_epoch(epoch)
    net.train()
    for number, (images, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        if number % settings.log_interval == 0:
            done, percent = number * settings.batch_size, 100 * number / len(loader)
            log(f"Train Epoch: {epoch} [{done}/{len(sampler)} ({percent:.0f}%)]\tLoss: {loss:.6f}")
    test(net, test_loader)
