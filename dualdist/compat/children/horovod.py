"""Imported as `horovod`, through PYTHONPATH, by a child process of a script under dualdist.compat."""

import importlib
import sys

from dualdist.compat import install

del sys.modules["horovod"]
install()
importlib.import_module("horovod")
