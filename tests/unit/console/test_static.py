"""What browsers load: small, of known origin, and from here only."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from harness.console import ConsoleWorld, open_console

import mqmesh.console.app as app

STATIC = Path(app.__file__).parent / "static"
TEMPLATES = STATIC.parent / "templates"


def test_what_others_made_is_as_it_was_fetched():
    listed = [line.split() for line in (STATIC / "vendor/VERSIONS").read_text().splitlines()]
    for name, _version, digest in listed:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == digest
    there = {one.name for one in (STATIC / "vendor").iterdir()} - {"VERSIONS"}
    assert there == {name for name, _, _ in listed}


def test_files_are_small():
    files = [one for one in STATIC.rglob("*") if one.is_file()]
    assert sum(one.stat().st_size for one in files) <= 200_000
    assert sum(one.stat().st_size for one in STATIC.glob("*.js")) <= 10_240


def test_no_file_of_ours_asks_another_host():
    for one in [*STATIC.glob("*.*"), *TEMPLATES.iterdir()]:
        text = re.sub("http://(www.w3.org/2000/svg|127.0.0.1)", "", one.read_text())
        assert not re.search(r"https?://|//cdn", text), one.name


@pytest.mark.parametrize("path", sorted(TEMPLATES.iterdir()), ids=lambda one: one.name)
def test_templates_keep_to_the_content_policy(path):
    text = path.read_text()
    assert not re.search(r"\sstyle=|\son[a-z]+=|hx-on|<style|javascript:|\|\s*safe\b", text)
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)


def test_every_answer_has_the_headers():
    client = open_console(ConsoleWorld())
    for path in ("/", "/nope", "/static/live.js", "/healthz", "/api/v1/overview"):
        headers = client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
