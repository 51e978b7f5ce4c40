"""Reports of a broker's death to a coordination engine, once the supervisor knows of it.

A session ends when it is not renewed for its whole time. A supervisor that has reaped a process
knows at once that it is dead, and ends its session: a certificate of death. The embedded
coordinator sees by itself that processes of its own machine are gone; this is for etcd, and for
one elsewhere.

All of it is done by a thread with a loop of its own: the supervisor never waits for it.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Final, Protocol

import msgspec

from mqmesh.coordination.backends import open_coordinator
from mqmesh.coordination.interface import LiveReplica
from mqmesh.errors import MQMeshError
from mqmesh.host import is_gone
from mqmesh.transport.interface import Transport

AGAIN_MS: Final = 200
TRIES: Final = 10

_log = logging.getLogger(__name__)


class ReplicaSeat(msgspec.Struct, frozen=True):
    """Place of a broker process's session: coordinator, cluster, group and replica.

    Attributes:
        coordinator: URL.
        cluster: Cluster of the group.
        group: Broker group.
        replica_id: In the group.
    """

    coordinator: str
    cluster: str
    group: str
    replica_id: int


class NotesLoop(Protocol):
    """Event loop of the thread; ``mqmesh.transport.zmq.loop.EventLoop`` is one."""

    def run(self) -> None:
        """Serves until it is stopped."""

    def close(self) -> None:
        """Releases what it has."""


class DeathNotes:
    """Thread that ends the sessions of processes that are dead.

    Args:
        members: By the names of processes.
        transport: The thread's, with keys that coordinators know.
        loop: Its loop.
    """

    def __init__(
        self,
        members: Mapping[str, ReplicaSeat],
        transport: Transport,
        loop: NotesLoop,
    ) -> None:
        self._members = dict(members)
        self._transport, self._own_loop = transport, loop
        self._loop = transport.loop
        engines = {(one.coordinator, one.cluster) for one in self._members.values()}
        self._engines = {
            (url, cluster): open_coordinator(url, transport, cluster=cluster)
            for url, cluster in sorted(engines)
        }
        self._thread = transport.run_loop(loop.run, "death-notes")

    def report(self, name: str, pid: int) -> None:
        """Reports that a process has ended, from any thread; ignores one that is no replica."""
        member = self._members.get(name)
        if member is not None:
            look = partial(self._look, member, pid, TRIES)
            self._loop.call_soon_threadsafe(look)

    def close(self) -> None:
        """Ends all reports, and closes the transport."""
        self._loop.stop()
        self._thread.join()
        for engine in self._engines.values():
            engine.close()
        self._own_loop.close()
        self._transport.close()

    def _look(self, member: ReplicaSeat, pid: int, tries: int) -> None:
        engine = self._engines[member.coordinator, member.cluster]

        def on_found(found: tuple[LiveReplica, ...] | MQMeshError) -> None:
            if isinstance(found, MQMeshError):
                again()
                return
            for one in found:
                process = one.presence.process
                if one.presence.replica_id != member.replica_id or process is None:
                    continue
                # One that was started meanwhile has a session of its own.
                if process.pid == pid and is_gone(process):
                    engine.end_session(one.session, on_ended)

        def on_ended(outcome: MQMeshError | None) -> None:
            if outcome is not None:
                again()

        def again() -> None:
            if tries > 1:
                look = partial(self._look, member, pid, tries - 1)
                self._loop.call_later(AGAIN_MS, look)
            else:
                _log.warning("the death of process %d cannot be reported to the coordinator", pid)

        engine.presences(member.group, on_found)
