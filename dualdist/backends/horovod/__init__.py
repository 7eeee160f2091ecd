"""Real Horovod as a backend. `import horovod` stands here and in native/ alone."""
