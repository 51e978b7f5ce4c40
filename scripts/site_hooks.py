"""Hooks of mkdocs: pages that stand elsewhere or are made of the code, links that leave the site.

Called by ``mkdocs build`` through ``mkdocs.yml``; run ``scripts/site``.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from reference_pages import protocol

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages from the root of the checkout, and the one that is made."""
    files.append(File.generated(config, protocol.PAGE, content=protocol.page()))
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=_links(text, "", files)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links to files that are no pages into their names."""
    path = page.file.src_uri
    if path in PAGES.values():
        return markdown
    markdown = markdown.replace(f"*{protocol.TITLE}*", f"[{protocol.TITLE}]({protocol.PAGE})")
    return _links(markdown, "docs/" + posixpath.dirname(path), files)


def _links(text: str, folder: str, files: Files) -> str:
    def put(match: re.Match[str]) -> str:
        label, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match.group(0)
        path, _, anchor = target.partition("#")
        full = posixpath.normpath(posixpath.join(folder, path))
        page = PAGES.get(full) or full.removeprefix("docs/")
        is_page = full in PAGES or (full.startswith("docs/") and files.get_file_from_path(page))
        if not is_page:
            return f"{label} (`{full}`)" if label.strip("`") not in full else f"`{full}`"
        here = folder.removeprefix("docs").strip("/")
        link = posixpath.relpath(page, here or ".")
        return f"[{label}]({link}{'#' + anchor if anchor else ''})"

    return _LINK.sub(put, text)
