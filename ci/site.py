"""What mkdocs.yml needs beside mkdocs: pages for files of the repository, and the public names for the reference.

A page in docs/ links to ../examples/fsdp.py, as GitHub needs it. In the site this is a page with the text of that file,
or with the list of the files in a folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
SHOWN = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks", "examples")
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".sbatch": "sh", ".ipynb": "python"}


def on_files(files: Files, config: Any) -> None:
    """Add a page for each file and folder of SHOWN."""
    for name in SHOWN:
        for path in with_contents(ROOT / name):
            files.append(File.generated(config, page_of(path), content=text_of(path)))


def with_contents(path: Path) -> Iterator[Path]:
    """Yield a file or folder, and what is shown of the folder."""
    yield path
    for inner in shown(path) if path.is_dir() else []:
        yield from with_contents(inner)


def shown(folder: Path) -> list[Path]:
    """Return the files and folders of a folder, without what running it has written."""
    found = sorted(folder.iterdir())
    return [path for path in found if path.suffix in LANGUAGES or (path.is_dir() and path.name != "__pycache__")]


def page_of(path: Path) -> str:
    """Return the place in the site of a file or folder of the repository."""
    name = path.relative_to(ROOT).as_posix()
    if name == "README.md":
        return "overview.md"  # mkdocs takes a README.md for an index.md
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    if path.suffix == ".md":
        return name
    return f"{name}/index.md" if path.is_dir() else f"{name}.md"


def text_of(path: Path) -> str:
    """Return the Markdown of the page for a file or folder."""
    if path.is_dir():
        return f"# {path.name}\n\n" + "".join(f"- [{inner.name}]({inner.name})\n" for inner in shown(path))
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
        return "\n\n".join(cell if kind == "markdown" else f"~~~~python\n{cell}\n~~~~" for kind, cell in cells)
    return f"---\nsearch:\n  boost: 0.1\n---\n\n# {path.name}\n\n~~~~{LANGUAGES[path.suffix]}\n{text}~~~~\n"


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Make 404.html a page without files of the site: their addresses depend on where it is served."""
    if template_name != "404.html":
        return output_content
    return (
        '<!doctype html><html lang="en"><title>Not found</title><h1>There is no such page</h1>'
        '<p>It may have another name now: look for it from the <a href="index.html">first page</a>.</p></html>'
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
    """Makes dualdist.allreduce the function, and not the module of the same name: core/collectives/allreduce.py."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for name, member in list(pkg.members.items()):
            if isinstance(member, griffe.Alias) and member.target_path.startswith(pkg.path):
                home = pkg.modules_collection[member.target_path]
                if isinstance(home, griffe.Module) and name in home.members:
                    pkg.set_member(name, griffe.Alias(name, home[name]))
