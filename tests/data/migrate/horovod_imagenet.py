"""In the style of Horovod's examples/pytorch/pytorch_imagenet_resnet50.py."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from horovod.torch import (
    Average,  # the default
    broadcast_object,
    broadcast_parameters,
)
from horovod.torch.mpi_ops import allreduce_async_, synchronize
from horovod.torch.optimizer import DistributedOptimizer as WrappedOptimizer
import horovod.torch as hvd

hvd.init()
torch.manual_seed(1 + hvd.rank())
resume_from_epoch = broadcast_object(1 if hvd.rank() == 0 else None, root_rank=0, name='resume_from_epoch')
batches_per_allreduce = 2

torch.manual_seed(3)
data = TensorDataset(torch.randn(32, 3, 4, 4), torch.arange(32) % 4)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=4 * batches_per_allreduce, sampler=sampler)
torch.manual_seed(hvd.rank())  # broadcast_parameters makes the weights equal
model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.0125 * hvd.size(), momentum=0.9, weight_decay=0.0)
optimizer = WrappedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=batches_per_allreduce, op=Average)
broadcast_parameters(model.state_dict(), root_rank=0)


class Metric(object):
    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.), torch.tensor(0.)

    def update(self, val):
        self.sum += synchronize(allreduce_async_(val.detach().clone(), name=self.name))
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


losses = []
for epoch in range(resume_from_epoch, 3):
    train_loss = Metric('train_loss')
    sampler.set_epoch(epoch)
    for inputs, target in loader:
        optimizer.zero_grad()
        for i in range(0, len(inputs), 4):
            loss = F.cross_entropy(model(inputs[i:i + 4]), target[i:i + 4])
            train_loss.update(loss)
            loss.div_(batches_per_allreduce)
            loss.backward()
        optimizer.step()
    losses.append(train_loss.avg.item())
print(f"<{hvd.rank()} {losses}>", flush=True)
