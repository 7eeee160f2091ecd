"""Imported as `horovod` by a child process of a script under dualdist.compat: this folder is in its PYTHONPATH.

Horovod's own launcher and its helpers are not replaced. The processes that they start inherit the folder. horovodrun
prefers a HOROVOD_RANK that it inherits to the one that it gives out, so the copies are removed.
"""

import importlib
import os
import sys

del sys.modules["horovod"]
_is_launcher = os.path.basename(sys.argv[0]) == "horovodrun"
if _is_launcher or (sys.argv[0] == "-m" and any(name.startswith("horovod.runner.") for name in sys.orig_argv)):
    from dualdist.copies import remove_all_copies

    remove_all_copies(os.environ)
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(__file__)]
else:
    from dualdist.compat import install

    install()
importlib.import_module("horovod")
