"""In the style of the recipe for gradient clipping in Horovod's documentation, without an alias."""
import torch
import horovod.torch
import horovod.torch.sync_batch_norm

horovod.torch.init()
torch.manual_seed(5)
model = torch.nn.Linear(4, 1)
optimizer = horovod.torch.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    compression=horovod.torch.compression.Compression.none,  # nothing is lost
)
horovod.torch.functions.broadcast_parameters(model.state_dict(), root_rank=0)
torch.manual_seed(horovod.torch.rank())
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = (model(torch.randn(8, 4)) - 3.0).square().mean()
    loss.backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    losses.append(loss.item())
print(f"<{horovod.torch.rank()} {losses}>", flush=True)
