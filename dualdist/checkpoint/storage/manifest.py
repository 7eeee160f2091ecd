"""The manifest of a checkpoint: what is known about it without loading it, as JSON in the file's last 2048 bytes."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ...checks import path as checked_path
from ...errors import CheckpointError
from ...world.ranks import backend_name, size, transport_name
from .checksum import LINE_BYTES
from .opening import damaged, open_checkpoint

__all__ = (
    "COMMENT_BYTES",
    "MAGIC",
    "Manifest",
    "decode",
    "encode",
    "make_manifest",
    "read_manifest",
)

FORMAT = 1
COMMENT_BYTES = 2048
"""Bytes of the manifest with the checksum line. torch searches the archive's end record in the last 4096 bytes of the
file; with a longer comment it does not find the record in small files."""
MAGIC = "dualdist checkpoint"


@dataclass(frozen=True)
class Manifest:
    """What is known about a checkpoint without loading it."""

    step: int | None
    world_size: int
    backend: str
    transport: str
    torch: str
    saved: str
    """When it was saved, in UTC: 2026-01-31T12:00:00+00:00."""
    serial: int = 0
    """Numbers the checkpoints of a folder in the order in which they were saved."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT


def make_manifest(step: int | None, metrics: Mapping[str, float], serial: int = 0) -> Manifest:
    """Return the manifest of a checkpoint that this world saves now.

    Raises TypeError or ValueError for a metric that is not a number.
    """
    return Manifest(
        step,
        size(),
        backend_name(),
        transport_name(),
        str(torch.__version__),
        datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        serial,
        {name: float(value) for name, value in metrics.items()},
    )


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as the file holds it, without the checksum line. Raises ValueError when it is too long."""
    text = json.dumps({"magic": MAGIC, **asdict(manifest)})
    space = COMMENT_BYTES - LINE_BYTES - 1
    if len(text) > space:
        raise ValueError(
            f"`metrics` must fit into {space} bytes of JSON with the rest of the manifest, but need {len(text)} "
            "instead. Keep the numbers by which you choose a checkpoint."
        )
    return text.ljust(space).encode() + b"\n"


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint, without verifying the rest of the file. Local.

    Raises OSError, DamagedCheckpointError when there is no manifest, CheckpointError when the format is newer than
    this version of dualdist.
    """
    with open_checkpoint(checked_path("path", path)) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - COMMENT_BYTES))
        return decode(file.read(COMMENT_BYTES), Path(path))


def decode(comment: bytes, path: Path) -> Manifest:
    """Return the manifest in `comment`, the last COMMENT_BYTES bytes of the file. Errors as for `read_manifest`."""
    try:
        found = json.loads(comment[:-LINE_BYTES])
        if found.pop("magic") != MAGIC:
            raise ValueError("another magic")
        if found["format"] <= FORMAT:
            return Manifest(**found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(path, "it ends without a manifest") from error
    raise CheckpointError(
        f"`path` must be a checkpoint of format {FORMAT} or older, but {path} has format {found['format']} instead. "
        "Load it with a newer dualdist."
    )
