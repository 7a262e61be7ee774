"""``scripts/docs``: the site has every page, searches without a server, and loads nothing from another host."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"?((?:https?:)?//[^\"\s>]+)")


def test_every_page_is_in_the_site_and_in_its_navigation(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        built = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / built).is_file()
        assert f'href="{built}"' in home, f"{page.name} is not in the navigation of mkdocs.yml"


def test_no_page_loads_anything_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert {match for page in pages for match in LOADED.findall(page.read_text(encoding="utf-8"))} == set()
    assert "fonts.googleapis.com" not in (site / "index.html").read_text(encoding="utf-8")


def test_the_search_needs_no_server(site):
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index")
    assert "checkpoint" in index
    assert "assets/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_the_finder_sees_what_a_page_would_load():
    assert LOADED.findall('<script defer src="https://unpkg.com/x"></script>') == ["https://unpkg.com/x"]
    assert LOADED.findall('<link rel="stylesheet" href="//fonts.example/css">') == ["//fonts.example/css"]
