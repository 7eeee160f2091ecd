"""Real Horovod as a backend. Only this folder and native/ import `horovod`."""
