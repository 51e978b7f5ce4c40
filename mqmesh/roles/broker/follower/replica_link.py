"""A follower's connection to its leader: opens the replication, and takes what comes of the log.

The leader decides how to go on (``protocol/replication.py``); here each step is carried out, and
whatever fails begins anew with an OPEN_REPLICATION, which says what is there by then. Pure but for
the store: connections and time are given.
"""

import logging
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import (
    CorruptRecord,
    DiskFull,
    MQMeshError,
    OffsetOutOfRange,
    RemoteProtocolError,
    StaleEpoch,
)
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    MAX_CHUNK_BYTES,
    REPLICATION_VERSION,
    AckReplication,
    OpenReplicationRequest,
    OpenReplicationResponse,
    ReadLogRequest,
    ReplicateLog,
    ReplicationMode,
    agreed_version,
)
from mqmesh.roles.broker.ha.vote_state import VoteState
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.storage.commitlog.log_copy import decode_log_start
from mqmesh.storage.interface import LogChunk, LogStart, ReplicableLog
from mqmesh.storage.log.store_key import StoreKey
from mqmesh.units import CommitLogOffset

OPEN_TIMEOUT_MS: Final = 10_000
RETRY_MS: Final = 1_000
"""After something failed though the connection stands, at most."""
FIRST_RETRY_MS: Final = 50
"""At first, and each time twice as long."""
_LIES: Final = (CorruptRecord, OffsetOutOfRange, RemoteProtocolError)
"""Errors where a leader says what cannot be; storage's, where its records are looked at."""
MOST_STEPS: Final = 4
"""In a row, before the leader goes on: to cut, to count as another member, to copy, and one to
spare. More come from a leader that is wrong, and the next one is asked for later."""
SILENT_MS: Final = 3_000
"""The leader speaks each 500 ms; after so long it has forgotten this follower."""
ACK_MS: Final = 200
"""Interval at which an idle follower says how far it is."""

_log = logging.getLogger(__name__)


class LeaderConnection(Protocol):
    """Connection to a leader; ``Transport.connect`` makes one."""

    def request(
        self,
        code: int,
        on_done: Callable[[Command | MQMeshError], None],
        *,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Sends a request."""

    def oneway(self, code: int, *, header: bytes) -> None:
        """Sends a request that gets no answer."""

    def close(self) -> None:
        """Closes it."""


class CopiedLog(Protocol):
    """The follower's log, and what hangs on it."""

    def log(self) -> ReplicableLog:
        """Return the log as it is now."""

    def durable_offset(self) -> int:
        """Return how far it is on the disk."""

    def retention_wish(self) -> int:
        """Return up to where retention would remove it, if nobody kept it; 0 for nothing."""

    def on_chunk(self, chunk: ReplicateLog) -> None:
        """Take note of a chunk of the leader, whose records were added."""

    def truncate(self, end_offset: CommitLogOffset) -> None:
        """Cut its end off at a commit-log offset, with all that hangs on it."""

    def become_copy(self, beginning: LogStart) -> None:
        """Move the store aside, and begin a copy."""


class LinkTerms(msgspec.Struct, frozen=True):
    """Terms of a link, and what it says of the follower.

    Attributes:
        promises: Promises of the replica, which say which leaders it may follow.
        counts: Counters that all links of the process share.
        zone: Zone of the follower.
        serves_reads: The follower answers reads, so that the leader may name it to readers.
        epoch: Epoch of the leader in the group's record; 0 if only the leader knows it.
    """

    promises: VoteState
    counts: ReplicaCounts
    zone: str = ""
    serves_reads: bool = True
    epoch: int = 0


class ReplicaLink:
    """Link of one follower to its leader; its broker reports turns and time.

    Args:
        broker_name: Broker group.
        replica_id: Of the follower.
        instance_id: Random number of this life of the process.
        leader: Where the leader listens, for people.
        copy: The log.
        terms: Terms of the link.
        connect: Makes the connection: reports commands from the leader, and the connection.
        clock: Source of time.
        call_later: Has the loop call back after so many ms.

    Attributes:
        streaming: The leader sends what is new.
        leader_end: Where the leader's log ended, by its last chunk.
        leader_epoch: Of the leader when it answered last.
        last_seen_ms: Last sign of life of the leader, monotonic clock.
        failure: Why the link does not stream; None while it does, or has only begun.
    """

    def __init__(
        self,
        broker_name: str,
        replica_id: int,
        instance_id: int,
        leader: str,
        copy: CopiedLog,
        terms: LinkTerms,
        *,
        connect: Callable[[Callable[[Command], None], Callable[[bool], None]], LeaderConnection],
        clock: Clock,
        call_later: Callable[[int, Callable[[], None]], object],
    ) -> None:
        self._broker_name = broker_name
        self._replica_id = replica_id
        self._instance_id = instance_id
        self.leader = leader
        self._copy = copy
        self._terms = terms
        self._promises = terms.promises
        self._clock = clock
        self.streaming = False
        self.leader_end = 0
        self.leader_epoch = 0
        self._counts = terms.counts
        self.failure: str | None = None
        self._closed = False
        self._call_later = call_later
        self._attempt = 0
        self._is_requested = False
        self._connected = False
        self._retry_ms = 0
        self._failures = 0
        self._steps = 0
        self._confirmed = 0
        self._acknowledged = (-1, -1)
        self._ack_ms = 0
        self.last_seen_ms = clock.monotonic_ms()
        self._connection = connect(self._on_command, self._on_connection)

    def close(self) -> None:
        """Ends it."""
        self._closed = True
        self.streaming = self._connected = False
        self._attempt += 1
        self._connection.close()

    def turn_ended(self) -> None:
        """Acknowledge to the leader, at the end of a turn of the loop, what has come."""
        if self.streaming and (position := self._position()) != self._acknowledged:
            self._acknowledge(position)

    def tick(self, now_ms: int) -> None:
        """Time went on; monotonic clock."""
        if self._connected and not self.streaming and not self._is_requested:
            if now_ms >= self._retry_ms:
                self._open()
        elif self.streaming and now_ms - self.last_seen_ms > SILENT_MS:
            self.streaming = False
            self._open()
        elif self.streaming and now_ms - self._ack_ms >= ACK_MS:
            self._acknowledge(self._position())

    def read_log(
        self, start: int, end: int, on_done: Callable[[Command | MQMeshError], None]
    ) -> None:
        """Asks the leader for records of the log again; answered with ``ReplicateLog``.

        Args:
            start: Commit-log offset of the first one.
            end: Where the last one ends; 1 MiB of them are given at most.
            on_done: Called with the outcome.

        Raises:
            MQMeshError: The connection takes no request now.
        """
        size = max(1, min(end - start, MAX_CHUNK_BYTES))
        store_id = self._copy.log().identity().store_id
        header = encode_header(ReadLogRequest(self._broker_name, store_id, start, size))
        self.ask(RequestCode.READ_LOG, header, on_done)

    def ask(
        self, code: RequestCode, header: bytes, on_done: Callable[[Command | MQMeshError], None]
    ) -> None:
        """Asks the leader something.

        Raises:
            MQMeshError: The connection takes no request now.
        """
        self._connection.request(code, on_done, header=header, timeout_ms=OPEN_TIMEOUT_MS)

    def _look_again(self) -> None:
        if not self._closed:
            self.tick(self._clock.monotonic_ms())

    # ---- Words of the leader -------------------------------------------------------------

    def _on_connection(self, connected: bool) -> None:
        self._connected, self.streaming, self._is_requested = connected, False, False
        self._attempt += 1
        _log.info("the leader at %s is %s", self.leader, "connected" if connected else "gone")
        if connected:
            self._open()

    def _open(self) -> None:
        self._is_requested = True
        self._attempt += 1
        attempt = self._attempt
        request = OpenReplicationRequest(
            self._broker_name,
            self._replica_id,
            self._instance_id,
            REPLICATION_VERSION,
            self._copy.log().identity(),
            self._position()[1],
            self._promises.incarnation,
            self._promises.promised_epoch,
            self._terms.zone,
            self._terms.serves_reads,
        )

        def on_done(outcome: Command | MQMeshError) -> None:
            if attempt == self._attempt:
                self._is_requested = False
                self._carefully(lambda: self._on_opened(outcome))

        self._connection.request(
            RequestCode.OPEN_REPLICATION,
            on_done,
            header=encode_header(request),
            timeout_ms=OPEN_TIMEOUT_MS,
        )

    def _on_opened(self, outcome: Command | MQMeshError) -> None:
        if isinstance(outcome, MQMeshError):
            raise outcome
        answer = decode_header(OpenReplicationResponse, outcome.header)
        if agreed_version(answer.version) != answer.version:
            raise RemoteProtocolError(
                f"the leader speaks version {answer.version} of the replication, though this "
                f"replica offered {REPLICATION_VERSION} at most"
            )
        newest = max(self._terms.epoch, self._promises.promised_epoch)
        if self._terms.epoch and answer.epoch > newest:
            # Promised, it could not be taken back: nobody is elected for an epoch behind it.
            raise RemoteProtocolError(
                f"the leader says that it leads epoch {answer.epoch}, which no other replica has "
                f"reported; {newest} is the newest"
            )
        # From now on nobody of an earlier epoch makes it cut what this leader sends.
        try:
            self._promises.promise(answer.epoch)
        except StaleEpoch:
            self._counts.stale_epochs += 1
            raise
        self.leader_epoch = answer.epoch
        log = self._copy.log()
        if answer.mode == ReplicationMode.STREAM:
            if answer.offset != log.log_end():
                raise RemoteProtocolError(
                    f"the leader would go on at {answer.offset}, the log ends at {log.log_end()}"
                )
            self.streaming, self.failure, self._acknowledged = True, None, (-1, -1)
            self._failures = self._steps = self._confirmed = 0
            self.last_seen_ms = self._clock.monotonic_ms()
            return
        if answer.mode == ReplicationMode.TRUNCATE:
            before = log.log_end()
            if answer.offset > before:
                raise RemoteProtocolError(
                    f"the leader would cut at {answer.offset} a log that ends at {before}"
                )
            self._copy.truncate(CommitLogOffset(answer.offset))
            _log.warning("the log was cut from %d to %d", before, answer.offset)
            self._counts.cuts += 1
            self._counts.cut_bytes += before - answer.offset
        elif answer.mode == ReplicationMode.COPY:
            beginning = decode_log_start(outcome.body)
            self._check_own(log, beginning)
            self._counts.copies += 1
            self._promises.begin_copy(beginning.store_id)
            self._copy.become_copy(beginning)
        elif answer.mode == ReplicationMode.RENEW:
            _log.error(
                "this replica had acknowledged the log up to %d and has it up to %d: it lost "
                "records, or was put back from a backup, and counts as a new member",
                answer.offset,
                log.log_end(),
            )
            self._promises.renew()
        else:
            raise RemoteProtocolError(f"the leader says mode {answer.mode}, which nobody knows")
        self._steps += 1
        if self._steps >= MOST_STEPS:
            raise RemoteProtocolError(
                f"the leader never goes on: {MOST_STEPS} times in a row and more it had this "
                f"replica cut its log, copy it or count as another member, last "
                f"{ReplicationMode(answer.mode).name}; it is asked again each {RETRY_MS} ms at most"
            )
        self._open()

    def _check_own(self, log: ReplicableLog, beginning: LogStart) -> None:
        # A leader whose store was wiped, or that is another one's, is no reason to lose this one.
        own, theirs = log.identity(), (beginning.store_id, StoreKey(beginning.key).proof())
        if own.log_end > own.log_start and theirs != (own.store_id, own.key_proof):
            raise RemoteProtocolError(
                f"the store of this replica holds another log ({own.store_id:#010x}) than its "
                f"leader's at {self.leader} ({beginning.store_id:#010x}). If the leader is right, "
                "move this replica's folder aside (store_path_root_dir), and it begins a copy"
            )
        here, there = log.beginning().segment_bytes, beginning.segment_bytes
        if here != there:
            raise RemoteProtocolError(
                f"the leader's segments have {there} bytes, and {here} here: both need the same "
                "mapped_file_size_commit_log"
            )

    def _on_command(self, command: Command) -> None:
        if self.streaming and command.code == RequestCode.REPLICATE_LOG:
            self._carefully(lambda: self._on_chunk(command))

    def _on_chunk(self, command: Command) -> None:
        header = decode_header(ReplicateLog, command.header)
        self._check_chunk(header)
        self.last_seen_ms = self._clock.monotonic_ms()
        if command.body:
            self._append(header, command.body)
        self.leader_end, self._confirmed = header.leader_end, header.confirmed
        self._copy.on_chunk(header)

    def _check_chunk(self, chunk: ReplicateLog) -> None:
        """Refuse words that no honest leader says; where records are wrong the log finds out."""
        if chunk.leader_epoch not in (0, self.leader_epoch):
            raise RemoteProtocolError(
                f"a word of epoch {chunk.leader_epoch} from the leader of epoch {self.leader_epoch}"
            )
        log_end = self._copy.log().log_end()
        if chunk.leader_end < max(log_end, chunk.end):
            raise RemoteProtocolError(
                f"the leader's log ends at {chunk.leader_end}, and it sends up to {chunk.end} and "
                f"has sent up to {log_end}"
            )
        if not self._confirmed <= chunk.confirmed <= chunk.leader_end:
            raise RemoteProtocolError(
                f"the leader's log is confirmed to {chunk.confirmed}, where it was to "
                f"{self._confirmed} and ends at {chunk.leader_end}"
            )

    def _append(self, header: ReplicateLog, data: bytes | memoryview) -> None:
        chunk = LogChunk(
            CommitLogOffset(header.start),
            CommitLogOffset(header.end),
            header.segment_end,
            header.epoch,
            data,
        )
        self._copy.log().append_raw(chunk)
        self._counts.chunks += 1
        self._counts.bytes += len(data)

    def _carefully(self, step: Callable[[], None]) -> None:
        """Does a step; if that fails it begins anew, later."""
        try:
            step()
        except MQMeshError as error:
            self.streaming = False
            self._counts.refused_chunks += isinstance(error, _LIES)
            # A leader that was just elected is not there yet, and is waited for by producers.
            wait_ms = min(FIRST_RETRY_MS << self._failures, RETRY_MS)
            self._failures = min(self._failures + 1, 10)
            self._retry_ms = self._clock.monotonic_ms() + wait_ms
            self._call_later(wait_ms, self._look_again)
            if self.failure != str(error):
                self.failure = str(error)
                # A store that has stopped ends the broker, which looks after it anyway.
                level = logging.WARNING if isinstance(error, DiskFull) else logging.ERROR
                _log.log(level, "nothing comes from the leader at %s: %s", self.leader, error)

    # ---- Words to the leader -------------------------------------------------------------

    def _position(self) -> tuple[int, int]:
        written = self._copy.log().log_end()
        return written, min(self._copy.durable_offset(), written)

    def _acknowledge(self, position: tuple[int, int]) -> None:
        self._acknowledged = position
        self._ack_ms = self._clock.monotonic_ms()
        header = encode_header(
            AckReplication(*position, self.leader_epoch, self._copy.retention_wish())
        )
        try:
            self._connection.oneway(RequestCode.ACK_REPLICATION, header=header)
        except MQMeshError as error:
            # The next one says the same, and more.
            _log.debug("an acknowledgement is late: %s", error)
            self._acknowledged = (-1, -1)
