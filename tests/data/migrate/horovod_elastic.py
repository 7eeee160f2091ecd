"""In the style of Horovod's examples/elastic/pytorch/pytorch_mnist_elastic.py."""
import torch
import torch.nn.functional as F

import horovod.torch as hvd
from horovod.torch.elastic import TorchState
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.common.exceptions import HorovodInternalError

hvd.init()
torch.manual_seed(4)
data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.arange(24) % 2)
sampler = ElasticSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
model = torch.nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
losses = []


@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):
        state.batch = 0
        for batch, (inputs, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            state.sampler.record_batch(batch, 4)
            losses.append(hvd.allreduce(loss.detach()).item())
        state.sampler.set_epoch(state.epoch + 1)
        state.commit()


try:
    train(TorchState(model, optimizer, epoch=0, batch=0, sampler=sampler))
except HorovodInternalError:
    raise SystemExit(3)
print(f"<{hvd.rank()} {losses}>", flush=True)
