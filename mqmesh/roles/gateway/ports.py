"""Ports of the gateway: one for each broker group, always the same one."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec

from mqmesh.errors import CorruptRecord, MQMeshError, StoreLocked
from mqmesh.roles.gateway.messages import Address

STEP: Final = 10
"""Distance between the ports of two broker groups: RocketMQ's brokers use some beside their own."""
VIP_STEP: Final = 2
"""RocketMQ's clients may take a broker's "VIP channel", whose port is so much lower."""
MOST_GROUPS: Final = 256

_log = logging.getLogger(__name__)


class _Numbers(msgspec.Struct, forbid_unknown_fields=True):
    """Content of the file.

    Attributes:
        brokers: Number of each broker group that was ever seen, from 0.
    """

    brokers: dict[str, int] = {}


class BrokerPorts:
    """Numbers that broker groups keep, and the ports that follow from them.

    Args:
        host: IPv4 address that clients are given.
        base: Port of the first group.
        listen: Listens at a port for a broker group; raises ``OSError`` where that is not possible.
        change: Replaces the document of the numbers, which workers share; called with a function
            that makes the new document from the old one, None if there is none.
    """

    def __init__(
        self,
        host: str,
        base: int,
        listen: Callable[[int, str], None],
        change: Callable[[Callable[[bytes | None], bytes]], None],
    ) -> None:
        self._host = host
        self._base = base
        self._listen = listen
        self._change = change
        self._clusters: dict[str, str] = {}
        self._numbers = _Numbers()

    def load(self, document: bytes) -> None:
        """Take the numbers that were saved.

        Raises:
            CorruptRecord: They cannot be read.
        """
        try:
            self._numbers = msgspec.json.decode(document, type=_Numbers)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptRecord(f"numbers of broker groups: {error}") from error

    def groups(self) -> dict[str, str]:
        """Return the broker groups that are served: name to cluster."""
        return dict(self._clusters)

    def serve(self, broker_name: str, cluster: str) -> None:
        """Serve a broker group at its port, if that is not done yet."""
        if broker_name in self._clusters:
            return
        numbers = self._numbers.brokers
        if broker_name not in numbers:
            if len(numbers) >= MOST_GROUPS:
                _log.error(
                    "no port for broker group %s: %d are the limit", broker_name, MOST_GROUPS
                )
                return
            try:
                self._change(partial(self._with_number, broker_name))
            except StoreLocked:
                _log.info("broker group %s waits: another worker changes the ports", broker_name)
                return
            except MQMeshError as error:
                # Another number after a restart would send clients to another broker group.
                self._numbers.brokers.pop(broker_name, None)
                _log.error("broker group %s is not served: %s", broker_name, error)
                return
        port = self.address(broker_name).port
        try:
            self._listen(port, broker_name)
        except OSError as error:
            _log.error("broker group %s is not served: %s", broker_name, error)
            return
        self._clusters[broker_name] = cluster
        _log.info("broker group %s is served at %s", broker_name, self.address(broker_name))

    def _with_number(self, broker_name: str, document: bytes | None) -> bytes:
        """Return the document with a number for a broker group."""
        if document is not None:
            self.load(document)
        numbers = self._numbers.brokers
        numbers.setdefault(broker_name, max(numbers.values(), default=-1) + 1)
        return msgspec.json.encode(self._numbers)

    def address(self, broker_name: str) -> Address:
        """Return where clients find a broker group.

        Raises:
            KeyError: It has no number yet.
        """
        port = self._base + STEP * self._numbers.brokers[broker_name]
        return Address(self._host, port, self._clusters.get(broker_name, ""))
