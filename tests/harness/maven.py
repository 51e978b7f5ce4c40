"""Java archives of Maven Central, for tests that ask RocketMQ's own classes."""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from fcntl import LOCK_EX, flock
from pathlib import Path

from harness.debian_package import leave_out

CENTRAL = "https://repo1.maven.org/maven2"
DOWNLOAD_S = 60


def maven_jars(archives: dict[str, str]) -> list[Path]:
    """Returns the paths of archives; fetched once a machine. Without access, see ``leave_out``.

    Args:
        archives: SHA-256 of each, by its path below Maven Central.
    """
    folder = Path(tempfile.gettempdir()) / f"mqmesh-maven-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = [folder / Path(path).name for path in archives]
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        for place, (path, digest) in zip(found, archives.items(), strict=True):
            if not place.exists():
                _fetch(place, f"{CENTRAL}/{path}", digest)
    return found


def _fetch(place: Path, url: str, digest: str) -> None:
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_S) as answer:
            data = answer.read()
    except OSError as error:
        leave_out(f"{url}: {error}")
    assert hashlib.sha256(data).hexdigest() == digest, f"{url} is another archive"
    part = place.with_suffix(".part")
    part.write_bytes(data)
    part.rename(place)
