"""Programs in Java of this folder, compiled once a machine."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from fcntl import LOCK_EX, flock
from pathlib import Path

from harness.debian_package import leave_out
from mqmesh.errors import ConfigError
from mqmesh.spark.jvm.java import find_java  # type: ignore[import-not-found]

COMPILE_S = 60


def java_command(program: str, jars: Path, *options: str) -> list[str]:
    """Return the command of a program, to which its arguments are added.

    Args:
        program: Its class; the source is beside this file.
        jars: Folder of the jars that it needs.
        options: Of the virtual machine.
    """
    try:
        programs = find_java().home / "bin"
    except ConfigError as error:
        leave_out(str(error))
    classes = _classes(program, jars, programs / "javac")
    return [
        str(programs / "java"),
        *("-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dfile.encoding=UTF-8"),
        *(*options, "-cp", f"{classes}:{jars}/*", program),
    ]


def _classes(program: str, jars: Path, compiler: Path) -> Path:
    """Return the folder of a program's classes."""
    source = Path(__file__).with_name(f"{program}.java")
    digest = hashlib.sha256(f"{compiler} {jars}".encode() + source.read_bytes()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"mqmesh-classes-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    classes = folder / f"{program}-{digest[:16]}"
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not classes.exists():
            part = classes.with_suffix(".part")
            options = ["-encoding", "UTF-8", "-proc:none", "-nowarn", "-cp", f"{jars}/*"]
            done = subprocess.run(
                [str(compiler), *options, "-d", str(part), str(source)],
                capture_output=True,
                text=True,
                timeout=COMPILE_S,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            part.rename(classes)
    return classes
