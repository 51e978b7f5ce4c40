"""Administration of running brokers: settings, clients, queues as they are stored, retention."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from mqmesh.errors import MQMeshError, NoRoute
from mqmesh.message import check_topic
from mqmesh.protocol.admin import (
    CleanRequest,
    CleanResult,
    ConfigChange,
    ConfigChanges,
    ConfigEntries,
    ConfigEntry,
    GetConfigRequest,
    QueueEntries,
    QueueEntriesRequest,
    UpdateConfigRequest,
)
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import AllClients, AllClientsRequest, ClientInfo
from mqmesh.sdk.admin.admin import AdminClient, check_advance
from mqmesh.transport.endpoints import endpoint_of

CLEAN_TIMEOUT_MS: Final = 60_000
"""A pass waits for a checkpoint of the store."""


class BrokerAdmin(AdminClient):
    """Administration of brokers that run; arguments as for ``AdminClient``."""

    # ---- Settings --------------------------------------------------------------------

    def config(self, broker_name: str) -> dict[int, list[ConfigEntry]]:
        """Return all settings of a broker group, by the ids of its replicas.

        Args:
            broker_name: Broker group.

        Raises:
            NoRoute: The name servers do not know it.
            TransportError: A name server or a replica does not answer.
        """
        header = encode_header(GetConfigRequest())
        code = RequestCode.GET_BROKER_CONFIG
        return {
            broker_id: decode_header(
                ConfigEntries, self._request(endpoint, code, header).header
            ).entries
            for broker_id, endpoint in self._replicas(broker_name).items()
        }

    def set_config(
        self, broker_name: str, settings: Mapping[str, Any], unset: Iterable[str] = ()
    ) -> dict[int, list[ConfigChange]]:
        """Changes settings of every replica of a broker group, from now on and over restarts.

        A replica that is down is not changed: repeat the call once it is back.

        Args:
            broker_name: Broker group.
            settings: Dotted keys and values; a text is read as TOML.
            unset: Keys that are to have the value of the configuration file again.

        Returns:
            Settings whose values changed, by the ids of the replicas.

        Raises:
            NoRoute: The name servers do not know it.
            MessageIllegal: A key may not be changed, or a value is wrong; nothing was changed.
            BrokerError, TransportError: A replica refused or did not answer; the sentence says
                which ones had done it before. Repeating the call is safe.
        """
        header = encode_header(config_request(settings, unset))
        done: dict[int, list[ConfigChange]] = {}
        for broker_id, endpoint in self._replicas(broker_name).items():
            try:
                answer = self._request(endpoint, RequestCode.UPDATE_BROKER_CONFIG, header)
            except MQMeshError as error:
                before = ", ".join(str(one) for one in done)
                done_at = f" (done already at id {before})" if done else ""
                what = str(error).removeprefix(f"broker {broker_name}: ")
                error.args = (f"broker {broker_name}, id {broker_id}: {what}{done_at}",)
                raise
            done[broker_id] = decode_header(ConfigChanges, answer.header).changes
        return done

    # ---- What is there ---------------------------------------------------------------

    def clients(self, broker_name: str) -> list[ClientInfo]:
        """Return the clients registered at the master of a broker group, by client id.

        Raises:
            NoRoute: No master of that group is known.
            TransportError: A name server or the broker does not answer.
        """
        endpoint = self._master_of(broker_name, self._masters())
        found: list[ClientInfo] = []
        while True:
            after = found[-1].client_id if found else ""
            header = encode_header(AllClientsRequest(after, self.namespace))
            answer = self._request(endpoint, RequestCode.GET_ALL_CLIENTS, header)
            page = decode_header(AllClients, answer.header)
            found += page.clients
            if not page.more:
                return found
            check_advance(endpoint, after, page.clients[-1].client_id if page.clients else "")

    def queue_entries(
        self, broker_name: str, topic: str, queue_id: int, *, start: int = 0, count: int = 32
    ) -> QueueEntries:
        """Return entries of a consume queue as they are stored; damaged ones name their problem.

        Args:
            broker_name: Broker group; its master answers.
            topic: Physical topic.
            queue_id: Message queue, from 0.
            start: Queue offset of the first entry.
            count: Most entries, 1 to 1,000.

        Raises:
            NoRoute: No master of that group is known.
            TopicNotFound: It has no such topic.
            MessageIllegal: The topic has no such queue.
            UnsupportedCommand: Its store has no consume queues.
            TransportError: A name server or the broker does not answer.
        """
        header = encode_header(QueueEntriesRequest(check_topic(topic), queue_id, start, count))
        master = {broker_name: self._master_of(broker_name, self._masters())}

        def ask(endpoint: str) -> QueueEntries:
            answer = self._request(endpoint, RequestCode.QUERY_CONSUME_QUEUE, header)
            return decode_header(QueueEntries, answer.header)

        return self._each(master, ask)[broker_name]

    def clean(self, broker_name: str, *, dry_run: bool = False) -> CleanResult:
        """Runs a pass of retention at the master of a broker group now, at any hour of the day.

        Its other limits count: ``storage.file_reserved_time``, ``storage.delete_files_batch_max``.

        Args:
            broker_name: Broker group.
            dry_run: Only report the segments that would go.

        Raises:
            NoRoute: No master of that group is known.
            SystemBusy: It is doing so already.
            UnsupportedCommand: Its store removes nothing by itself.
            BrokerError, TransportError: It failed, or did not answer.
        """
        answer = self._request(
            self._master_of(broker_name, self._masters()),
            RequestCode.DELETE_EXPIRED_COMMITLOG,
            encode_header(CleanRequest(dry_run)),
            max(self._timeout_ms, CLEAN_TIMEOUT_MS),
        )
        return decode_header(CleanResult, answer.header)

    def _replicas(self, broker_name: str) -> dict[int, str]:
        """Endpoints of a group's replicas, by id; the master's first."""
        groups = {one.broker_name: one for one in self.cluster().brokers}
        if broker_name not in groups:
            known = ", ".join(sorted(groups)) or "none"
            raise NoRoute(f"no broker group {broker_name!r}; there are {known}")
        addresses = groups[broker_name].addresses
        return {one: endpoint_of(addresses[one].tcp) for one in sorted(addresses)}


def config_request(settings: Mapping[str, Any], unset: Iterable[str]) -> UpdateConfigRequest:
    """Return a request to change settings.

    Args:
        settings: Dotted keys and values; a text is read as TOML.
        unset: Keys that are to have the value of the start again.
    """
    texts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in settings.items()
    }
    return UpdateConfigRequest(texts, list(unset))
