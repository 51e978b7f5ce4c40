"""Programs of the distribution's packages, which are unpacked and not installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from fcntl import LOCK_EX, flock
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

DOWNLOAD_S = 60


@cache
def debian_program(package: str, name: str) -> str:
    """Returns the path of a program: on PATH, or in a folder, from the distribution's package.

    Where it cannot be had its tests are left out and say why, but never in ``.ci/run``.

    Args:
        package: Package that has the program.
        name: Name of the program.
    """
    return shutil.which(name) or str(debian_folder(package) / "usr" / "bin" / name)


@cache
def debian_folder(package: str, library: str = "") -> Path:
    """Returns a folder with a package's files; where it cannot be had, as ``debian_program``.

    Args:
        package: Alone, without what it needs.
        library: Package of a library that is wanted too, with what it needs and is not installed.
    """
    folder = Path(tempfile.gettempdir()) / f"mqmesh-{package}-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    root = folder / "root"
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        why = "" if root.exists() else _download(package, library, folder)
    if why:
        leave_out(f"`apt-get download {package}` gave nothing: {why}")
    return root


def leave_out(why: str) -> NoReturn:
    """Leaves a test out, which fails in ``.ci/run``: that has all it needs."""
    if "MQMESH_CI_DEADLINE" in os.environ:
        pytest.fail(why)
    pytest.skip(why)


def _download(package: str, library: str, folder: Path) -> str:
    """Gets packages without installing them; returns why it could not, or nothing."""
    for old in folder.glob("*.deb"):
        old.unlink()
    unpacked = folder / "unpacked"
    try:
        for update in (False, True):
            if update:  # a bare machine knows of no packages
                _run(folder, "apt-get", "update")
            names = [package, *(_missing(library) if library else ())]
            why = _run(folder, "apt-get", "download", *names)
            if not why:
                break
        for one in () if why else folder.glob("*.deb"):
            why = why or _run(folder, "dpkg", "-x", str(one), str(unpacked))
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not why:
        unpacked.rename(folder / "root")
    return why


def _missing(library: str) -> list[str]:
    """Returns a package and what it needs, as far as they are not installed."""
    asked = ("apt-get", "install", "--simulate", "--no-install-recommends", library)
    done = subprocess.run(asked, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
    return re.findall(r"^Inst (\S+) \(", done.stdout, re.MULTILINE)


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
    )
    return done.stderr.strip()[-500:] if done.returncode else ""
