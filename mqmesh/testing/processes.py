"""Real processes for tests: a cluster on free ports that can be killed and started again."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from mqmesh.sdk.admin.admin import AdminClient

READY_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 10.0
ASK_AGAIN_S: Final = 0.01
PROGRAM: Final = ("-m", "mqmesh.cli")


class RoleProcess:
    """One role in its own process; it is running once this returns.

    Args:
        role: ``namesrv``, ``broker`` or ``schedule``.
        settings: Keys and values, as after ``--set``.
        log_file: File of the process's log.
        program: Arguments of the interpreter before the role.
        before: Command and arguments before the interpreter, such as ``ip netns exec NAME``; what
            it runs has to keep its process id.
        options: Further options of the role, such as ``--health=8086``.

    Attributes:
        endpoint: Address where it listens, ``host:port``.
        pid: Id of the process.

    Raises:
        RuntimeError: The process did not become ready; the text holds its last log lines.
    """

    def __init__(
        self,
        role: str,
        settings: Mapping[str, str],
        log_file: Path,
        program: Sequence[str] = PROGRAM,
        before: Sequence[str] = (),
        options: Sequence[str] = (),
    ) -> None:
        arguments = [*before, sys.executable, *program, role, *options]
        for key, value in settings.items():
            arguments += ["--set", f"{key}={value}"]
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log
            )
        self.pid = self._process.pid
        line = self._first_line()
        words = dict(word.partition("=")[::2] for word in line.split())
        self.endpoint = words.get("endpoint", "").removeprefix("tcp://")
        if not line.startswith("READY ") or not self.endpoint:
            self.kill()
            tail = log_file.read_text(errors="replace")[-2_000:]
            raise RuntimeError(f"{role} did not become ready, it said {line!r}; its log:\n{tail}")

    @property
    def running(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process as a crash would."""
        self._process.kill()
        self._wait()

    def stop(self) -> int:
        """Requests the end of the process, and waits.

        Returns:
            Exit code of the process.
        """
        if self.running:
            self._process.terminate()
        return self._wait()

    def suspend(self) -> None:
        """Lets the process hang until ``resume``."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Ends ``suspend``."""
        os.kill(self.pid, signal.SIGCONT)

    def _wait(self) -> int:
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        found = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in found and selector.select(max(deadline - time.monotonic(), 0)):
                some = os.read(self._process.stdout.fileno(), 4_096)
                if not some:
                    break
                found += some
        return found.partition(b"\n")[0].decode(errors="replace")


class ProcessCluster:
    """Name servers and broker masters in processes of their own, which know of each other.

    Args:
        folder: Folder of stores and logs; a short path, since it also holds Unix sockets.
        namesrvs: Number of name servers.
        brokers: Names of the broker groups.
        broker_settings: Settings of every broker.
        broker_program: Program of brokers, as for ``RoleProcess``.
        keys: Folder as `mqmesh up --secure` makes it, with keys of the name servers, of each
            broker and of the administrator ``client``; None for no security.

    Attributes:
        namesrvs: The name servers' processes.
        brokers: The brokers' processes, by name.
        schedules: The schedule services that were started, by the names of their brokers.
        namesrv_addr: Addresses of the name servers, for clients.
    """

    def __init__(
        self,
        folder: Path,
        *,
        namesrvs: int = 1,
        brokers: tuple[str, ...] = ("broker-a",),
        broker_settings: Mapping[str, str] | None = None,
        broker_program: Sequence[str] = PROGRAM,
        keys: Path | None = None,
    ) -> None:
        self.folder = folder
        self._keys = keys
        self.namesrvs: list[RoleProcess] = []
        self.brokers: dict[str, RoleProcess] = {}
        self.schedules: dict[str, RoleProcess] = {}
        self._settings = dict(broker_settings or {})
        self._broker_program = broker_program
        self._addresses: dict[str, str] = {}
        try:
            for number in range(namesrvs):
                self.namesrvs.append(self._namesrv(number, "0"))
            self.namesrv_addr = ";".join(one.endpoint for one in self.namesrvs)
            for name in brokers:
                self.start_broker(name)
            self.wait_known()
        except BaseException:
            self.close()
            raise

    def start_broker(self, name: str = "broker-a") -> RoleProcess:
        """Starts a broker, or starts it again at its old address with its old data."""
        address = self._addresses.get(name)
        quoted = ", ".join(f'"{one.endpoint}"' for one in self.namesrvs)
        process = RoleProcess(
            "broker",
            {
                "broker_name": name,
                "listen_port": address.rpartition(":")[2] if address else "0",
                "namesrv_addr": f"[{quoted}]",
                "store_path_root_dir": str(self.folder / name),
                "storage.mapped_file_size_commit_log": str(64 * 1024 * 1024),
                **self.security(name),
                **self._settings,
            },
            self.folder / f"{name}.log",
            self._broker_program,
        )
        self._addresses[name] = process.endpoint
        self.brokers[name] = process
        return process

    def wait_known(self) -> None:
        """Waits until every name server knows every broker.

        A broker serves before they have; a topic made in between would be one of the brokers
        known so far, if there are any.

        Raises:
            RuntimeError: A name server does not know a broker in time.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        credentials = "" if self._keys is None else str(self._keys / "client.toml")
        for namesrv in self.namesrvs:
            with AdminClient(namesrv.endpoint, credentials=credentials) as admin:
                while missing := self._brokers_unknown_to(admin):
                    if time.monotonic() >= deadline:
                        raise RuntimeError(f"{namesrv.endpoint} hears nothing of {missing}")
                    time.sleep(ASK_AGAIN_S)

    def _brokers_unknown_to(self, admin: AdminClient) -> set[str]:
        return self.brokers.keys() - {one.broker_name for one in admin.cluster().brokers}

    def start_schedule(self, name: str = "broker-a") -> RoleProcess:
        """Starts the schedule service of a broker, or starts it again with its old data."""
        quoted = ", ".join(f'"{one.endpoint}"' for one in self.namesrvs)
        process = self.schedules[name] = RoleProcess(
            "schedule",
            {
                "broker_name": name,
                "namesrv_addr": f"[{quoted}]",
                "store_path_root_dir": str(self.folder / f"schedule-{name}"),
                "retry_ms": "50",
                **self.security(name),
            },
            self.folder / f"schedule-{name}.log",
        )
        return process

    def security(self, user: str) -> dict[str, str]:
        """Returns the settings of a role that is this user; none without security."""
        if self._keys is None:
            return {}
        return {
            "security.enable": "true",
            "security.key_file": str(self._keys / f"{user}.toml"),
            "security.access_list_file": str(self._keys / "access_list.toml"),
        }

    def restart_namesrv(self, number: int = 0) -> RoleProcess:
        """Kills a name server and starts an empty one at its address."""
        old = self.namesrvs[number]
        old.kill()
        self.namesrvs[number] = self._namesrv(number, old.endpoint.rpartition(":")[2])
        return self.namesrvs[number]

    def close(self) -> None:
        """Ends all processes."""
        for process in (*self.schedules.values(), *self.brokers.values(), *self.namesrvs):
            with contextlib.suppress(ProcessLookupError):
                process.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _namesrv(self, number: int, port: str) -> RoleProcess:
        settings = {"listen_port": port, "name": f"namesrv-{number}", **self.security("namesrv")}
        return RoleProcess("namesrv", settings, self.folder / f"namesrv-{number}.log")
