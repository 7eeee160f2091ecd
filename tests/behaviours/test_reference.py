"""docs/reference-collectives.md: its example of each collective on two ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import dualdist as hvd

from ..helpers.world import ROOT, everywhere

PAGE = (ROOT / "docs" / "reference-collectives.md").read_text()
EXAMPLES = re.findall(r"^\| `(hvd\..*)` \| `(.*)` \| `(.*)` \|$", PAGE, re.MULTILINE)


def plain(found: Any) -> Any:
    """Return tensors, and lists of tensors, as numbers."""
    if isinstance(found, torch.Tensor):
        return found.tolist()
    return [plain(one) for one in found] if isinstance(found, list) else found


@pytest.mark.ranks(2)
@everywhere
def test_each_collective_returns_what_its_example_shows() -> None:
    assert len(EXAMPLES) > 14
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]][hvd.rank()])
    for call, *shown in EXAMPLES:
        assert plain(eval(call, {"hvd": hvd, "x": x})) == eval(shown[hvd.rank()]), call
