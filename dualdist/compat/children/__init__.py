"""A folder for PYTHONPATH, where processes that a script starts find `horovod`."""
