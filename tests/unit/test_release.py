"""The files that name the version of a release name the same one."""

from __future__ import annotations

import re

import dualdist

from ..helpers.world import ROOT


def test_every_file_has_the_version_and_the_date_of_the_newest_entry_of_the_changes() -> None:
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    version, date = newest.groups()
    assert dualdist.__version__ == version
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert {f"version: {version}", f"date-released: {date}"} <= set(citation)
    assert f'{{% set version = "{version}" %}}' in (ROOT / "recipe" / "meta.yaml").read_text()
