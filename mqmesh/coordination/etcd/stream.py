"""The helper thread that watches groups in etcd: reads them, then receives their changes."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from mqmesh.coordination.etcd.gateway import EtcdRefusal, Gateway
from mqmesh.coordination.etcd.keys import EtcdKeys, range_end
from mqmesh.coordination.etcd.messages import (
    RANGE,
    EtcdKeyValue,
    KeyEvent,
    RangeAnswer,
    WatchResult,
    range_of,
    watch_of,
)
from mqmesh.coordination.interface import CoordinatorUnavailable
from mqmesh.errors import RemoteProtocolError, TransportError
from mqmesh.transport.interface import Transport

SILENCE_MS: Final = 3_000
"""Silence after which a stream is begun anew at the next member: its own may be cut off. Renewals
of sessions prevent such a silence."""
AGAIN_MS: Final = 300
"""Pause after a stream that ended."""

_log = logging.getLogger(__name__)


class GroupStream:
    """One stream of all watched groups.

    Args:
        transport: Transport whose loop runs the callbacks; it has threads.
        gateway: Gateway for this thread alone.
        keys: Keys of the cluster.
        timeout_ms: Time for the read of a group.
        on_read: Called with a group that was read, its keys, and the time of the request
            (monotonic clock).
        on_events: Called with a group, and its changes.
    """

    def __init__(
        self,
        transport: Transport,
        gateway: Gateway,
        keys: EtcdKeys,
        timeout_ms: int,
        on_read: Callable[[str, list[EtcdKeyValue], int], None],
        on_events: Callable[[str, list[KeyEvent]], None],
    ) -> None:
        self._transport = transport
        self._loop, self._clock = transport.loop, transport.clock
        self._gateway = gateway
        self._keys = keys
        self._timeout_ms = timeout_ms
        self._on_read = on_read
        self._on_events = on_events
        self._thread = transport.executor("etcd-watch")
        self._wanted: frozenset[str] = frozenset()
        self._changed = transport.flag()
        self._is_running = False
        self._closed = False

    def follow(self, groups: frozenset[str]) -> None:
        """Watches these groups from now on, and reads all of them anew."""
        self._wanted = groups
        self._wake()
        if groups and not self._is_running and not self._closed:
            self._is_running = True
            self._thread.submit(self._run)

    def close(self) -> None:
        """Ends the stream: no callback is called any more."""
        self._closed = True
        self._wake()
        self._thread.shutdown(wait=False)

    # ---- In the thread ---------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            self._changed.clear()
            groups = self._wanted
            if not groups:
                self._gateway.close()
                self._changed.wait()
                continue
            try:
                self._watch(groups)
            except (TransportError, RemoteProtocolError, CoordinatorUnavailable) as error:
                if not self._changed.is_set():
                    _log.info("groups are read again at another member of etcd: %s", error)
            except EtcdRefusal as error:
                _log.error("groups are not watched: %s", error)
            except Exception:
                _log.exception("groups are not watched for now")
            if not self._changed.is_set():
                self._gateway.leave()
                self._changed.wait(AGAIN_MS / 1_000)
        self._gateway.close()

    def _watch(self, groups: frozenset[str]) -> None:
        requests = []
        by_prefix = {self._keys.group(group): group for group in groups}
        for prefix, group in by_prefix.items():
            end = range_end(prefix)
            sent_ms = self._clock.monotonic_ms()
            found = self._gateway.ask(
                RANGE, range_of(prefix, end), RangeAnswer, sent_ms + self._timeout_ms
            )
            self._call_in_loop(partial(self._on_read, group, found.kvs, sent_ms))
            requests.append(watch_of(prefix, end, found.header.revision + 1))
        for result in self._gateway.watch(requests, SILENCE_MS):
            if self._changed.is_set():
                return
            self._report_events(by_prefix, result)

    def _report_events(self, by_prefix: dict[bytes, str], result: WatchResult) -> None:
        changed: dict[str, list[KeyEvent]] = {}
        for event in result.events:
            prefix = b"/".join(event.kv.key.split(b"/")[:4]) + b"/"
            if prefix in by_prefix:
                changed.setdefault(by_prefix[prefix], []).append(event)
        for group, events in changed.items():
            self._call_in_loop(partial(self._on_events, group, events))

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        if not self._closed:
            self._loop.call_soon_threadsafe(callback)

    # ---- In the loop -----------------------------------------------------------------

    def _wake(self) -> None:
        self._changed.set()
        self._gateway.interrupt()
