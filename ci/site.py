"""What mkdocs.yml needs beside mkdocs: pages for files of the repository, and the public names for the reference.

A page in docs/ links to ../examples/fsdp.py, as GitHub needs it. In the site this is a page with the text of that file,
or with the list of the files in a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "examples",
    "benchmarks",
    "tests/selection.py",
)
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".sbatch": "sh"}


def on_files(files: Files, config: Any) -> None:
    """Add a page for each file and folder of SHOWN."""
    for name in SHOWN:
        top = ROOT / name
        found = [top, *sorted(top.rglob("*"))] if top.is_dir() else [top]
        for path in found:
            if path == top or is_shown(path):
                files.append(File.generated(config, page_of(path), content=text_of(path)))


def is_shown(path: Path) -> bool:
    """Return whether a file or folder of a folder is shown: not what running it has written."""
    return path.suffix in LANGUAGES or (path.is_dir() and path.name != "__pycache__")


def page_of(path: Path) -> str:
    """Return the place in the site of a file or folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "overview.md"  # mkdocs takes a README.md for an index.md
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return name if path.suffix == ".md" else f"{name}/index.md" if path.is_dir() else f"{name}.md"


def text_of(path: Path) -> str:
    """Return the Markdown of the page for a file or folder."""
    if path.is_dir():
        names = sorted(one.name for one in path.iterdir() if is_shown(one))
        return f"# {path.name}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = path.read_text()
    return (
        text
        if path.suffix == ".md"
        else f"# {path.name}\n\n~~~~{LANGUAGES.get(path.suffix, '')}\n{text}~~~~\n"
    )


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links between files of the repository links between pages of the site."""
    place = Path(page.file.src_uri).parent
    folder = (ROOT if page.file.generated_by else ROOT / "docs") / place

    def changed(link: re.Match[str]) -> str:
        target = (folder / link[1]).resolve()
        if ":" in link[1] or not link[1] or not target.exists():
            return link[0]
        return f"]({os.path.relpath(page_of(target), place)}{link[2] or ''})"

    return re.sub(r"\]\(([^)#]*)(#[^)]*)?\)", changed, markdown)


class PublicNames(griffe.Extension):
    """Corrects what griffe reads from the sources."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Make dualdist.allreduce the function, and not the module of the same name: collectives/allreduce.py.

        Methods without a docstring get that of the method which they override.
        """
        for name, member in list(pkg.members.items()):
            if isinstance(member, griffe.Alias) and member.target_path.startswith(pkg.path):
                home = pkg.modules_collection[member.target_path]
                if isinstance(home, griffe.Module) and name in home.members:
                    pkg.set_member(name, griffe.Alias(name, home[name]))
        for one in classes(pkg):
            for base in one.mro():
                for name, member in one.members.items():
                    if not member.is_alias and member.docstring is None and name in base.members:
                        member.docstring = base.members[name].docstring


def classes(owner: griffe.Module) -> Iterator[griffe.Class]:
    """Yield the classes of a module and of the modules in it."""
    for member in owner.members.values():
        if isinstance(member, griffe.Class):
            yield member
        elif isinstance(member, griffe.Module):
            yield from classes(member)
