"""A PostgreSQL of the machine's own packages, for tests and ``scripts/chaos``."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from harness.debian_package import leave_out

READY = b"database system is ready to accept connections"
# Nothing here has to survive a power cut.
OPTIONS = {
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": "",
    "max_connections": "30",
    "shared_buffers": "16MB",
    "synchronous_commit": "off",
}


def program(name: str) -> str:
    """Returns the path of a program of PostgreSQL; without it, the test is left out."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if found is None and not places:
        leave_out(f"{name} of PostgreSQL is not there; on Debian: apt install postgresql")
    return found or str(places[-1])


class Postgres:
    """A server in a folder of its own, which listens at a Unix socket only.

    Attributes:
        url: URL of its database.
    """

    def __init__(self) -> None:
        folder = self._folder = Path(tempfile.mkdtemp(prefix="mq-pg-"))
        # It refuses to run as root.
        user: dict[str, Any] = {}
        if os.getuid() == 0:
            owner = pwd.getpwnam("nobody")
            user = {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        data = folder / "data"
        subprocess.run(
            [program("initdb"), "-D", data, "-U", "mqmesh", "-A", "trust", "-E", "UTF8", "-N"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,
            **user,
        )
        self._user = user
        self.url = f"postgresql://mqmesh@/postgres?host={folder}"
        self._start()

    def _start(self) -> None:
        folder = self._folder
        options = [f"--{name}={value}" for name, value in OPTIONS.items()]
        self._process = subprocess.Popen(
            [
                program("postgres"),
                "-D",
                folder / "data",
                f"--unix_socket_directories={folder}",
                *options,
            ],
            stderr=subprocess.PIPE,
            cwd=folder,
            **self._user,
        )
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            said.append(line)
            if READY in line:
                break
        else:
            self.close()
            raise RuntimeError(f"PostgreSQL did not start: {b''.join(said).decode()}")

    def crash(self) -> None:
        """End it without a checkpoint, and start it again: commits that did not wait are lost."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.communicate()
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it at once."""
        self._process.kill()  # with its children, which see the end of the shared memory
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)
