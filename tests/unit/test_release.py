"""A release: the files that name its version agree, and the package index can show and install it."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..helpers.world import ROOT

FILES = ("CHANGELOG.md", "CITATION.cff", "dualdist/__init__.py", "recipe/meta.yaml")
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def version_and_date(root: Path) -> tuple[str, str]:
    """Return what the newest entry of the changes has, after comparing the other files with it."""
    changes, citation, package, recipe = ((root / name).read_text() for name in FILES)
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE)
    assert newest is not None
    version, date = newest.groups()
    assert f'__version__ = "{version}"' in package.splitlines()
    assert {f"version: {version}", f"date-released: {date}"} <= set(citation.splitlines())
    assert f'{{% set version = "{version}" %}}' in recipe
    return version, date


def test_every_file_has_the_version_and_the_date_of_the_newest_entry_of_the_changes() -> None:
    version_and_date(ROOT)


def test_the_release_script_sets_version_and_date_in_every_file(tmp_path: Path) -> None:
    for name in (*FILES, "ci/release"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(re.sub("^## .*$", "## Unreleased", changes.read_text(), count=1, flags=re.MULTILINE))
    subprocess.run([tmp_path / "ci/release", "7.8.9"], timeout=20, check=True)
    version, date = version_and_date(tmp_path)
    today = subprocess.check_output(["date", "-u", "+%F"], text=True).strip()
    assert version == "7.8.9"
    assert date <= today


def test_the_description_for_the_package_index_has_no_relative_link_and_no_part_of_the_site() -> None:
    markdown: Any = pytest.importorskip("markdown")
    name = SETUP["metadata"]["long_description"].removeprefix("file: ")
    page = markdown.markdown((ROOT / name).read_text(), extensions=["fenced_code", "tables"])
    assert page.count("<h1>") == 1
    addresses = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert [address for address in addresses if not address.startswith("https://")] == []
    assert "<!--" not in page


def test_no_extra_needs_horovod_which_pip_cannot_build() -> None:
    assert "horovod" not in " ".join(SETUP["options.extras_require"].values()).lower()
