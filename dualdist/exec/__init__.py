"""The command `dualdist exec` and `init_method="dualdist://"`: the variables of torchrun under any launcher."""

from __future__ import annotations

from .export import export_environment as export_environment
