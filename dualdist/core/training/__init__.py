"""Data-parallel optimizer and module, and the broadcast of parameters and of an optimizer's state."""
