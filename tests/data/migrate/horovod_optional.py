"""In the style of scripts that import Horovod where they need it."""
import torch

try:
    import horovod.torch as hvd
except ImportError:
    hvd = None


def setup():
    from horovod.torch import broadcast_parameters as share, rank  # of this process
    hvd.init()
    return share, rank()


def train(rank, share):
	# this function is indented by tabs
	model = torch.nn.Linear(3, 1)
	share(model.state_dict(), root_rank=0)
	opt = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
	losses = []
	for step in range(4):
		opt.zero_grad()
		loss = model(torch.full((2, 3), 1.0 + rank + step)).square().mean()
		loss.backward()
		opt.step(); losses.append(loss.item())
	return losses


torch.manual_seed(6)
share, number = setup()
assert hvd is not None
print(f"<{number} {train(number, share)}>", flush=True)
