"""The links between the pages lead somewhere, and so do the pages that code, errors and warnings name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those that it gives itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    own = re.findall(r'<a id="([\w-]+)">', text)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}.union(own)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """Those within the repository."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            dead.append(link)
    assert dead == []


def test_each_page_that_a_file_names_is_there() -> None:
    """By its path from `docs/` on, perhaps with an anchor: in code, in texts for users, in tests and in build files."""
    code = [path for folder in ("src", "tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = [
        (path, *name)
        for path in [*code, ROOT / "Makefile", ROOT / "pyproject.toml", *PAGES]
        for name in re.findall(r"\bdocs/([\w/-]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8"))
    ]
    dead = [
        f"{path.relative_to(ROOT)}: docs/{page}#{anchor}"
        for path, page, anchor in named
        if not (there := ROOT / "docs" / page).exists() or (anchor and anchor not in anchors(there))
    ]
    assert len(named) > 40
    assert dead == []


def test_each_page_is_a_line_of_the_way_in() -> None:
    """The decisions have an index of their own, which lists each of them."""
    for folder, pages in ((ROOT / "docs", "*/*.md"), (ROOT / "docs" / "why" / "decisions", "0*.md")):
        listed = re.findall(
            r"^\| \[[^]]*\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE
        )
        there = [page.relative_to(folder).as_posix() for page in folder.glob(pages)]
        assert sorted(there) == sorted(each for each in listed if not each.endswith("/README.md"))
