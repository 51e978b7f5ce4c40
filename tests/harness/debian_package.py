"""Programs of the distribution's packages, which are unpacked and not installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path

import pytest

DOWNLOAD_S = 60


@cache
def debian_program(package: str, name: str) -> str:
    """Where a program is: on PATH, or in a folder of its own, from the distribution's package.

    Where it cannot be had its tests are left out and say why, but never in ``.ci/run``.

    Args:
        package: That has it.
        name: Of the program.
    """
    found = shutil.which(name)
    if found:
        return found
    folder = Path(tempfile.gettempdir()) / f"mqmesh-{package}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / "root" / "usr" / "bin" / name
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        why = "" if program.exists() else _download(package, folder)
    if not why:
        return str(program)
    said = f"no {name}: none on PATH, and `apt-get download {package}` gave none: {why}"
    if "MQMESH_CI_DEADLINE" in os.environ:
        pytest.fail(said)
    pytest.skip(said)


def _download(package: str, folder: Path) -> str:
    """Gets the package without installing it; returns why it could not, or nothing."""
    for old in folder.glob("*.deb"):
        old.unlink()
    unpacked = folder / "unpacked"
    try:
        for update in (False, True):
            if update:  # a bare machine knows of no packages
                _run(folder, "apt-get", "update")
            why = _run(folder, "apt-get", "download", package)
            if not why:
                packages = [str(one) for one in folder.glob("*.deb")]
                why = _run(folder, "dpkg", "-x", *packages, str(unpacked))
                break
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not why:
        unpacked.rename(folder / "root")
    return why


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
    )
    return done.stderr.strip()[-500:] if done.returncode else ""
