"""What a training script wraps: optimizer, module, parameters, batch norm."""
