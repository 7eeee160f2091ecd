"""A folder for PYTHONPATH: what `import horovod` finds in the processes that a script starts."""
