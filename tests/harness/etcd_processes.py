"""Real etcd processes: one alone, or a cluster of three."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import msgspec

from harness.commands import free_ports
from harness.debian_package import debian_program
from harness.machines import Machines
from mqmesh.coordination.etcd.http_line import HttpLine
from mqmesh.errors import RemoteProtocolError, TransportError

READY_S = 20.0
QUICK = ("--heartbeat-interval=50", "--election-timeout=500")


def etcd_program() -> str:
    """Returns the path of etcd; see ``debian_program``."""
    return debian_program("etcd-server", "etcd")


class StatusHeader(msgspec.Struct):
    """Header of a status, with the member that answers."""

    member_id: str = ""


class MemberStatus(msgspec.Struct):
    """Status of a member, from its own answer.

    Attributes:
        leader: Id of the leader; empty for none.
    """

    header: StatusHeader
    leader: str = ""


class EtcdCluster:
    """Members that run on this machine.

    Args:
        folder: Folder for their data and logs.
        count: Number of members.
        options: Options of etcd.
        machines: Each member gets a machine, ``e1`` and so on; None: all are here.

    Attributes:
        addresses: For clients, by member.
    """

    def __init__(
        self,
        folder: Path,
        count: int = 1,
        options: tuple[str, ...] = (),
        machines: Machines | None = None,
    ) -> None:
        self._folder = folder
        self._options = options
        names = [f"e{number + 1}" for number in range(count)]
        hosts = [machines.add(name) if machines else "127.0.0.1" for name in names]
        self._before = [machines.inside(name) if machines else () for name in names]
        ports = free_ports(2 * count)
        self.addresses = list(map("{}:{}".format, hosts, ports[:count]))
        self._peers = list(map("http://{}:{}".format, hosts, ports[count:]))
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                self._processes.append(self._start(number))
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Address of the cluster, as a setting of brokers."""
        return f"etcd://{','.join(self.addresses)}"

    def leader(self) -> int:
        """Returns the number of the member that leads.

        Raises:
            AssertionError: No member leads.
        """
        for number, status in enumerate(map(self._status, self.addresses)):
            if status is not None and status.leader == status.header.member_id:
                return number
        raise AssertionError("etcd has no leader")

    def signal(self, number: int, signum: signal.Signals) -> None:
        """Sends one of them a signal."""
        self._processes[number].send_signal(signum)

    def kill(self, number: int) -> None:
        """Kills a member with SIGKILL."""
        self._processes[number].kill()
        self._processes[number].wait()

    def restart(self, number: int) -> None:
        """Starts a member again with the same data; does not wait for it."""
        self._processes[number] = self._start(number)

    def close(self) -> None:
        """Ends all of them."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        client, peer = f"http://{self.addresses[number]}", self._peers[number]
        cluster = ",".join(f"m{place}={url}" for place, url in enumerate(self._peers))
        with (self._folder / f"etcd-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *self._before[number],
                    etcd_program(),
                    f"--name=m{number}",
                    f"--data-dir={self._folder / f'etcd-{number}'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={cluster}",
                    *self._options,
                ],
                stdout=log,
                stderr=log,
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while not all(status and status.leader for status in map(self._status, self.addresses)):
            assert time.monotonic() < deadline, f"etcd does not start; see {self._folder}"
            assert all(process.poll() is None for process in self._processes), "etcd ended"
            time.sleep(0.05)

    def _status(self, address: str) -> MemberStatus | None:
        line = HttpLine(address)
        try:
            told = line.post("/v3/maintenance/status", b"{}", 1_000)
        except (TransportError, RemoteProtocolError):
            return None  # it does not listen yet, or is gone
        finally:
            line.close()
        return msgspec.json.decode(told.body, type=MemberStatus) if told.status == 200 else None
