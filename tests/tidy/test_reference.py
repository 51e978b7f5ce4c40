"""The pages below docs/reference are what the code says."""

from __future__ import annotations

from reference_pages import stored


def test_the_stored_pages_are_those_that_the_code_makes():
    assert stored.stale() == [], "run scripts/reference"


def test_a_stale_page_is_found(monkeypatch):
    monkeypatch.setitem(stored.PAGES, "alarms.md", lambda: "another page")
    assert stored.stale() == ["alarms.md"]
