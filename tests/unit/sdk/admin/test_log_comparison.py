"""Logs of replicas are compared range by range, and what differs is found to the record."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from mqmesh.errors import BrokerNotAvailable, InvalidArgument, OffsetIllegal, RemoteProtocolError
from mqmesh.log_identity import EpochStart
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    MAX_CHUNK_BYTES,
    ChecksumLogRequest,
    ChecksumLogResponse,
    LogEpochs,
)
from mqmesh.sdk.admin.log_comparison import LogDifference, compare_logs, parting

RECORD = 64 * 1024


class Log:
    """A replica whose records have 64 KiB each."""

    def __init__(self, broker_id, records=64, *, epochs=((1, 0),), confirmed=0, start=0):
        self.broker_id, self.start, self.confirmed = broker_id, start, confirmed
        self.records = [b"%d" % number for number in range(records)]
        self.epochs = [EpochStart(*one) for one in epochs]
        self.damaged = -1
        self.asked = 0
        self.failures = []

    @property
    def log(self):
        end = len(self.records) * RECORD
        return LogEpochs(self.broker_id, 7, self.start, end, self.confirmed, self.epochs)

    def checksum(self, asked):
        self.asked += 1
        if self.failures:
            raise self.failures.pop()
        first, stop = asked.start // RECORD, asked.stop // RECORD
        if asked.start < self.start:
            raise OffsetIllegal("gone")
        if first == self.damaged:
            return ChecksumLogResponse(self.broker_id, asked.start, problem="no record there")
        last = min(first + max(asked.size // RECORD, 1), stop, len(self.records))
        data = b",".join(self.records[first:last])
        return ChecksumLogResponse(self.broker_id, last * RECORD, blake2b(data).digest()[:16])


class Group:
    """Replicas, the leader first."""

    def __init__(self, *logs):
        self.logs = {f"e{one.broker_id}": one for one in logs}
        self.paused_s = 0.0

    def ask(self, endpoint, code, header):
        one = self.logs[endpoint]
        if code is RequestCode.GET_EPOCHS:
            return Command(0, 0, 0, encode_header(one.log), b"")
        answer = one.checksum(decode_header(ChecksumLogRequest, header))
        return Command(0, 0, 0, encode_header(answer), b"")

    def pause(self, duration_s):
        self.paused_s += duration_s

    def compare(self, bytes_per_s=MAX_CHUNK_BYTES):
        endpoints = {str(one.broker_id): where for where, one in self.logs.items()}
        return list(compare_logs(self.ask, endpoints, self.pause, bytes_per_s=bytes_per_s))


def differences(told):
    return [one.difference for one in told if one.difference is not None]


def test_logs_that_are_the_same_are_read_once_and_not_too_fast():
    group = Group(Log(1), Log(2), Log(3))
    told = group.compare()
    assert [one.compared for one in told] == [MAX_CHUNK_BYTES * number for number in (1, 2, 3, 4)]
    assert (told[-1].end, told[-1].broker_ids) == (64 * RECORD, [1, 2, 3])
    assert differences(told) == []
    assert group.paused_s == 4
    assert {one.asked for one in group.logs.values()} == {4}


def test_each_record_that_differs_is_found():
    group = Group(Log(1), Log(2), Log(3))
    group.logs["e3"].records[0] = b"other"
    group.logs["e2"].records[37] = b"other"
    assert differences(group.compare()) == [
        LogDifference(0, RECORD, [3]),
        LogDifference(37 * RECORD, 38 * RECORD, [2]),
    ]


@pytest.mark.parametrize("broker_id", [1, 2])
def test_what_cannot_be_read_differs_and_the_rest_is_compared(broker_id):
    group = Group(Log(1), Log(2), Log(3))
    group.logs[f"e{broker_id}"].damaged = 16
    (found,) = differences(group.compare())
    assert found.start == 16 * RECORD
    assert found.problems == {broker_id: "no record there"}
    assert broker_id in found.broker_ids
    assert {one.asked for one in group.logs.values()} == {4}


def test_only_what_all_have_and_no_failover_takes_back_is_compared():
    group = Group(Log(1, confirmed=40 * RECORD), Log(2, 50, start=RECORD), Log(3, 44))
    group.logs["e3"].records[40] = b"not confirmed"
    group.logs["e1"].records[0] = b"not everywhere"
    told = group.compare()
    assert differences(told) == []
    assert (told[-1].start, told[-1].end, told[-1].compared) == (RECORD, 40 * RECORD, 40 * RECORD)


def test_a_history_that_parts_from_what_is_confirmed_is_a_difference():
    second = Log(2, 50, epochs=((1, 0), (2, 30 * RECORD)))
    group = Group(Log(1, epochs=((1, 0), (3, 30 * RECORD)), confirmed=60 * RECORD), second)
    told = group.compare()
    assert differences(told) == [LogDifference(30 * RECORD, 30 * RECORD, [2])]
    assert told[-1].end == 30 * RECORD


def test_a_log_of_another_store_and_a_replica_alone_are_not_compared():
    one, other = Log(1), Log(2, epochs=((5, 0),))
    assert parting(one.log, other.log) is None
    with pytest.raises(InvalidArgument, match=r"replicas \[2\] have nothing in common"):
        Group(one, other).compare()
    with pytest.raises(InvalidArgument, match="nobody to be compared with"):
        Group(one).compare()
    assert Group(one, Log(3, 0, epochs=())).compare() == []


def test_retention_that_goes_on_meanwhile_is_followed_and_a_cut_is_an_error():
    group = Group(Log(1), Log(2))
    second = group.logs["e2"]
    group.pause = lambda duration_s: setattr(second, "start", 32 * RECORD)
    told = group.compare()
    assert [one.compared // RECORD for one in told] == [16, 32, 48, 64]
    second.start, second.failures = 0, [OffsetIllegal("cut")]
    with pytest.raises(OffsetIllegal, match="cut"):
        group.compare()


def test_a_replica_that_is_away_for_a_moment_is_asked_again():
    group = Group(Log(1), Log(2))
    group.logs["e2"].failures = [BrokerNotAvailable("it changes its role")] * 3
    assert differences(group.compare()) == []
    group.logs["e2"].failures = [BrokerNotAvailable("it is gone")] * 99
    with pytest.raises(BrokerNotAvailable, match="gone"):
        group.compare()


def test_an_answer_of_another_replica_counts_for_nothing():
    group = Group(Log(1), Log(2))
    group.compare()
    checksum = group.logs["e2"].checksum
    group.logs["e2"].checksum = lambda asked: ChecksumLogResponse(1, checksum(asked).end)
    with pytest.raises(RemoteProtocolError, match="answers replica 1, not 2"):
        group.compare()


@pytest.mark.parametrize("end", [0, 3 * RECORD])
def test_a_range_that_ends_before_it_begins_is_an_error(end):
    one, other = Log(0), Log(1)
    real = one.checksum

    def lie(asked):
        answer = real(asked)
        return ChecksumLogResponse(0, end, answer.digest) if asked.start > 5 * RECORD else answer

    one.checksum = lie
    with pytest.raises(RemoteProtocolError, match=f"on ends at {end}"):
        Group(one, other).compare()
