"""Data-parallel optimizer, module and batch normalization, and the broadcast of parameters."""
