"""Imported as `horovod` by a child process of a script under dualdist.compat: this folder is in its PYTHONPATH."""

import importlib
import sys

from dualdist.compat import install

del sys.modules["horovod"]
install()
importlib.import_module("horovod")
