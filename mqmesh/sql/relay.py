"""Relay: sends the rows of an outbox, each once, whenever it is killed.

One relay works, by its name in the row of ``RelayRow``; others wait until its beat stands still
for ``lease_ms``. Each step is one transaction and then one round of sends::

    transaction: I am still the holder · delete the rows that are stored ·
                 read the next ones, number them, write the numbers (the flight)
    send what is in flight

A batch stays in flight until it is known to be stored and safe. From its first try on only the
broker's memory and index (``is_sent``) decide that, and it is sent again under the same numbers,
by this relay or the next one, which goes on under a key of its own. So what is still on its way
is recognised whenever it comes: nothing newer has its numbers. Rows get new numbers when their
batch was refused, the broker says that it is not stored, and it cannot be sent as it is: its
queue is gone, or it is too large. While a topic has a batch in flight, no further row of it is
read: that keeps the order, and other topics go on.
"""

import logging
import random
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, Literal, Self

import msgspec

from mqmesh.clock import Clock, SystemClock
from mqmesh.errors import (
    ConfigError,
    InvalidArgument,
    LocalProtocolError,
    MessageIllegal,
    MQMeshError,
    SendInDoubt,
    SequenceConflict,
    SystemBusy,
)
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT, MessageQueue
from mqmesh.producer_key import new_key
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, NamesrvAddr, born_host
from mqmesh.sdk.connector.numbered_sender import NumberedBatch, NumberedSender
from mqmesh.sdk.producer.queue_selector import queue_index
from mqmesh.security.keys import Credentials
from mqmesh.sql.relay_table import FlightBatch, OutboxRow, RelayRow, RelayTable
from mqmesh.sql.relay_topics import RelayTopics, RowSender
from mqmesh.sql.statements import DEFAULT_NAMES, TableNames, database_errors

MOST_BLOCKED: Final = 500
"""Most topics that one read leaves out; while more of them wait, no new rows are read."""
BACKOFF_MS: Final = 1_000
WARN_EACH_MS: Final = 60_000
READ_SHARE: Final = 10
"""Without a row to send, an outbox is read for a tenth of the time at most."""

_log = logging.getLogger(__name__)


class RelayStatus(msgspec.Struct, frozen=True):
    """State of a relay.

    Attributes:
        works: True for the relay that sends; False for one that waits to take over.
        sent: Messages sent since it was made.
        in_flight: Messages that are being sent.
        oldest_ms: Age of the oldest row that waits at the last read, in ms; 0 for none.
        blocked: Topics whose rows wait, each with the reason.
    """

    works: bool
    sent: int
    in_flight: int
    oldest_ms: int
    blocked: dict[str, str]


class _LeaseLost(Exception):
    """Another relay works by now."""


class OutboxRelay:
    """Relay of an outbox: sends its rows in order, and deletes those that are stored and safe.

    Rows of one sharding key go to one queue, in the order of their ids; others to all queues in
    turn. Any number of relays may run: one works, the others take over when it is gone. A topic
    that refuses its messages holds up its own rows only. A row that no message can be made of, or
    that fits into no batch, gets an error in the database and holds up none.

    It is started and closed as a producer is, by ``start`` and ``close``, in a ``with`` block or by
    ``mqmesh.run``, and works in a thread of its own.

    Args:
        connect: Opens a connection to the database: a function that returns one of sqlite3, psycopg
            or SQLAlchemy, or an ``Engine`` of SQLAlchemy.
        namesrv_addr: As of ``AdminClient``.
        names: Names of the tables.
        lease_ms: Time without a beat after which another relay takes over, 1,000 to 600,000 ms.
        poll_ms: Pause before an empty outbox is read again, 1 to 60,000 ms and at most half of
            ``lease_ms``: the latency of a lone message.
        batch_rows: Rows that are read and sent together, 1 to 10,000.
        batch_bytes: Bytes that are read together, 1 to 16,777,216, and one more row.
        warn_age_ms: Age of the oldest row from which a warning is logged each minute, from 1 ms.
        in_doubt: Reaction to a batch of which it is unknown for good whether it is stored: ``stop``
            its topic, whose rows wait, ``send`` it (it may be there twice then), or ``drop`` it,
            which deletes its rows (it may be missing).
        lost_brokers: Broker groups that will not come back: batches that went to them are in doubt.
        max_message_size: Largest body in bytes, as of ``Outbox``.
        credentials, namespace: As of ``AdminClient``.
        make_sender: Makes the sender for a key; the default is ``NumberedSender``.
        clock: The machine's by default.

    Raises:
        InvalidArgument: A number is out of bounds.
    """

    def __init__(
        self,
        connect: Callable[[], Any] | Any,
        namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV,
        *,
        names: TableNames = DEFAULT_NAMES,
        lease_ms: int = 15_000,
        poll_ms: int = 100,
        batch_rows: int = 500,
        batch_bytes: int = 1 << 20,
        warn_age_ms: int = 60_000,
        in_doubt: Literal["stop", "send", "drop"] = "stop",
        lost_brokers: Collection[str] = (),
        max_message_size: int = MAX_MESSAGE_BYTES_DEFAULT,
        credentials: str | Credentials = "",
        namespace: str | None = None,
        make_sender: Callable[[bytes], RowSender] | None = None,
        clock: Clock | None = None,
    ) -> None:
        _check_bounds("lease_ms", lease_ms, 1_000, 600_000)
        _check_bounds("poll_ms", poll_ms, 1, min(60_000, lease_ms // 2))
        _check_bounds("batch_rows", batch_rows, 1, 10_000)
        _check_bounds("batch_bytes", batch_bytes, 1, 1 << 24)
        _check_bounds("warn_age_ms", warn_age_ms, 1, 1 << 53)
        if in_doubt not in ("stop", "send", "drop"):
            raise InvalidArgument(f"in_doubt = {in_doubt!r} must be stop, send or drop")
        self._names = names
        self._table = RelayTable(getattr(connect, "connect", connect), names, max_message_size)
        self._lease_ms, self._poll_ms = lease_ms, poll_ms
        self._batch_rows, self._batch_bytes = batch_rows, batch_bytes
        self._warn_age_ms = warn_age_ms
        self._in_doubt = in_doubt
        self._lost_brokers = frozenset(lost_brokers)
        self._clock = clock or SystemClock()
        self._chance = random.SystemRandom()
        self._holder = ""  # a name of this process, which may be forked before it works
        self._make_sender = make_sender or partial(
            _numbered_sender, namesrv_addr, lease_ms, max_message_size, credentials, namespace
        )
        self._senders: dict[str, RowSender] = {}
        # Of the holder: its row, when that was written, its key, and the next sequence.
        self._held: RelayRow | None = None
        self._beat_ms, self._key = 0, ""
        self._sequence = self._turn = 0
        # Of another holder: its row, and since when it stands still.
        self._seen: RelayRow | None = None
        self._seen_since_ms = 0
        # By their numbers: batches in flight, and why some of them were refused.
        self._flight: dict[tuple[str, int], FlightBatch] = {}
        self._refusals: dict[tuple[str, int], MQMeshError] = {}
        # Of a step: batches to send, numbers of those that were never sent, their rows, and when
        # to leave the rest to the next step.
        self._round: list[FlightBatch] = []
        self._fresh: set[tuple[str, int]] = set()
        self._rows: dict[int, OutboxRow] = {}
        self._set_aside: set[int] = set()  # rows in flight that are there and cannot be read
        self._give_up_ms = 0
        self._has_more = False
        # Rows to delete, rows to set aside, and rows of a batch where these were too many.
        self._done: list[int] = []
        self._bad: dict[int, str] = {}
        self._most_rows: dict[MessageQueue, int] = {}
        self._topics = RelayTopics(self._clock, lease_ms // 4, self._lost_brokers)
        self._pause_ms = BACKOFF_MS
        self._sent = self._oldest_ms = 0
        self._warned_ms: int | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    # ---- Life --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after ``close``, or when the relay has ended with an error."""
        return self._stopping.is_set()

    @property
    def status(self) -> RelayStatus:
        """State of the relay, for metrics and health checks."""
        return RelayStatus(
            self._held is not None,
            self._sent,
            sum(len(one.rows) for one in list(self._flight.values())),
            self._oldest_ms,
            self._topics.reasons(),
        )

    def start(self) -> None:
        """Check the tables, and begin to work in a thread.

        Raises:
            ConfigError: A table is missing.
            Exception: The database cannot be reached; its library's own error.
        """
        if self._thread is None:
            self._table.check()
            self._table.close()  # connections of sqlite3 belong to a thread
            # A program that ends without close leaves a flight, as one that is killed does.
            self._thread = threading.Thread(
                target=self._work, name="mqmesh-outbox-relay", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """End the work, and give the outbox to the next relay; idempotent.

        Raises:
            MQMeshError: It had ended with this error before.
        """
        self._stopping.set()
        if self._thread is None:
            self._shut()
        elif self._thread is not threading.current_thread():
            self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _work(self) -> None:
        try:
            self.run()
        except BaseException as error:
            _log.critical("the relay of %s has ended: %s", self._names.outbox, error)
            self._failure = error
        finally:
            self._stopping.set()

    def run(self) -> None:
        """Work in the calling thread until ``close`` is called by another one.

        A broker or database that is away is waited for.

        Raises:
            ConfigError: A table is missing.
            SequenceConflict: Another process sends under this relay's key.
        """
        try:
            while not self._stopping.is_set():
                self._stopping.wait(self.try_step() / 1_000)
            self._release()
        finally:
            self._shut()

    def _shut(self) -> None:
        self._table.close()
        self._close_senders(set())

    def try_step(self) -> int:
        """Take a step; a database or cluster that is away is an entry of the log and a pause.

        Returns:
            Pause before the next step in ms.
        """
        try:
            pause_ms = self.step()
        except _LeaseLost:
            _log.warning("another relay of %s works by now; waiting", self._names.outbox)
            self._lose()
            return self._poll_ms
        except database_errors() as error:
            _log.warning("the database of %s: %s", self._names.outbox, error)
            # The commit may have succeeded or not: read again how it stands.
            self._lose()
        except (ConfigError, SequenceConflict):
            raise
        except MQMeshError as error:
            _log.warning("the relay of %s waits: %s", self._names.outbox, error)
        else:
            self._pause_ms = BACKOFF_MS
            return pause_ms
        pause_ms, self._pause_ms = self._pause_ms, min(self._pause_ms * 2, self._lease_ms // 4)
        return pause_ms

    def _lose(self) -> None:
        self._held, self._flight, self._done = None, {}, []
        self._has_more = False

    def _release(self) -> None:
        """Let the next relay begin at once; it resolves a flight that is not done."""
        if self._held is None:
            return
        try:
            with self._table.transaction():
                if self._table.change_holder(self._held, ""):
                    self._table.delete(self._done)
        except database_errors() as error:
            _log.warning("%s: the next relay waits for the lease: %s", self._names.relay, error)
        self._lose()

    # ---- Steps -------------------------------------------------------------------------

    def step(self) -> int:
        """Take one step: a transaction, then a round of sends.

        Returns:
            Pause before the next step in ms; 0 if there is more to do.
        """
        if self._held is None and not self._take_over():
            return self._poll_ms
        if self._topics.drop_old():
            self._most_rows.clear()
        began_ms = self._clock.monotonic_ms()
        if not self._has_more and self._is_idle():
            took_ms = self._clock.monotonic_ms() - began_ms
            return max(self._poll_ms, min(took_ms * READ_SHARE, self._lease_ms // 2))
        # With the call that is under way then, a step ends before the lease does, and nothing is
        # sent after a transaction that took longer than that.
        self._give_up_ms = began_ms + self._lease_ms // 2
        wanted = self._next_round()
        has_sent = self._send()
        is_known = [self._look_up(topic) for topic in wanted if not self._is_late()]
        self._has_more = has_sent or any(is_known)
        return 0 if self._has_more else self._poll_ms

    def _take_over(self) -> bool:
        now_ms = self._clock.monotonic_ms()
        self._holder = self._holder or f"{born_host()}:{new_key(self._chance).hex()[:8]}"
        with self._table.transaction():
            found = self._table.holder()
            if found.holder not in ("", self._holder):
                seen = self._seen
                if seen is None or (seen.holder, seen.beat) != (found.holder, found.beat):
                    self._seen, self._seen_since_ms = found, now_ms
                if now_ms - self._seen_since_ms < self._lease_ms:
                    return False
            if not self._table.change_holder(found, self._holder):
                return False
        self._held = RelayRow(self._holder, found.beat + 1, None)
        self._beat_ms = now_ms
        self._seen = None
        _log.info("relaying %s as %s", self._names.outbox, self._holder)
        self._key, self._sequence = new_key(self._chance).hex(), 0
        self._topics.forget_routes()
        self._refusals.clear()
        self._done, self._bad = [], {}
        if found.flight is not None:
            try:
                flight = msgspec.json.decode(found.flight, type=list[FlightBatch])
                self._flight = {one.numbers: one for one in flight}
            except msgspec.MsgspecError as error:
                raise ConfigError(f"table {self._names.relay}, column flight: {error}") from error
        return True

    def _is_idle(self) -> bool:
        """Return True if there is nothing to write: a read alone costs the database little."""
        without = self._passed_over()
        may_read = len(without) <= MOST_BLOCKED
        with self._table.transaction():
            oldest = self._table.oldest()
            has_rows = may_read and self._table.has_rows(without)
        self._note_age(oldest)
        if has_rows or self._done or self._bad or self._due():
            return False
        if may_read:
            for topic in self._topics.reasons().keys() - without:
                self._topics.unblock(topic)  # it has no rows any more
        return self._clock.monotonic_ms() - self._beat_ms < self._lease_ms // 4

    def _next_round(self) -> list[str]:
        """Delete done rows and plan the next flight; return topics whose queues are not known."""
        assert self._held is not None
        wanted: list[str] = []
        began_ms = self._clock.monotonic_ms()
        due, without = self._due(), self._passed_over()
        with self._table.transaction():
            if not self._table.change_holder(self._held, self._holder):
                raise _LeaseLost
            held = RelayRow(self._holder, self._held.beat + 1, None)
            self._table.delete(self._done)
            for row_id, reason in self._bad.items():
                self._table.set_aside(row_id, reason)
            oldest = self._table.oldest()
            due, rows = self._rows_due(due)
            gone = {row_id for one in due for row_id in one.rows} - {one.id for one in rows}
            self._set_aside = self._table.present(sorted(gone))
            head: list[OutboxRow] = []
            if len(without) <= MOST_BLOCKED:
                head = self._table.head(self._batch_rows, self._batch_bytes, without)
            fresh = self._plan(head, wanted)
            if not self._table.set_flight(held, [*self._flight.values(), *fresh]):
                raise _LeaseLost
        self._held = held
        self._beat_ms = began_ms
        self._done, self._bad = [], {}
        self._flight.update((one.numbers, one) for one in fresh)
        self._round, self._fresh = fresh + due, {one.numbers for one in fresh}
        self._rows = {one.id: one for one in rows + head}
        self._note_age(oldest)
        return wanted

    def _rows_due(self, due: list[FlightBatch]) -> tuple[list[FlightBatch], list[OutboxRow]]:
        """Return the first batches with their rows, as many as a read has; others come next."""
        rows: list[OutboxRow] = []
        size = 0
        for number, one in enumerate(due):
            if len(rows) >= self._batch_rows or size >= self._batch_bytes:
                return due[:number], rows
            found = self._table.rows(one.rows)
            rows += found
            size += sum(len(row.message.body) for row in found)
        return due, rows

    def _plan(self, rows: list[OutboxRow], wanted: list[str]) -> list[FlightBatch]:
        """Divide rows into batches: one of each queue, and of each delay."""
        groups: dict[tuple[MessageQueue, int], list[int]] = {}
        for row in rows:
            message = row.message
            queues = self._topics.queues.get(message.topic)
            if queues is None:
                if message.topic not in wanted:
                    wanted.append(message.topic)
                continue
            if message.sharding_key is None:
                at = self._turn % len(queues)
            else:
                at = queue_index(message.sharding_key, len(queues))
            delay = -1 if message.deliver_at_ms else message.delay_level
            ids = groups.setdefault((queues[at], delay), [])
            if len(ids) < self._most_rows.get(queues[at], self._batch_rows):
                ids.append(row.id)
        self._turn += 1
        batches = []
        for (queue, _), ids in groups.items():
            where = queue.topic, queue.broker_name, queue.queue_id
            log_end = self._topics.log_ends[queue.broker_name]
            batches.append(FlightBatch(self._key, *where, log_end, self._sequence, ids))
            self._sequence += len(ids)
        return batches

    def _send(self) -> bool:
        """Send the batches of the round; return True if one of them left the flight."""
        groups: dict[tuple[str, str], list[FlightBatch]] = {}
        for one in self._round:
            groups.setdefault((one.key, one.broker), []).append(one)
        before = len(self._flight)
        # A broker group that did not answer last time holds up no other.
        for key, broker in sorted(groups, key=lambda one: self._topics.has_failed(one[1])):
            if self._is_late():
                break
            self._send_to(self._sender_for(key), broker, groups[key, broker])
        for topic in {one.topic for one in self._round} - {*self._passed_over()}:
            self._topics.unblock(topic)  # all of its batches are settled
        self._round, self._rows = [], {}
        self._close_senders({key for key, _ in self._flight} | {self._key})
        return len(self._flight) < before

    def _send_to(self, sender: RowSender, broker: str, batches: list[FlightBatch]) -> None:
        """Send batches of one key to their broker group."""
        ready: dict[int, tuple[FlightBatch, NumberedBatch]] = {}
        away = None if broker in self._lost_brokers else self._topics.away(broker)
        for one in batches:
            if self._is_late():
                break
            if away is not None:
                self._fail(one, away)  # it would wait as long
                continue
            messages = [self._rows[row_id].message for row_id in one.rows if row_id in self._rows]
            numbered = NumberedBatch(one.queue, messages, one.first)
            try:
                if self._may_send(sender, one, numbered):
                    ready[id(numbered)] = one, numbered
            except MQMeshError as error:
                self._fail(one, error)
                is_away = error.retriable and not isinstance(error, SystemBusy)
                away = error if is_away else None
        began_ms = self._clock.monotonic_ms()
        for numbered, failure in sender.try_send([numbered for _, numbered in ready.values()]):
            one, _ = ready[id(numbered)]
            if failure is None:
                self._settle(one, is_done=True)
                self._topics.note_answer(broker)
            elif isinstance(failure, InvalidArgument | LocalProtocolError):
                self._divide(one, failure)
            elif isinstance(failure, SequenceConflict):
                raise failure  # another process has this key
            else:
                self._fail(one, failure)
                self._topics.note_failure(broker, failure, began_ms)

    def _may_send(self, sender: RowSender, one: FlightBatch, numbered: NumberedBatch) -> bool:
        """Return True if a batch is to be sent as it is; else it has left the flight, or waits.

        Raises:
            MQMeshError: It is not known whether it is stored.
        """
        was_tried = one.numbers not in self._fresh
        has_rows = numbered.messages or not self._set_aside.isdisjoint(one.rows)
        if was_tried and has_rows and self._is_sent(sender, one, numbered):
            self._settle(one, is_done=True)
            return False
        if len(numbered.messages) < len(one.rows) or one.broker in self._lost_brokers:
            self._settle(one, is_done=False)  # rows were deleted meanwhile: others get new numbers
            return False
        refusal = self._refusals.pop(one.numbers, None)
        if refusal is None:
            return True
        # Under the same numbers a request that is still on its way does no harm: keep them.
        if one.topic not in self._topics.queues and not self._look_up(one.topic):
            return False
        if one.queue not in self._topics.queues[one.topic]:
            self._settle(one, is_done=False)
            return False
        if isinstance(refusal, MessageIllegal) and len(one.rows) > 1:
            self._divide(one, refusal)
            return False
        return True

    def _is_sent(self, sender: RowSender, one: FlightBatch, numbered: NumberedBatch) -> bool:
        try:
            if one.broker in self._lost_brokers:
                raise SendInDoubt(f"{one}: whether they are stored is lost with the broker group")
            log_end = self._topics.ask_log_end(one.queue, sender)
            if sender.is_sent(numbered, one.log_end):
                return True
            # The batch is not below this end: retention of messages there makes no doubt.
            self._flight[one.numbers] = msgspec.structs.replace(one, log_end=log_end)
            return False
        except SendInDoubt as error:
            if self._in_doubt == "stop":
                raise
            _log.error("%s: %s; in_doubt = %s", one, error, self._in_doubt)
            return self._in_doubt == "drop"

    def _settle(self, one: FlightBatch, *, is_done: bool) -> None:
        """Take a batch out of the flight."""
        del self._flight[one.numbers]
        self._refusals.pop(one.numbers, None)
        if is_done:
            self._done += one.rows
            self._sent += len(one.rows)

    def _fail(self, one: FlightBatch, error: MQMeshError) -> None:
        """Leave a batch in flight; its topic waits."""
        if not error.retriable:
            self._refusals[one.numbers] = error
        self._topics.block(one.topic, f"{one}: {error}", error)

    def _divide(self, one: FlightBatch, error: MQMeshError) -> None:
        """Give the rows of a batch that cannot be stored to smaller ones; set a lone row aside."""
        self._settle(one, is_done=False)
        self._most_rows[one.queue] = max(len(one.rows) // 2, 1)
        if len(one.rows) == 1:
            self._bad[one.rows[0]] = str(error)
        else:
            _log.warning("%s: %s; they are sent in smaller batches", one, error)

    def _sender_for(self, key: str) -> RowSender:
        found = self._senders.get(key)
        if found is None:
            found = self._senders[key] = self._make_sender(bytes.fromhex(key))
        return found

    def _close_senders(self, needed: set[str]) -> None:
        for key in self._senders.keys() - needed:
            self._senders.pop(key).close()

    def _is_late(self) -> bool:
        return self._clock.monotonic_ms() >= self._give_up_ms

    def _look_up(self, topic: str) -> bool:
        return self._topics.look_up(topic, self._sender_for(self._key))

    def _due(self) -> list[FlightBatch]:
        """Return the batches in flight whose topics do not wait."""
        waiting = {*self._topics.waiting()}
        return [one for one in self._flight.values() if one.topic not in waiting]

    def _passed_over(self) -> list[str]:
        """Return the topics of which no rows are read: they wait, or have batches in flight."""
        in_flight = [one.topic for one in self._flight.values()]
        return [*dict.fromkeys([*self._topics.waiting(), *in_flight])]

    def _note_age(self, oldest: int | None) -> None:
        age_ms = 0 if oldest is None else max(self._clock.wall_ms() - oldest, 0)
        self._oldest_ms = age_ms
        now_ms = self._clock.monotonic_ms()
        if age_ms < self._warn_age_ms:
            return
        if self._warned_ms is None or now_ms - self._warned_ms >= WARN_EACH_MS:
            self._warned_ms = now_ms
            _log.warning("the oldest row of %s waits for %d s", self._names.outbox, age_ms // 1_000)


def _check_bounds(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"{name} = {value} must be {low:,} to {high:,}")


def _numbered_sender(
    namesrv_addr: NamesrvAddr,
    lease_ms: int,
    max_message_size: int,
    credentials: str | Credentials,
    namespace: str | None,
    key: bytes,
) -> RowSender:
    return NumberedSender(
        namesrv_addr,
        key,
        born_host=born_host(),
        max_message_size=max_message_size,
        # The relay itself tries again: other topics do not wait for a broker that is away.
        timeout_ms=min(3_000, lease_ms // 4),
        patience_ms=0,
        credentials=credentials,
        namespace=namespace,
    )
