"""Learn CIFAR-10 with a ResNet-18, wrapped as torch's DistributedDataParallel wraps it.

    python examples/cifar10.py --synthetic                          # random images, without a download
    torchrun --standalone --nproc-per-node 2 examples/cifar10.py --data-dir ~/data
    horovodrun -np 2 python examples/cifar10.py --data-dir ~/data
    mpirun -np 2 python examples/cifar10.py --data-dir ~/data       # also srun -n 2, and dualdist run -np 2

On a CPU it learns some of the images only, in half a minute. --epochs 30 --images 50000 learns all of them.
Needs `pip install '.[examples]'`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from data import DATA, Data
from report import log
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Subset

import dualdist as hvd

parser = argparse.ArgumentParser(description="Learn CIFAR-10 on all processes.")
add = parser.add_argument
add("--data-dir", type=Path, default=Path("data"), help="its folder; downloaded if absent (%(default)s)")
add("--synthetic", action="store_true", help="learn 512 random images instead")
add("--images", type=int, help="how many to learn, of all processes together (all; on a CPU 256)")
add("--epochs", type=int, default=2, help="passes over the images (%(default)s)")
add("--batch-size", type=int, default=32, help="images per batch and process (%(default)s)")
add("--lr", type=float, default=0.05, help="learning rate of one process (%(default)s)")
add("--weight-decay", type=float, default=5e-4, help="(%(default)s)")
add("--seed", type=int, default=0, help="of the weights and the order (%(default)s)")
settings = parser.parse_args()


def read_data() -> Data:
    """Return CIFAR-10 or random images. Collective."""
    from torchvision.transforms import v2 as transforms

    try:
        data = DATA["fake" if settings.synthetic else "cifar10"](settings.data_dir)
    except RuntimeError as error:
        sys.exit(f"{error} Or use --synthetic." if hvd.rank() == 0 else 1)
    crop = transforms.RandomCrop(32, padding=4)
    data.train.transform = transforms.Compose([crop, transforms.RandomHorizontalFlip(), data.train.transform])
    images = settings.images or (256 if device.type == "cpu" else len(data.train))
    parts = ((data.train, images), (data.val, max(1, images // 5)))
    train, val = (Subset(part, range(min(count, len(part)))) for part, count in parts)
    return data._replace(train=train, val=val)


def make_resnet() -> nn.Module:
    from torchvision import models

    model: nn.Module = models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)  # for images of 32 x 32 pixels
    model.maxpool = nn.Identity()
    return model


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Any]) -> tuple[float, float]:
    """Return loss and accuracy over all test images. Collective: exactly one rank evaluates each image."""
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)  # batch norm's differ between ranks
    model.eval()
    losses, correct = hvd.metrics.Mean(), hvd.metrics.Mean()
    for images, labels in loader:
        logits, labels = model(images.to(device)), labels.to(device)
        losses.update(F.cross_entropy(logits, labels, reduction="none"))
        correct.update((logits.argmax(1) == labels).float())
    return losses.compute().item(), correct.compute().item()


hvd.init()  # joins the world that the launcher started
hvd.seed_everything(settings.seed, rank_offset=True)  # each rank changes its images in its own way
device = hvd.device()  # this process's GPU, or the CPU
data = read_data()
sampler = hvd.DistributedSampler(data.train, drop_last=True)
loader = DataLoader(data.train, settings.batch_size, sampler=sampler)
test_sampler = hvd.DistributedSampler(data.val, shuffle=False, pad=False)
test_loader = DataLoader(data.val, settings.batch_size, sampler=test_sampler)

model = hvd.DistributedDataParallel(make_resnet().to(device))  # equal weights on all processes from here on
optimizer = torch.optim.SGD(
    model.parameters(), hvd.lr.scaled(settings.lr), 0.9, weight_decay=settings.weight_decay, nesterov=True
)
steps = len(loader) * settings.epochs
cosine = CosineAnnealingLR(optimizer, T_max=max(1, steps - len(loader)))
scheduler = hvd.lr.warmup(optimizer, len(loader), then=cosine)  # over the first epoch
for epoch in range(settings.epochs):
    sampler.set_epoch(epoch)  # another order in each epoch
    model.train()
    losses = hvd.metrics.Mean()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # from here on, gradients are the mean over all processes
        optimizer.step()
        scheduler.step()
        losses.update(loss, len(labels))
    mean = losses.compute()
    test_loss, accuracy = evaluate(model, test_loader)
    log(f"epoch {epoch + 1}: loss {mean:.4f}, test loss {test_loss:.4f}, accuracy {accuracy:.4f}")
