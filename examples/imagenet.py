"""Train a ResNet-50 on ImageNet, with what Goyal et al. (https://arxiv.org/abs/1706.02677) and torchvision use.

    python examples/imagenet.py --synthetic                                  # small random images, on a CPU
    torchrun --nproc-per-node 8 examples/imagenet.py --data-dir /data/imagenet --bf16 --channels-last
    horovodrun -np 8 python examples/imagenet.py --data-dir /data/imagenet
    mpirun -np 8 python examples/imagenet.py --data-dir /data/imagenet
    srun --ntasks-per-node 8 python examples/imagenet.py --data-dir /data/imagenet --checkpoint-dir runs/1

The learning rate grows with the number of processes, and is warmed up over the first epochs. Labels are smoothed; norms
and biases do not decay; averaged weights are validated, too. --checkpoint-dir saves each epoch, and resumes.
It was run with --synthetic and with a folder of a few images, not with all of ImageNet.
Needs `pip install '.[examples]'`.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from report import log
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import dualdist as hvd

parser = argparse.ArgumentParser(description="Train a ResNet-50 on all processes.")
add = parser.add_argument
data_of = parser.add_mutually_exclusive_group(required=True)
data_of.add_argument("--data-dir", type=Path, help="folder with train/CLASS/IMAGE and val/CLASS/IMAGE")
data_of.add_argument("--synthetic", action="store_true", help="64 random images of 64 x 64 pixels")
add("--model", default="resnet50", help="classification model of torchvision (%(default)s)")
add("--epochs", type=int, help="passes over the images (90; with --synthetic 2)")
add("--batch-size", type=int, help="images per batch and process (32; with --synthetic 8)")
add("--lr", type=float, default=0.0125, help="learning rate of one process (%(default)s)")
add("--warmup-epochs", type=int, default=5, help="linear, before the cosine; at most half of all (%(default)s)")
add("--weight-decay", type=float, default=5e-5, help="of weights; not of norms and biases (%(default)s)")
add("--label-smoothing", type=float, default=0.1, help="(%(default)s)")
add("--ema", type=float, default=0.999, help="how much averaged weights keep in each step (%(default)s)")
add("--bf16", action="store_true", help="compute in bfloat16")
add("--channels-last", action="store_true", help="lay out images and weights as tensor cores prefer them")
add("--workers", type=int, default=0, help="processes that read images, for each rank (%(default)s)")
add("--checkpoint-dir", type=Path, help="save each epoch there, and resume from the last one")
settings = parser.parse_args()
epochs = settings.epochs or (2 if settings.synthetic else 90)
batch_size = settings.batch_size or (8 if settings.synthetic else 32)


def read_data() -> tuple[Any, Any, int]:
    """Return the images to train on, those to validate on, and the number of classes."""
    from torchvision import datasets
    from torchvision.transforms import v2 as transforms

    size = 64 if settings.synthetic else 224
    to_tensor = (transforms.ToImage(), transforms.ToDtype(torch.float32, scale=True))
    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    changes = (transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip())
    crop = (transforms.Resize(size * 8 // 7), transforms.CenterCrop(size))
    change, keep = (transforms.Compose([*first, *to_tensor, normalize]) for first in (changes, crop))
    if settings.synthetic:
        random = functools.partial(datasets.FakeData, image_size=(3, 64, 64), num_classes=10)
        return random(64, transform=change), random(16, transform=keep, random_offset=64), 10
    train = datasets.ImageFolder(settings.data_dir / "train", change)
    return train, datasets.ImageFolder(settings.data_dir / "val", keep), len(train.classes)


@torch.no_grad()
def accuracy_of(model: nn.Module) -> float:
    """Return the share of validation images that are classified right. Collective: one rank takes each image."""
    hvd.broadcast_parameters(dict(model.named_buffers()), root_rank=0)  # batch norm's differ between ranks
    model.eval()
    correct = hvd.metrics.Mean()
    for images, labels in val_loader:
        with autocast():
            predicted = model(images.to(device, memory_format=layout)).argmax(1)
        correct.update((predicted == labels.to(device)).float())
    return correct.compute().item()


from torchvision import models  # noqa: E402 (--help works without it)

hvd.init()  # joins the world that the launcher started
hvd.seed_everything(0, rank_offset=True)  # each rank changes its images in its own way
device = hvd.device()  # this process's GPU, or the CPU
layout = torch.channels_last if settings.channels_last else torch.contiguous_format
autocast = functools.partial(torch.autocast, device.type, torch.bfloat16, enabled=settings.bf16)
train, val, num_classes = read_data()
sampler = hvd.DistributedSampler(train, drop_last=True)
loader = DataLoader(train, batch_size, sampler=sampler, drop_last=True, num_workers=settings.workers)
val_sampler = hvd.DistributedSampler(val, shuffle=False, pad=False)
val_loader = DataLoader(val, batch_size, sampler=val_sampler, num_workers=settings.workers)

model = models.get_model(settings.model, num_classes=num_classes).to(device, memory_format=layout)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # equal weights on all processes
weights = [param for param in model.parameters() if param.ndim > 1]
others = [param for param in model.parameters() if param.ndim <= 1]
groups = [{"params": weights, "weight_decay": settings.weight_decay}, {"params": others}]
sgd = torch.optim.SGD(groups, hvd.lr.scaled(settings.lr), momentum=0.9, nesterov=True)
optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
warmup = max(1, min(settings.warmup_epochs, epochs // 2) * len(loader))
cosine = CosineAnnealingLR(optimizer, T_max=max(1, epochs * len(loader) - warmup))
scheduler = hvd.lr.warmup(optimizer, warmup, then=cosine)  # from the learning rate of one process
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema), use_buffers=True)
state: dict[str, Any] = {
    "model": model,
    "optimizer": optimizer,
    "scheduler": scheduler,
    "ema": ema,
    "sampler": sampler,
    "epoch": 0,
}

manager = hvd.checkpoint.CheckpointManager(settings.checkpoint_dir, state) if settings.checkpoint_dir else None
if manager:
    manager.restore_latest()
for epoch in range(state["epoch"], epochs):
    sampler.set_epoch(epoch)  # another order in each epoch; in a resumed one, `loader` yields only the rest
    model.train()
    losses = hvd.metrics.Mean()
    for images, labels in loader:
        optimizer.zero_grad()
        with autocast():
            logits = model(images.to(device, memory_format=layout))
        labels = labels.to(device)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=settings.label_smoothing)
        loss.backward()  # from here on, gradients are the mean over all processes
        optimizer.step()
        scheduler.step()
        ema.update_parameters(model)
        losses.update(loss, len(labels))
        sampler.advance(len(labels))
        if manager:
            manager.step()
    mean, accuracy, averaged = losses.compute(), accuracy_of(model), accuracy_of(ema)
    log(f"epoch {epoch + 1}: loss {mean:.4f}, accuracy {accuracy:.4f} ({averaged:.4f} with averaged weights)")
    state["epoch"] = epoch + 1
    if manager:
        manager.save()
