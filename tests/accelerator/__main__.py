"""Builds the simulated accelerator."""

from . import build

build()
