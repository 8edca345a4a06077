"""No link of the documentation leads nowhere, and every page is found from the index."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def _targets(page: Path) -> list[Path]:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link and not link.startswith("mailto:")]
    return [(page.parent / link).resolve() for link in links]


def test_every_link_leads_somewhere() -> None:
    broken = [f"{page.relative_to(ROOT)} → {target}" for page in PAGES for target in _targets(page) if not target.exists()]
    assert broken == []


def test_every_guide_is_found_from_the_index() -> None:
    found = set(_targets(ROOT / "docs/index.md"))
    pages = {page for folder in ("concepts", "guides", "operations") for page in (ROOT / "docs" / folder).glob("*.md")}
    assert sorted(str(page.relative_to(ROOT)) for page in pages - found) == []


def test_decisions_are_numbered_once_and_have_a_title() -> None:
    pages = sorted((ROOT / "docs/decisions").glob("*.md"))
    numbers = [page.name[:4] for page in pages]
    assert len(set(numbers)) == len(numbers)
    assert [page.name for page in pages if not page.read_text().startswith(f"# {page.name[:4]}: ")] == []
