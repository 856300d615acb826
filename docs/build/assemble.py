"""The sources of the site: docs/, with parts of README.md and generated references put in.

A line ``<!-- README: Options -->`` of a page is replaced by the section of that name without its
heading, and ``<!-- generated: NAME -->`` by what `docs.build.reference` makes. So each fact is
in one place, and the pages can be read without the site, too.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from docs.build.markdown import outside_code, sections_of, slug

__all__ = ["assemble"]

_README = re.compile(r"^<!-- README: (.+) -->$", re.MULTILINE)
_GENERATED = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
_TARGET = re.compile(r"(\]\()([^)\s]+)(\))")
_FILE_AS_TEXT = re.compile(r"\[[\w/]+\.md\](?=\((\w[\w-]*\.md)[#)])")
# Files outside docs/ that pages link to, and the pages that stand for them.
_PAGES = {"CHANGELOG.md": "changelog.md", "configs/stdlib.toml": "configuration.md"}


def assemble(root: Path, out: Path, generated: Mapping[str, Callable[[], str]]) -> None:
    """Write the pages of the repository ``root`` to ``out``.

    Args:
        root: has README.md and docs.
        out: a directory; what is in it is removed.
        generated: makers of the parts of pages, by name.

    Raises:
        KeyError: a page names a section or a part that does not exist.
    """
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(root / "docs", out, ignore=shutil.ignore_patterns("build"))
    sections = sections_of((root / "README.md").read_text(encoding="utf-8"))
    pages = {page: page.read_text(encoding="utf-8") for page in out.glob("*.md")}
    homes = {
        slug(name): page.name for page, text in pages.items() for name in _README.findall(text)
    }
    rebase = partial(_rebase, homes=homes)
    for page, text in pages.items():
        whole = _README.sub(lambda found: rebase(sections[found[1]], "docs/"), text)
        whole = _GENERATED.sub(lambda found: generated[found[1]](), whole)
        page.write_text(_with_titles(rebase(whole, ""), pages, out), encoding="utf-8")
    changelog = rebase((root / "CHANGELOG.md").read_text(encoding="utf-8"), "docs/")
    (out / "changelog.md").write_text(changelog, encoding="utf-8")


def _with_titles(text: str, pages: Mapping[Path, str], folder: Path) -> str:
    """Links whose words are the name of a file get the title of that page instead."""

    def title(found: re.Match[str]) -> str:
        page = pages.get(folder / found[1])
        return found[0] if page is None else f"[{page.splitlines()[0].removeprefix('# ')}]"

    return _FILE_AS_TEXT.sub(title, text)


def _rebase(text: str, folder: str, homes: Mapping[str, str]) -> str:
    """Links from a file of the repository as links between pages of the site.

    ``folder`` is that of pages as the file names it: "docs/" in README.md.
    """

    def target(found: re.Match[str]) -> str:
        path, _, anchor = found[2].partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            return found[0]
        if folder:  # a file at the root
            path = path.removeprefix(folder) if path.startswith(folder) else f"../{path}"
        if path in ("../README.md", "../"):  # the section's page, whose title is another
            return (
                f"{found[1]}{homes[anchor]}{found[3]}"
                if anchor
                else f"{found[1]}index.md{found[3]}"
            )
        path = _PAGES.get(path.removeprefix("../"), path) if path.startswith("../") else path
        return f"{found[1]}{path}{'#' + anchor if anchor else ''}{found[3]}"

    return outside_code(text, lambda part: _TARGET.sub(target, part))
