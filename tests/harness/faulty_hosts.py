"""Processes whose syncs and clocks go wrong when a test wants it; ``faulty_host.c`` sees to it."""

from __future__ import annotations

import os
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_FAULTS: Final = struct.Struct("<3q")


class FaultyHosts:
    """Builds the library, and says what each process is to meet.

    Args:
        folder: For the library and the faults.
        names: Names of the processes.

    Attributes:
        folder: Folder of the library and the faults.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self._library = folder / "faulty_host.so"
        source = Path(__file__).with_name("faulty_host.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._library, source], check=True)
        for name in names:
            self.set(name)

    def before(self, name: str) -> tuple[str, ...]:
        """Returns the prefix of a process's command; empty for an unknown name."""
        if not self._file(name).exists():
            return ()
        return ("env", f"LD_PRELOAD={self._library}", f"FAULTY_HOST={self._file(name)}")

    def set(self, name: str, *, sync_errno: int = 0, sync_ms: int = 0, clock_ms: int = 0) -> None:
        """Sets the faults of a process from now on; without arguments, none."""
        descriptor = os.open(self._file(name), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, _FAULTS.pack(sync_errno, sync_ms, clock_ms), 0)
        finally:
            os.close(descriptor)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.faults"
