"""Comparison of the logs of a group's replicas: the same bytes up to where they must be.

Each replica reads one range at a time and returns its checksum. Where checksums differ the range is
halved until one record is left. Parts in which logs may differ are left out: those behind the end
of the shortest log, and those that a failover may take back.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from mqmesh.errors import (
    BrokerNotAvailable,
    InvalidArgument,
    OffsetIllegal,
    RemoteProtocolError,
    TransportError,
)
from mqmesh.log_identity import CommonEnd, common_end
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    MAX_CHUNK_BYTES,
    ChecksumLogRequest,
    ChecksumLogResponse,
    EpochsRequest,
    LogEpochs,
)

PATIENCE: Final = 20
"""Number of requests to a replica that does not answer, with pauses between them."""
PAUSE_S: Final = 0.5

Ask = Callable[[str, RequestCode, bytes], Command]
"""Sends a request to an endpoint."""


class LogDifference(msgspec.Struct, frozen=True):
    """A place where logs differ that must not.

    Attributes:
        start: Commit-log offset of a record.
        end: Of the next one, as the first replica has it; ``start`` where histories part.
        broker_ids: Replicas that have something else there than the first one, or cannot read it.
        problems: Why they cannot, by id.
    """

    start: int
    end: int
    broker_ids: list[int]
    problems: dict[int, str] = {}


class LogComparison(msgspec.Struct, frozen=True):
    """Progress of a comparison of logs.

    Attributes:
        start: Commit-log offset of the oldest record that all have.
        end: Nothing behind this commit-log offset is compared.
        compared: Up to this one they were.
        broker_ids: Replicas of the logs.
        difference: A place that was just found.
    """

    start: int
    end: int
    compared: int
    broker_ids: list[int]
    difference: LogDifference | None = None


def read_epochs(ask: Ask, endpoint: str) -> LogEpochs:
    """Return the epochs of a replica's log.

    Raises:
        BrokerError, TransportError: It refuses, or does not answer.
    """
    answer = ask(endpoint, RequestCode.GET_EPOCHS, encode_header(EpochsRequest()))
    return decode_header(LogEpochs, answer.header)


def parting(ours: LogEpochs, theirs: LogEpochs) -> CommonEnd | None:
    """Return where the common history of two logs ends; None if they have none in common."""
    if theirs.log_start == theirs.log_end or ours.log_start == ours.log_end:
        return CommonEnd(0, min(ours.log_end, theirs.log_end))  # a copy that has no record yet
    if ours.store_id != theirs.store_id:
        return None
    return common_end(ours.epochs, ours.log_end, theirs.epochs, theirs.log_end)


def compare_logs(
    ask: Ask, endpoints: Mapping[str, str], pause: Callable[[float], None], *, bytes_per_s: int
) -> Iterator[LogComparison]:
    """Compares the logs of replicas, range by range.

    Args:
        ask: Sends a request to an endpoint.
        endpoints: Of the replicas, with a name for people; the first one is the leader.
        pause: Lets the calling thread sleep.
        bytes_per_s: Most bytes that each of them reads in a second.

    Yields:
        Once for each range, and for each difference.

    Raises:
        InvalidArgument: There are fewer than two replicas, or their logs have nothing in common.
        BrokerError, TransportError: A replica refuses, or does not answer for 10 s.
    """
    found = [(where, read_epochs(ask, where)) for where in endpoints.values()]
    if len(found) < 2:
        raise InvalidArgument("one replica alone has nobody to be compared with")
    comparison = _Comparison(ask, dict(found), pause)
    yield from comparison.partings()
    while comparison.at < comparison.end:
        before = comparison.at
        difference = comparison.step()
        yield comparison.report(difference)
        pause(max(comparison.at - before, 0) / bytes_per_s)


class _Comparison:
    """One comparison; ``at`` is how far it is."""

    def __init__(
        self, ask: Ask, logs: dict[str, LogEpochs], pause: Callable[[float], None]
    ) -> None:
        self._ask = ask
        self._pause = pause
        self._logs = logs
        first, *others = logs.values()
        ends = [(one, parting(first, one)) for one in others]
        strangers = [one.broker_id for one, end in ends if end is None]
        if strangers:
            raise InvalidArgument(
                f"replicas {strangers} have nothing in common with replica {first.broker_id}"
            )
        self._common = {one.broker_id: end.end_offset for one, end in ends if end is not None}
        confirmed = max(one.confirmed for one in logs.values()) or first.log_end
        self._must = {one.broker_id: min(confirmed, one.log_end, first.log_end) for one, _ in ends}
        self.start = self.at = max(one.log_start for one in logs.values())
        self.end = max(min(confirmed, *self._common.values()), self.at)

    def partings(self) -> Iterator[LogComparison]:
        """Replicas whose history parts from the first one's, before where it must not."""
        for broker_id, end in self._common.items():
            if end < self._must[broker_id]:
                yield self.report(LogDifference(end, end, [broker_id]))

    def report(self, difference: LogDifference | None) -> LogComparison:
        ids = [one.broker_id for one in self._logs.values()]
        return LogComparison(self.start, self.end, self.at, ids, difference)

    def step(self) -> LogDifference | None:
        """Compares the next range."""
        try:
            difference, end = self._compare(self.at, MAX_CHUNK_BYTES)
            while difference is not None and not difference.problems:
                half = (end - self.at) // 2
                first, middle = self._compare(self.at, max(half, 1))
                if middle == end:
                    break  # one record
                if first is None:
                    self.at = middle
                    difference, end = self._compare(self.at, max(end - middle, 1))
                else:
                    difference, end = first, middle
        except OffsetIllegal:
            # Retention went on. Or a log was cut: that is an error.
            starts = [read_epochs(self._ask, where).log_start for where in self._logs]
            if max(starts) <= self.at:
                raise
            self.at = min(max(starts), self.end)
            return None
        self.at = end
        return difference

    def _compare(self, start: int, size: int) -> tuple[LogDifference | None, int]:
        """Reads a range in all replicas; the difference, and where the range ends."""
        (leader, first), *others = self._logs.items()
        ours = self._checksum(leader, first, start, self.end, size)
        checksums, stop = {first.broker_id: ours}, ours.end
        for where, log in others:
            checksums[log.broker_id] = self._checksum(
                where, log, start, stop if stop > start else self.end, size
            )
        if stop == start:  # it cannot be read there, or a record goes beyond the end
            ends = [one.end for one in checksums.values() if one.end > start]
            stop = min(ends, default=self.end)
        if stop <= start:
            raise RemoteProtocolError(f"a range of the log from {start} on ends at {stop}")
        differing = [
            broker_id
            for broker_id, one in checksums.items()
            if one.problem or (one.end, one.digest) != (ours.end, ours.digest)
        ]
        problems = {broker_id: one.problem for broker_id, one in checksums.items() if one.problem}
        if not differing:
            return None, stop
        return LogDifference(start, stop, differing, problems), stop

    def _checksum(
        self, endpoint: str, log: LogEpochs, start: int, stop: int, size: int
    ) -> ChecksumLogResponse:
        header = encode_header(ChecksumLogRequest(log.store_id, start, stop, size))
        answer = decode_header(ChecksumLogResponse, self._answer(endpoint, header).header)
        if answer.broker_id != log.broker_id:
            raise RemoteProtocolError(
                f"at {endpoint} answers replica {answer.broker_id}, not {log.broker_id}"
            )
        return answer

    def _answer(self, endpoint: str, header: bytes) -> Command:
        for _ in range(PATIENCE):
            try:
                return self._ask(endpoint, RequestCode.CHECKSUM_LOG, header)
            except (BrokerNotAvailable, TransportError):
                self._pause(PAUSE_S)  # it changes its role, or is started again
        return self._ask(endpoint, RequestCode.CHECKSUM_LOG, header)
