"""Measure images per second with Horovod's pytorch_synthetic_benchmark.py: the same flags and lines of output.

    python examples/synthetic_benchmark.py
    torchrun --standalone --nproc-per-node 2 examples/synthetic_benchmark.py
    horovodrun -np 2 python examples/synthetic_benchmark.py
    mpirun -np 2 python examples/synthetic_benchmark.py     # also srun -n 2, and dualdist run -np 2
    torchrun --nproc-per-node 8 examples/synthetic_benchmark.py --model resnet101 --fp16-allreduce

On a GPU the defaults are Horovod's. On a CPU they are smaller, so that it takes less than a minute.
Needs `pip install '.[examples]'`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import timeit

import torch
from report import log
from torch.nn import functional as F

import dualdist as hvd

parser = argparse.ArgumentParser(description="Measure images per second, on random images of 224 x 224 pixels.")
add = parser.add_argument
add("--fp16-allreduce", action="store_true", help="use fp16 compression during allreduce")
add("--model", help="model of torchvision to benchmark (resnet50; on a CPU resnet18)")
add("--batch-size", type=int, help="input batch size (32; on a CPU 4)")
add("--num-warmup-batches", type=int, help="batches that don't count (10; on a CPU 1)")
add("--num-batches-per-iter", type=int, help="number of batches per benchmark iteration (10; on a CPU 2)")
add("--num-iters", type=int, help="number of benchmark iterations (10; on a CPU 3)")
add("--no-cuda", action="store_true", help="disables CUDA training")
add("--use-adasum", action="store_true", help="use adasum algorithm to do reduction")
settings = parser.parse_args()

from torchvision import models  # noqa: E402 (--help works without it)

if settings.no_cuda:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
hvd.init()  # joins the world that the launcher started
device = hvd.device()  # this process's GPU, or the CPU
kind = "GPU" if device.type == "cuda" else "CPU"
model_name = settings.model or {"CPU": "resnet18", "GPU": "resnet50"}[kind]
defaults = {"CPU": (4, 1, 2, 3), "GPU": (32, 10, 10, 10)}[kind]
given = (settings.batch_size, settings.num_warmup_batches, settings.num_batches_per_iter, settings.num_iters)
batch_size, warmup, batches, iters = (
    default if number is None else number for number, default in zip(given, defaults, strict=True)
)

torch.backends.cudnn.benchmark = True
model = models.get_model(model_name).to(device)
# Adasum needs no larger learning rate, except over NCCL, which sums the gradients of a host.
factor = hvd.size()
if settings.use_adasum:
    factor = hvd.local_size() if kind == "GPU" and hvd.nccl_built() else 1
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01 * factor),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if settings.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if settings.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
images = torch.randn(batch_size, 3, 224, 224, device=device)
labels = torch.randint(1000, (batch_size,), device=device)


def benchmark_step() -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if kind == "GPU":
        torch.cuda.synchronize()


log(f"Model: {model_name}")
log(f"Batch size: {batch_size}")
log(f"Number of {kind}s: {hvd.size()}")
log("Running warmup...")
timeit.timeit(benchmark_step, number=warmup)
log("Running benchmark...")
rates = []
for number in range(iters):
    seconds = timeit.timeit(benchmark_step, number=batches)
    rates.append(batch_size * batches / seconds)
    log(f"Iter #{number}: {rates[-1]:.1f} img/sec per {kind}")
mean, spread = statistics.mean(rates), 1.96 * statistics.pstdev(rates)
log(f"Img/sec per {kind}: {mean:.1f} +-{spread:.1f}")
total, total_spread = hvd.size() * mean, hvd.size() * spread
log(f"Total img/sec on {hvd.size()} {kind}(s): {total:.1f} +-{total_spread:.1f}")
