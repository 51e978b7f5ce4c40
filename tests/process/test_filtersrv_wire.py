"""A filter server over real sockets, with a broker that says what a test wants."""

from __future__ import annotations

import random
import zlib
from functools import partial

import msgspec
import pytest

from mqmesh.batch.record_batch import (
    BROKER_PART_SIZE,
    check_batch,
    check_stored,
    decode_messages,
    encode_batch,
    stamp,
)
from mqmesh.errors import (
    BrokerNotAvailable,
    FilterFailed,
    MQMeshError,
    NoPermission,
    StaleGeneration,
)
from mqmesh.filtering.python_filter import filter_id
from mqmesh.message import Message
from mqmesh.protocol.admin import RoleInfo
from mqmesh.protocol.command import EMPTY_REPLY, Reply, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.filters import (
    RegisterFilterServerRequest,
    UploadFilterRequest,
    UploadFilterResponse,
)
from mqmesh.protocol.pulling import ExpressionType, PullRequest, PullResponse, PullStatus
from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.filtersrv.server import FilterServer
from mqmesh.sandbox.worker_process import WorkerProcess

ODD = b"def match(m): return int(m.body) % 2 == 1"
UPLOAD = RequestCode.REGISTER_MESSAGE_FILTER_CLASS
PULL = RequestCode.PULL_MESSAGE


def stored(count, **options):
    """A stored batch of messages 0, 1, 2, …"""
    data = encode_batch(
        [Message("t", b"%09d" % number) for number in range(count)],
        topic="t",
        queue_id=0,
        producer_id=1,
        first_sequence=1,
        born_timestamp=5,
        **options,
    )
    front = stamp(
        check_batch(data),
        commitlog_offset=0,
        base_queue_offset=0,
        store_timestamp=6,
        epoch=0,
        store_id=9,
    )
    return front + data[BROKER_PART_SIZE:]


def _refuse(request):
    raise NoPermission("REGISTER_FILTER_SERVER is not permitted")


class Stage:
    """A filter server, a broker and a consumer in one thread."""

    def __init__(self, wire, *, registers=True, **settings):
        self.wire = wire
        self.registered: list[RegisterFilterServerRequest] = []
        self.pulls: list[PullRequest] = []
        self.answer = lambda pull: Reply(
            encode_header(PullResponse(int(PullStatus.NO_NEW_MSG), pull.queue_offset, 0, 0))
        )
        handlers = {
            int(RequestCode.REGISTER_FILTER_SERVER): self._register if registers else _refuse,
            int(PULL): self._pull,
        }
        self.broker, endpoint = wire.server(handlers)
        config = FiltersrvConfig(
            enable=True, broker_addr=endpoint.removeprefix("tcp://"), enable_ipc=False, **settings
        )
        self.server = FilterServer(config, wire.transport, partial(WorkerProcess, wire.loop))
        self.client = wire.client(self.server.start())
        if registers:
            wire.until(lambda: self.server.is_taken)

    def _register(self, request):
        self.registered.append(decode_header(RegisterFilterServerRequest, request.command.header))
        return EMPTY_REPLY

    def _pull(self, request):
        self.pulls.append(decode_header(PullRequest, request.command.header))
        return self.answer(self.pulls[-1])

    def gives(self, *batches, next_offset):
        """The broker has these batches."""
        header = PullResponse(int(PullStatus.FOUND), next_offset, 0, next_offset)
        self.answer = lambda pull: Reply(encode_header(header), batches)

    def upload(self, source=ODD, group="g", name=None):
        name = filter_id(source) if name is None else name
        return self.ask(UPLOAD, UploadFilterRequest(group, name), UploadFilterResponse, source)

    def pull(self, source=ODD, group="g", **fields):
        request = PullRequest(
            group,
            "t",
            0,
            0,
            expression=filter_id(source),
            expression_type=ExpressionType.PYTHON.value,
            **fields,
        )
        return self.ask(PULL, request)

    def ask(self, code, header, kind=None, body=b""):
        data = encode_header(header) if isinstance(header, msgspec.Struct) else header
        done = []
        self.client.request(code, done.append, body, header=data, timeout_ms=15_000)
        self.wire.until(lambda: done, 20)
        if isinstance(done[0], MQMeshError):
            raise done[0]
        return decode_header(kind, done[0].header) if kind else done[0]


@pytest.fixture
def stage(wire):
    """A stage; make it with settings."""
    stages = []

    def make(**settings):
        stages.append(Stage(wire, **settings))
        return stages[-1]

    yield make
    for one in stages:
        one.server.stop()


def bodies(answer):
    """Numbers of the messages in the answer to a pull."""
    found, position = [], 0
    while position < len(answer.body):
        header = check_stored(answer.body, position)
        found += [int(m.body) for m in decode_messages(answer.body, header, position=position)]
        position += header.total_size
    return found


def test_it_registers_with_its_broker_again_and_again(stage, wire):
    one = stage(name="f")
    wire.until(lambda: len(one.registered) >= 2)
    assert {request.name for request in one.registered} == {"f"}
    assert one.registered[0].address.tcp == one.client.endpoint.removeprefix("tcp://")


def test_it_runs_nobodys_code_before_its_broker_has_taken_it(stage):
    one = stage(registers=False)
    with pytest.raises(BrokerNotAvailable, match="has not taken this filter server"):
        one.upload()


@pytest.mark.parametrize("packing", [{}, {"compress_over_bytes": 1}])
def test_a_pull_gets_what_matches_and_the_broker_sees_a_plain_one(stage, packing):
    one = stage()
    assert "rlimits" in one.upload().rungs
    one.gives(stored(10, **packing), next_offset=10)
    answer = one.pull(generation=7, max_bytes=1_000)
    assert bodies(answer) == [1, 3, 5, 7, 9]
    assert decode_header(PullResponse, answer.header).next_queue_offset == 10
    (seen,) = one.pulls
    assert (seen.expression, seen.expression_type) == ("*", "TAG")
    assert (seen.group, seen.generation, seen.max_bytes) == ("g", 7, 1_000)


def test_what_the_broker_says_otherwise_reaches_the_consumer(stage):
    one = stage()
    one.upload()
    header = PullResponse(int(PullStatus.OFFSET_ILLEGAL), 3, 3, 9)
    one.answer = lambda pull: Reply(encode_header(header))
    assert decode_header(PullResponse, one.pull().header) == header

    def refuse(pull):
        raise StaleGeneration("another one has the queue")

    one.answer = refuse
    with pytest.raises(StaleGeneration, match="another one"):
        one.pull()


def test_behind_damage_that_the_broker_passes_it_goes_on(stage):
    one = stage()
    one.upload()
    one.gives(stored(10)[:-1] + b"\xff", next_offset=10)
    give_damage = one.answer
    passed = PullResponse(int(PullStatus.NO_MATCHED_MSG), 10, 0, 20)
    one.answer = lambda pull: Reply(encode_header(passed)) if pull.verify else give_damage(pull)
    answer = decode_header(PullResponse, one.pull().header)
    assert (answer.status, answer.next_queue_offset) == (PullStatus.NO_MATCHED_MSG, 10)


def test_a_batch_that_is_nonsense_inside_is_not_passed_over(stage):
    one = stage()
    one.upload()
    whole = bytearray(stored(3))
    at = whole.rindex(b"\xc4\x09")  # of a body
    whole[at] = 0xC1  # msgpack has no such type
    blank = bytes(whole[:48])
    batch = bytes(whole)
    # The producer's checksum, as whoever wrote nonsense would have made it.
    crc = zlib.crc32(batch[52:])
    batch = blank + crc.to_bytes(4, "little") + batch[52:]
    front = stamp(
        check_batch(batch),
        commitlog_offset=0,
        base_queue_offset=0,
        store_timestamp=6,
        epoch=0,
        store_id=9,
    )
    one.gives(front + batch[BROKER_PART_SIZE:], next_offset=3)
    with pytest.raises(FilterFailed, match="cannot be decoded"):
        one.pull()


def test_without_a_broker_pulls_are_refused_and_may_be_tried_again(stage):
    one = stage()
    one.upload()
    one.broker.close()
    with pytest.raises(BrokerNotAvailable, match="cannot be reached"):
        one.pull()


def test_nonsense_is_answered_with_errors_and_hurts_nobody(stage):
    one = stage()
    one.upload()
    chance = random.Random(1)
    for _ in range(200):
        code = chance.choice([*map(int, RequestCode), 0, 65_535])
        if code == RequestCode.PING:
            continue
        with pytest.raises(MQMeshError):
            one.ask(code, chance.randbytes(chance.randrange(40)), None, chance.randbytes(50))
    assert one.ask(RequestCode.PING, b"", RoleInfo).role == "filtersrv"
    one.gives(stored(4), next_offset=4)
    assert bodies(one.pull()) == [1, 3]
