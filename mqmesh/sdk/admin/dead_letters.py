"""Dead letters: messages that a group could not consume with all allowed retries."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import BatchHeader, check_stored, decode_messages
from mqmesh.errors import (
    CorruptBatch,
    GroupNotFound,
    NoRoute,
    RemoteProtocolError,
    TopicNotFound,
)
from mqmesh.message import (
    DLQ_PREFIX,
    PROPERTY_LAST_FAILURE,
    StoredMessage,
    check_group,
    check_topic,
    dlq_topic,
)
from mqmesh.protocol.admin import QueueStats, TopicStats, TopicStatsRequest
from mqmesh.protocol.command import decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GetGroupsRequest, GroupSummaries
from mqmesh.protocol.pulling import PullRequest, PullResponse, PullStatus
from mqmesh.protocol.retries import (
    ResendRequest,
    ResendResponse,
    ResendResult,
    ResendStatus,
    ResendTarget,
)
from mqmesh.sdk.admin.admin import check_advance
from mqmesh.sdk.admin.queries import GROUP, QueryClient
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, NamesrvAddr
from mqmesh.security.keys import Credentials
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.units import MAX_OFFSET, MAX_TIMESTAMP_MS, MIB

QUEUE_ID: Final = 0
READ_BYTES: Final = 1 * MIB
TIMEOUT_MS: Final = 10_000
"""A broker with SYNC_FLUSH may itself wait for its disk for 5 s."""
LETTERS_PER_REQUEST: Final = 64
"""Most dead letters of a request: each costs the broker the decoding of a batch."""

OnProgress = Callable[[int, int], None]
"""Callback of a scan: how many dead letters were looked at, and how many there are."""


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter.

    Attributes:
        broker_name: Broker group that has it.
        queue_offset: Its place in ``%DLQ%<group>`` there.
        message: The message; None when it cannot be decoded.
        resent_ms: When it was resent last, wall clock; 0 if it was not.
        undecodable: In place of a message, the whole batch as it is stored.
        count: Messages: more than one only for a batch that cannot be decoded.
        error: Why it cannot.
    """

    broker_name: str
    queue_offset: int
    message: StoredMessage | None
    resent_ms: int = 0
    undecodable: bytes = b""
    count: int = 1
    error: str = ""

    @property
    def reason(self) -> str:
        """Last failure of the message."""
        if self.message is None:
            return f"it cannot be decoded: {self.error}" if self.error else "it cannot be decoded"
        return self.message.property(PROPERTY_LAST_FAILURE) or ""


class GroupDeadLetters(msgspec.Struct, frozen=True):
    """The dead letters of a group.

    Attributes:
        count: Number of dead letters.
        oldest_ms: When the first of them was given up, ms since 1970.
        newest_ms: When the last one was.
    """

    count: int
    oldest_ms: int
    newest_ms: int


class DeadLetterFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of dead letters; all by default.

    Attributes:
        topic: Sent to this topic at first.
        tag: With this tag.
        key: With this key.
        message_ids: With one of these ids, upper case.
        reason: With this text in the reason; case does not matter.
        from_ms: Given up at this time or later, ms since 1970.
        to_ms: Given up at this time or before.
        resent: True for resent ones only, False for others only.
    """

    topic: str | None = None
    tag: str | None = None
    key: str | None = None
    message_ids: frozenset[str] | None = None
    reason: str | None = None
    from_ms: int = 0
    to_ms: int = MAX_TIMESTAMP_MS
    resent: bool | None = None

    def fits(self, letter: DeadLetter) -> bool:
        """Return True for a dead letter that is meant."""
        if self.resent is not None and self.resent != bool(letter.resent_ms):
            return False
        if self.reason is not None and self.reason.lower() not in letter.reason.lower():
            return False
        message = letter.message
        if message is None:
            return (self.topic, self.tag, self.key, self.message_ids) == (None,) * 4
        return (
            (self.topic is None or message.topic == self.topic)
            and (self.tag is None or message.tag == self.tag)
            and (self.key is None or self.key in message.keys)
            and (self.message_ids is None or message.message_id in self.message_ids)
            and self.from_ms <= message.store_timestamp <= self.to_ms
        )


class DeadLetterClient(QueryClient):
    """Client that reads and resends dead letters, one request at a time, in the caller's thread.

    Args:
        namesrv_addr: ``host:port`` of the name servers, as a list, or as a text separated by
            commas or semicolons.
        timeout_ms: For each answer, 1 to 3,600,000 ms.
        broker_name, credentials, namespace: As for ``AdminClient``.

    Raises:
        InvalidArgument: An address that is none.
        ConfigError: The file of credentials cannot be used.
    """

    def __init__(
        self,
        namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV,
        *,
        timeout_ms: int = TIMEOUT_MS,
        broker_name: str = "",
        credentials: str | Credentials = "",
        namespace: str | None = None,
    ) -> None:
        super().__init__(
            namesrv_addr,
            timeout_ms=timeout_ms,
            broker_name=broker_name,
            credentials=credentials,
            namespace=namespace,
        )
        self._hosts: dict[str, str] = {}

    def groups(self) -> dict[str, int]:
        """Return the consumer groups with dead letters, and how many each has, by name.

        Raises:
            TransportError, BrokerError: A name server or broker does not answer.
        """
        return {group: one.count for group, one in self.overview().items()}

    def overview(self) -> dict[str, GroupDeadLetters]:
        """Return the consumer groups with dead letters: how many each has and how old, by name.

        Raises:
            TransportError, BrokerError: A name server or broker does not answer.
        """
        names = [topic for topic in self.topics() if topic.startswith(DLQ_PREFIX)]
        masters = self._masters()
        found = {}
        for topic in names:
            stats = self._each(masters, partial(self._letters_at, topic))
            queues = [one for queues in stats.values() for one in queues if one.first_timestamp]
            count = sum(one.max_queue_offset - one.min_queue_offset for one in queues)
            if count:
                found[topic.removeprefix(DLQ_PREFIX)] = GroupDeadLetters(
                    count,
                    min(one.first_timestamp for one in queues),
                    max(one.last_update_timestamp for one in queues),
                )
        return found

    def _letters_at(self, topic: str, endpoint: str) -> list[QueueStats]:
        header = encode_header(TopicStatsRequest(topic))
        try:
            answer = self._request(endpoint, RequestCode.GET_TOPIC_STATS_INFO, header)
        except TopicNotFound:
            return []
        return decode_header(TopicStats, answer.header).queues

    def scan(
        self,
        group: str,
        wanted: DeadLetterFilter | None = None,
        *,
        newest: int = MAX_OFFSET,
        on_progress: OnProgress | None = None,
    ) -> Iterator[DeadLetter]:
        """Return the dead letters of a group, broker by broker, oldest first.

        Messages that become dead letters while this runs are left out, so that a caller that
        resends the yielded ones comes to an end.

        Args:
            group: Consumer group.
            wanted: Filter.
            newest: Look at so many of the newest dead letters of each broker group only.
            on_progress: Called with the progress.

        Raises:
            InvalidArgument: The group's name, or the filter's topic, is illegal; at once, as all
                that can be said before the first dead letter is read.
            GroupNotFound: No broker knows the group, and it has left no dead letters.
            TransportError, BrokerError: A name server or broker does not answer.
        """
        wanted = wanted or DeadLetterFilter()
        topic = dlq_topic(check_group(group))
        if wanted.topic is not None:
            check_topic(wanted.topic)
        ends = self._ends(group)
        for name, (start, end) in ends.items():
            ends[name] = max(start, end - newest), end
        return self._scan(group, topic, wanted, ends, on_progress)

    def _scan(
        self,
        group: str,
        topic: str,
        wanted: DeadLetterFilter,
        ends: dict[str, tuple[int, int]],
        on_progress: OnProgress | None,
    ) -> Iterator[DeadLetter]:
        total = sum(end - start for start, end in ends.values())
        done = 0
        for broker_name, (start, end) in ends.items():
            for letters in self._read(topic, broker_name, start, end):
                done += sum(letter.count for letter in letters)
                for letter in self._with_marks(group, broker_name, letters):
                    if wanted.fits(letter):
                        yield letter
                if on_progress is not None:
                    on_progress(min(done, total), total)

    def resend(
        self,
        group: str,
        letters: Iterable[DeadLetter],
        *,
        target: ResendTarget = ResendTarget.RETRY,
        force: bool = False,
        dry_run: bool = False,
    ) -> Iterator[tuple[DeadLetter, ResendResult]]:
        """Resends dead letters, with their number of tries set back.

        Each is resent only once, even if the call is repeated, unless it is forced. A call that
        fails in the middle can be repeated.

        Args:
            group: Consumer group.
            letters: From ``scan``; it may be the iterator itself.
            target: The group's retry topic, or the topic that each was sent to at first.
            force: Also those that were resent before.
            dry_run: Only report the outcomes.

        Returns:
            Dead letters with their outcomes.

        Raises:
            TransportError, BrokerError: A broker does not answer, or refuses all.
        """
        check_group(group)
        iterator = iter(letters)
        waiting: list[DeadLetter] = []
        while True:
            waiting += islice(iterator, LETTERS_PER_REQUEST - len(waiting))
            if not waiting:
                return
            name = waiting[0].broker_name
            now = [letter for letter in waiting if letter.broker_name == name]
            waiting = [letter for letter in waiting if letter.broker_name != name]
            results = self._ask_resend(
                name,
                ResendRequest(
                    group, [one.queue_offset for one in now], target.value, force, dry_run
                ),
            )
            yield from zip(now, results, strict=True)

    def purge(self, group: str) -> int:
        """Deletes all dead letters of a group, for good, on every broker.

        Args:
            group: Consumer group.

        Returns:
            Number of dead letters; new ones meanwhile may go or stay.

        Raises:
            InvalidArgument: The group's name is illegal.
            GroupNotFound: As for ``scan``.
            BrokerError, TransportError: As for ``delete_topic``; repeating the call is safe.
        """
        topic = dlq_topic(check_group(group))
        count = sum(end - start for start, end in self._ends(group).values())
        try:
            self.delete_topic(topic)
        except TopicNotFound:
            return 0
        return count

    # ---- Helpers ---------------------------------------------------------------------

    def _ends(self, group: str) -> dict[str, tuple[int, int]]:
        """Return where the dead-letter queue of each broker begins and ends."""
        try:
            stats = self.topic_stats(dlq_topic(group))
        except TopicNotFound:
            self._require_group(group)
            return {}
        return {
            name: (queue.min_queue_offset, queue.max_queue_offset)
            for name, one in sorted(stats.items())
            for queue in one.queues
            if queue.queue_id == QUEUE_ID
        }

    def _require_group(self, group: str) -> None:
        header = encode_header(GetGroupsRequest(group))

        def ask(endpoint: str) -> bool:
            code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
            answer = self._request(endpoint, code, header)
            return bool(decode_header(GroupSummaries, answer.header).groups)

        if not any(self._each(self._masters(), ask).values()):
            raise GroupNotFound(f"no consumer group {group!r} on a broker that runs")

    def _host_of(self, broker_name: str) -> str:
        if broker_name not in self._hosts:
            self._hosts = {name: address.tcp for name, address in self._addresses().items()}
        if broker_name not in self._hosts:
            raise NoRoute(f"no address is known of the master of broker group {broker_name!r}")
        return self._hosts[broker_name]

    def _read(
        self, topic: str, broker_name: str, start: int, end: int
    ) -> Iterator[list[DeadLetter]]:
        host = self._host_of(broker_name)
        endpoint = endpoint_of(host)
        place = start
        while place < end:
            request = PullRequest(GROUP, topic, QUEUE_ID, place, READ_BYTES)
            answer = self._request(endpoint, RequestCode.PULL_MESSAGE, encode_header(request))
            found = decode_header(PullResponse, answer.header)
            if found.status == PullStatus.FOUND:
                check_advance(endpoint, place, found.next_queue_offset)
                letters = list(_letters(answer.body, self.namespace, broker_name, host, place, end))
                if letters:
                    yield letters
            elif found.next_queue_offset <= place:
                return
            place = found.next_queue_offset

    def _with_marks(
        self, group: str, broker_name: str, letters: list[DeadLetter]
    ) -> Iterator[DeadLetter]:
        for start in range(0, len(letters), LETTERS_PER_REQUEST):
            some = letters[start : start + LETTERS_PER_REQUEST]
            offsets = [letter.queue_offset for letter in some]
            results = self._ask_resend(broker_name, ResendRequest(group, offsets, dry_run=True))
            for letter, result in zip(some, results, strict=True):
                if result.status != ResendStatus.GONE:
                    yield msgspec.structs.replace(letter, resent_ms=result.resent_ms)

    def _ask_resend(self, broker_name: str, request: ResendRequest) -> list[ResendResult]:
        endpoint = endpoint_of(self._host_of(broker_name))
        code = RequestCode.RESEND_DEAD_LETTERS
        answer = self._request(endpoint, code, encode_header(request))
        results = decode_header(ResendResponse, answer.header).results
        if len(results) != len(request.queue_offsets):
            raise RemoteProtocolError(
                f"{len(results)} results for {len(request.queue_offsets)} dead letters"
            )
        return results


def _letters(
    body: memoryview, namespace: str, broker_name: str, store_host: str, start: int, end: int
) -> Iterator[DeadLetter]:
    for header, data in iter_batches(body, check_stored):
        try:
            messages = decode_messages(
                data,
                header,
                broker_name=broker_name,
                store_host=store_host,
                namespace=namespace,
            )
        except CorruptBatch as error:
            yield _undecodable(data, header, broker_name, error)
            continue
        for message in messages:
            if start <= message.queue_offset < end:
                yield DeadLetter(broker_name, message.queue_offset, message)


def _undecodable(
    data: memoryview, header: BatchHeader, broker_name: str, error: CorruptBatch
) -> DeadLetter:
    return DeadLetter(
        broker_name,
        header.base_queue_offset,
        None,
        undecodable=bytes(data),
        count=header.message_count,
        error=str(error),
    )
