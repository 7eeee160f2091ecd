"""Checkpoints of sharded models (FSDP2, DTensor) by torch.distributed.checkpoint."""
