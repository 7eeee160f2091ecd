"""Sharded models (FSDP2, DTensor): meshes of torch, and checkpoints by torch.distributed.checkpoint."""
