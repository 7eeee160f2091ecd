"""torch's DistributedDataParallel: its parameters, methods and attributes, on the core's module."""
