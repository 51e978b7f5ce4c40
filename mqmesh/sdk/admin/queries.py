"""Queries for single messages: by id, by key, by their place."""

import re
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import msgspec

from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.errors import (
    BrokerError,
    InvalidArgument,
    MQMeshError,
    NoRoute,
    OffsetIllegal,
    RemoteProtocolError,
    TopicNotFound,
    TransportError,
)
from mqmesh.message import RESERVED_TOPICS, StoredMessage, check_topic, parse_message_id
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.pulling import (
    PullRequest,
    PullResponse,
    PullStatus,
    ViewMessageRequest,
)
from mqmesh.protocol.queries import (
    DEFAULT_QUERY_BYTES,
    DEFAULT_QUERY_MESSAGES,
    MAX_QUERY_MESSAGES,
    QueryMessageByIdRequest,
    QueryMessageRequest,
    QueryMessageResponse,
    decode_found,
)
from mqmesh.protocol.route import BrokerAddress, BrokerData
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.units import MAX_OFFSET, MAX_TIMESTAMP_MS

GROUP: Final = "mqmesh-query"
"""Consumer group under which single messages are pulled; it commits nothing."""

_OFFSET_ID = re.compile(r"([^#\s]+:\d{1,5})#([0-9A-Fa-f]{1,16})#([0-9A-Fa-f]{1,5})\Z")

_T = TypeVar("_T")


class QueryResult(msgspec.Struct, frozen=True):
    """Result of a query.

    Attributes:
        messages: Newest first.
        more: There are more messages than requested.
        notes: By broker group, why its part of the answer may lack messages; empty when the
            answer is whole.
        hidden: Copies that were found in topics of the system, where a delayed message waits,
            and are not among the messages.
    """

    messages: list[StoredMessage]
    more: bool = False
    notes: dict[str, str] = {}
    hidden: int = 0


class QueryClient(AdminClient):
    """Client that looks messages up, one request at a time, in the caller's thread.

    A message is found as soon as its sending was acknowledged. ``QueryResult.notes`` reports parts
    of the log that a broker's index does not cover yet, because it is being made.
    """

    def by_id(
        self,
        message_id: str,
        *,
        max_count: int = DEFAULT_QUERY_MESSAGES,
        with_system: bool = False,
    ) -> QueryResult:
        """Return the messages stored under an id: the message, its retries and dead letters.

        Args:
            message_id: 32 hex digits, from ``SendResult`` or ``StoredMessage``.
            max_count: Messages to return, 1 to 1,024.
            with_system: Also copies in topics of the system, where a delayed message waits.

        Raises:
            InvalidArgument: That is no message id.
            NoRoute: No broker is known.
            TransportError, BrokerError: No broker could answer.
        """
        parse_message_id(message_id)
        _check_count(max_count)
        header = encode_header(QueryMessageByIdRequest(message_id, max_count))
        found = self._query(self._addresses(), RequestCode.QUERY_MESSAGE_BY_ID, header, max_count)
        if with_system:
            return found
        shown = [one for one in found.messages if one.info.topic not in RESERVED_TOPICS]
        hidden = len(found.messages) - len(shown)
        return msgspec.structs.replace(found, messages=shown, hidden=hidden)

    def by_key(
        self,
        topic: str,
        key: str,
        *,
        from_ms: int = 0,
        to_ms: int = MAX_TIMESTAMP_MS,
        max_count: int = DEFAULT_QUERY_MESSAGES,
    ) -> QueryResult:
        """Return messages with a key, newest first.

        Args:
            topic: Topic; for messages that wait for a retry, the retry topic.
            key: One of the message's keys, 1 to 255 characters.
            from_ms: Smallest store timestamp, ms since 1970.
            to_ms: Largest store timestamp.
            max_count: Messages to return, 1 to 1,024.

        Raises:
            InvalidArgument: An illegal topic, key, time or count.
            TopicNotFound: The topic does not exist.
            TransportError, BrokerError: No broker could answer.
        """
        check_topic(topic)
        _check_count(max_count)
        if not 1 <= len(key) <= 255:
            raise InvalidArgument(f"a key has 1 to 255 characters, not {len(key)}")
        try:
            key.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"key {key!r} has no UTF-8 form: {error.reason}") from None
        if not 0 <= from_ms <= MAX_OFFSET or not 0 <= to_ms <= MAX_OFFSET:
            raise InvalidArgument(f"from_ms = {from_ms} and to_ms = {to_ms} must be times in ms")
        addresses = self._carriers(topic)
        request = QueryMessageRequest(topic, key, from_ms, to_ms, max_count, DEFAULT_QUERY_BYTES)
        header = encode_header(request)
        return self._query(addresses, RequestCode.QUERY_MESSAGE, header, max_count)

    def by_offset_id(self, offset_message_id: str) -> StoredMessage:
        """Return the message at a place in a broker's log; needs neither name server nor index.

        Args:
            offset_message_id: ``host:port#OFFSET#ORDINAL``.

        Raises:
            InvalidArgument: That is no offset message id, or the batch has no such message.
            OffsetIllegal: The log does not reach there, or is gone there.
            TransportError: The broker does not answer.
            BrokerError: There is no batch.
        """
        host, offset, ordinal = parse_offset_message_id(offset_message_id)
        header = encode_header(ViewMessageRequest(offset))
        answer = self._request(endpoint_of(host), RequestCode.VIEW_MESSAGE, header)
        messages = _decode_batch(answer.body, "", host, self.namespace)
        if ordinal >= len(messages):
            raise InvalidArgument(
                f"{offset_message_id}: the batch there has {len(messages)} messages only"
            )
        name = self._name_of(host)
        info = msgspec.structs.replace(messages[ordinal].info, broker_name=name)
        messages[ordinal].batch = info
        return messages[ordinal]

    def by_offset(
        self, topic: str, queue_id: int, queue_offset: int, *, broker_name: str = ""
    ) -> StoredMessage:
        """Return the message at an offset of a queue.

        Args:
            topic: Topic.
            queue_id: From 0.
            queue_offset: From 0.
            broker_name: Broker group; may be left out when one alone carries the topic.

        Raises:
            InvalidArgument: An illegal topic or number, or several brokers carry the topic.
            TopicNotFound: The topic does not exist.
            OffsetIllegal: The queue has no message there.
            TransportError, BrokerError: The broker does not answer, or refuses.
        """
        check_topic(topic)
        if not 0 <= queue_id < 1 << 32 or not 0 <= queue_offset <= MAX_OFFSET:
            raise InvalidArgument(
                f"queue {queue_id}, offset {queue_offset}: there is no such place"
            )
        name, address = self._carrier(topic, broker_name)
        header = encode_header(PullRequest(GROUP, topic, queue_id, queue_offset, max_bytes=1))
        endpoint = endpoint_of(address.tcp)
        answer = self._request(endpoint, RequestCode.PULL_MESSAGE, header)
        found = decode_header(PullResponse, answer.header)
        if found.status == PullStatus.FOUND:
            for message in _decode_batch(answer.body, name, address.tcp, self.namespace):
                if message.queue_offset == queue_offset:
                    return message
        held = f"it has those from {found.min_queue_offset} and before {found.max_queue_offset}"
        if found.min_queue_offset == found.max_queue_offset:
            held = f"it is empty, its next message gets {found.max_queue_offset}"
        raise OffsetIllegal(
            f"queue {queue_id} of {topic!r} on {name} has no message at {queue_offset}; {held}"
        )

    # ---- Helpers ---------------------------------------------------------------------

    def _addresses(self) -> dict[str, BrokerAddress]:
        found = _readers_of(self.cluster().brokers)
        if not found:
            raise NoRoute("no name server knows a running broker")
        return dict(sorted(found.items()))

    def _carriers(self, topic: str) -> dict[str, BrokerAddress]:
        """Return brokers that may have messages of a topic."""
        try:
            found = _readers_of(self.route(topic).brokers)
        except TopicNotFound:
            # It may have been made a moment ago, by its first message: brokers know first.
            return self._addresses()
        return dict(sorted(found.items()))

    def _carrier(self, topic: str, broker_name: str) -> tuple[str, BrokerAddress]:
        carriers = self._carriers(topic)
        if not broker_name and len(carriers) > 1:
            raise InvalidArgument(
                f"topic {topic!r} is on {', '.join(carriers)}: say which broker is meant"
            )
        name = broker_name or next(iter(carriers), "")
        if name not in carriers:
            raise NoRoute(f"no running replica of broker group {name!r} carries topic {topic!r}")
        return name, carriers[name]

    def _name_of(self, host: str) -> str:
        """Return the broker group at an address, "" if that cannot be found out."""
        try:
            for name, address in _readers_of(self.cluster().brokers).items():
                if address.tcp == host:
                    return name
        except (TransportError, BrokerError):
            return ""  # the message was found without them
        return ""

    def _query(
        self, addresses: dict[str, BrokerAddress], code: int, header: bytes, max_count: int
    ) -> QueryResult:
        def ask(name: str, address: BrokerAddress) -> tuple[QueryMessageResponse, Command]:
            answer = self._request(endpoint_of(address.tcp), code, header)
            return decode_header(QueryMessageResponse, answer.header), answer

        messages: list[StoredMessage] = []
        notes: dict[str, str] = {}
        more = False
        for name, outcome in _ask_all(addresses, ask).items():
            if isinstance(outcome, TopicNotFound):
                continue  # another broker has the topic
            if isinstance(outcome, MQMeshError):
                notes[name] = str(outcome)
                continue
            facts, answer = outcome
            address = addresses[name]
            messages += decode_found(
                answer.body,
                broker_name=name,
                store_host=address.tcp,
                namespace=self.namespace,
            )
            more = more or facts.more
            if facts.missing_bytes:
                notes[name] = (
                    f"{facts.missing_bytes:,} bytes of its log are not indexed yet; what stands "
                    "there was not searched"
                )
        # One broker's messages come in the order of its log, which a clock that jumped keeps.
        if len(addresses) > 1:
            messages.sort(key=lambda message: message.store_timestamp, reverse=True)
        return QueryResult(messages[:max_count], more or len(messages) > max_count, notes)


def parse_offset_message_id(text: str) -> tuple[str, int, int]:
    """Parses an offset message id.

    Returns:
        The broker's ``host:port``, commit-log offset, and ordinal inside the batch.

    Raises:
        InvalidArgument: It is not of the form ``host:port#OFFSET#ORDINAL``, both hexadecimal.
    """
    match = _OFFSET_ID.match(text)
    if match is None or int(match[2], 16) > MAX_OFFSET:
        raise InvalidArgument(
            f"offset message id {text[:80]!r} is not of the form host:port#OFFSET#ORDINAL"
        )
    return match[1], int(match[2], 16), int(match[3], 16)


def _readers_of(brokers: Iterable[BrokerData]) -> dict[str, BrokerAddress]:
    """Return the replica to ask, by broker group: its master, and without one a follower."""
    return {
        broker.broker_name: broker.addresses[min(broker.addresses)]
        for broker in brokers
        if broker.addresses
    }


def _ask_all(
    addresses: dict[str, BrokerAddress], ask: Callable[[str, BrokerAddress], _T]
) -> dict[str, _T | MQMeshError]:
    """Asks each broker; raises the last error if none could answer."""
    outcomes: dict[str, _T | MQMeshError] = {}
    last: MQMeshError | None = None
    for name, address in addresses.items():
        try:
            outcomes[name] = ask(name, address)
        except (TransportError, BrokerError, RemoteProtocolError) as error:
            outcomes[name] = last = error
    if last is not None and all(isinstance(one, MQMeshError) for one in outcomes.values()):
        raise last
    return outcomes


def _decode_batch(
    data: memoryview, broker_name: str, store_host: str, namespace: str
) -> list[StoredMessage]:
    header = check_stored(data)
    return decode_messages(
        data, header, broker_name=broker_name, store_host=store_host, namespace=namespace
    )


def _check_count(max_count: int) -> None:
    if not 1 <= max_count <= MAX_QUERY_MESSAGES:
        raise InvalidArgument(f"max_count = {max_count} must be 1 to {MAX_QUERY_MESSAGES:,}")
