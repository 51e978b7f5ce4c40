"""Bytes of anybody at the gateway's ports for remoting: answers or the end of a connection.

``python -m fuzz.test_remoting FRAMES`` in ``tests`` sends as many as wanted.
"""

from __future__ import annotations

import json
import logging
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from harness.batches import encode_flights, stored_batch
from harness.grpc_world import LIMITS, FrontOutput
from hypothesis import given, settings
from hypothesis import strategies as st

from mqmesh.errors import EndpointUnreachable, GroupNotFound, StaleGeneration, TopicNotFound
from mqmesh.message import Message
from mqmesh.protocol.client_rpc import AskClient, HandToRequest, RunningInfoRequest
from mqmesh.protocol.command import Command, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.membership import ConsumerList, HeartbeatResponse, Membership
from mqmesh.protocol.pulling import ConsumerOffsets, PullResponse, QueueOffsetEntry
from mqmesh.protocol.remoting.codes import RemotingCode
from mqmesh.protocol.remoting.frame import ONEWAY, RESPONSE, RemotingCommand, encode_frame
from mqmesh.protocol.replies import PushReply
from mqmesh.roles.gateway.backend import GatewayBackend
from mqmesh.roles.gateway.config import GatewayConfig
from mqmesh.roles.gateway.ports import BrokerPorts
from mqmesh.roles.gateway.session import Handler, RemotingSession
from mqmesh.roles.gateway.users import ACCESS_KEY, SIGNATURE, find_user, parse_users
from mqmesh.sdk.client.route_cache import RouteCache
from mqmesh.testing.clock import ManualClock

BATCH = stored_batch(encode_flights(Message("flights", b"body")))
TEXTS = ["t", "g", "", "é", "a b", "%RETRY%g", "%DLQ%g", "one", "*", "true", "x" * 600, "\x01\x02"]
NUMBERS = ["0", "1", "-1", "4", "7", "32", str(2**63), "-" + "9" * 30, "1e3", "x", ""]
FIELDS = [
    *("topic", "consumerGroup", "producerGroup", "group", "clientID", "clientId", "queueId"),
    *("queueOffset", "offset", "maxMsgNums", "sysFlag", "commitOffset", "suspendTimeoutMillis"),
    *("subscription", "expressionType", "key", "maxNum", "beginTimestamp", "endTimestamp"),
    *("a", "b", "c", "d", "e", "f", "g", "h", "i", "properties", "timestamp", "msgId"),
    *("readQueueNums", "writeQueueNums", "perm", "namespace", "value", "brokerName", "statsName"),
    *("statsKey", "commitLogOffset", "tranStateTableOffset", "commitOrRollback", "delayLevel"),
    *("isForce", "groupName", "srcGroup", "destGroup", "topicList", "index", "count"),
    *("originTopic", "maxReconsumeTimes", "_UNIQUE_KEY_QUERY", ACCESS_KEY, SIGNATURE),
]
PROPERTIES = [
    "UNIQ_KEY\x01FD01\x02KEYS\x01a b\x02",
    "CORRELATION_ID\x01c\x02REPLY_TO_CLIENT\x01one\x02TTL\x0199\x02",
    "DELAY\x01soon\x02",
    "RETRY_TOPIC\x01t\x02UNIQ_KEY\x01x\x02RECONSUME_TIME\x01" + "9" * 12 + "\x02",
    "\x01\x01\x02\x02",
]
BODIES: list[object] = [
    {
        "clientID": "one",
        "producerDataSet": [{"groupName": "p"}],
        "consumerDataSet": [
            {"groupName": "g", "subscriptionDataSet": [{"topic": "t", "subString": "*"}]}
        ],
    },
    {
        "consumerGroup": "g",
        "clientId": "one",
        "mqSet": [{"topic": "t", "brokerName": "broker-a", "queueId": 0}],
    },
    {"groupName": "g", "retryMaxTimes": 3},
    {"topicConfigList": [{"topicName": "t", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}]},
    {"consumeResult": "CR_SUCCESS", "spentTimeMills": 1},
    {"mqTable": {}, "properties": {"PROP_CONSUMER_START_TIMESTAMP": "1"}},
]
USERS = parse_users(
    '[[user]]\naccess_key = "t"\nsecret_key = "12345678"\ncredentials = "x"\n', "users.toml"
)


class Bugs(logging.Handler):
    """Makes errors of exceptions that no code handles."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            raise AssertionError(self.format(record))


logging.getLogger("mqmesh.roles.gateway").addHandler(Bugs(logging.ERROR))


class Brokers:
    """A way to brokers which answer something, good or not."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self.clock = ManualClock()
        self.soon: deque[Callable[[], None]] = deque()
        self.loop: Any = self
        self.brokers: Any = self
        self.routes = RouteCache()
        self.closed = False

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Brokers:
        self.soon.append(callback)
        return self

    def cancel(self) -> None:
        pass

    def post(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def follow(self, *_: object) -> bool:
        return False

    def may_come(self, broker_name: str) -> bool:
        return False

    def is_connected(self, broker_name: str) -> bool:
        return False

    def connection(self, broker_name: str) -> object:
        raise EndpointUnreachable("nobody")

    def refresh(self, topic: str) -> None:
        pass

    def oneway(self, broker_name: str, code: int, header: bytes, body: bytes = b"") -> None:
        pass

    def find_route(self, topic: str, on_done: Callable[[Any], None]) -> None:
        self.post(lambda: on_done(TopicNotFound(topic)))

    def ask(self, broker_name: str, code: int, header: bytes, on_done: Any) -> None:
        self.request(broker_name, code, on_done)

    def ask_namesrv(self, code: int, header: bytes, on_done: Any) -> None:
        self.request("", code, on_done)

    ask_namesrvs = ask_namesrv

    def request(self, broker_name: str, code: int, on_done: Any, *_: bytes, **more: object) -> None:
        self.post(lambda: on_done(self._answer(code)))

    def _answer(self, code: int) -> object:
        source = self._source
        if source.random() < 0.3:
            kinds = (TopicNotFound, GroupNotFound, StaleGeneration, EndpointUnreachable)
            return source.choice(kinds)("no")
        header: Any = None
        body = source.choice([b"", source.randbytes(30), BATCH, BATCH * 2, BATCH[:-3]])
        if code == RequestCode.HEART_BEAT:
            header = HeartbeatResponse(1, [Membership("g", 1, 1)])
        elif code == RequestCode.PULL_MESSAGE:
            header = PullResponse(source.randrange(7), source.choice([0, 51, 2**40]), 0, 60)
        elif code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            header = ConsumerList(["one"])
        elif code == RequestCode.QUERY_CONSUMER_OFFSET:
            header = ConsumerOffsets([QueueOffsetEntry("t", 0, source.choice([-1, 5]))], 1)
        data = source.randbytes(9) if header is None else encode_header(header)
        return Command(0, 1, 0, memoryview(data), memoryview(body))

    def run(self) -> None:
        for _ in range(len(self.soon)):
            self.soon.popleft()()

    def command(self) -> Command:
        """Returns a command that a broker sends by itself."""
        source = self._source
        question = encode_header(
            source.choice([RunningInfoRequest("g", "one"), HandToRequest("g", "one", 0)])
        )
        asked = source.choice(
            [RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY]
        )
        code, header = source.choice(
            [
                (RequestCode.ASK_CLIENT, AskClient(1, asked, question)),
                (RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, PushReply(1, "c", 1, "one")),
            ]
        )
        body = source.choice([BATCH, b"", source.randbytes(20)])
        return Command(code, 1, 0, memoryview(encode_header(header)), memoryview(body))


class RemotingWorld:
    """A gateway without sockets, whose brokers answer anything."""

    def __init__(self, source: random.Random) -> None:
        self.brokers = Brokers(source)
        self.clock = self.brokers.clock
        ports = BrokerPorts(
            "127.0.0.1", 20_911, lambda port, name: None, lambda change: change(None)
        )
        ports.serve("broker-a", "c")

        def connect(on_command: Any, on_broker: Any) -> Any:
            self.on_command = on_command
            return self.brokers

        config = GatewayConfig(max_connections=1_000)
        self.backend = GatewayBackend(config, connect, self.clock, ports, source)
        self.broken = 0

    def admit(self, session: RemotingSession, request: RemotingCommand) -> Mapping[int, Handler]:
        find_user(request, USERS)
        return self.backend.handlers

    def session(self, output: FrontOutput, broker_name: str) -> RemotingSession:
        return RemotingSession(
            output,
            broker_name,
            self.admit,
            LIMITS,
            self.clock.monotonic_ms,
            self.backend.members.session_ended,
            self._note,
        )

    def _note(self, text: str) -> None:
        self.broken += 1


def request_of(source: random.Random) -> bytes:
    """Returns the frame of a request, good or not."""
    code = source.choice([*RemotingCode, 0, 200_050, -5])
    fields = {
        name: source.choice(TEXTS if source.random() < 0.6 else NUMBERS)
        for name in source.sample(FIELDS, source.randrange(12))
    }
    for name in ("i", "properties"):
        if name in fields:
            fields[name] = source.choice(PROPERTIES)
    if source.random() < 0.9:
        fields.pop(ACCESS_KEY, None)
    body = json.dumps(source.choice(BODIES)).encode() if source.random() < 0.6 else b""
    if source.random() < 0.2:
        body = source.randbytes(source.choice([1, 20, 300]))
    is_json = source.random() < 0.5 or not -(2**15) <= code < 2**15
    flag = source.choice([0] * 6 + [ONEWAY, RESPONSE])
    command = RemotingCommand(code, source.randrange(9), flag, fields, body, is_json=is_json)
    return b"".join(encode_frame(command))


def hostile(source: random.Random) -> list[bytes]:
    """Returns frames of one connection, some of them damaged."""
    frames = [request_of(source) for _ in range(source.randrange(1, 12))]
    for _ in range(source.choice([0, 0, 0, 1, 2])):
        at = source.randrange(len(frames))
        frame = bytearray(frames[at])
        place = source.randrange(len(frame) or 1)
        match source.randrange(4):
            case 0:
                frame[place : place + 1] = source.randbytes(1)
            case 1:
                del frame[place:]
            case 2:
                frame[:8] = struct.pack(">II", source.randrange(2**32), source.randrange(2**32))
            case 3:
                frame[place:place] = source.randbytes(source.randrange(1, 9))
        frames[at] = bytes(frame)
    return frames


def serve(world: RemotingWorld, frames: list[bytes], source: random.Random) -> None:
    """Sends frames by a connection, and ends it."""
    output = FrontOutput()
    session = world.session(output, source.choice(["broker-a"] * 9 + [""]))
    for frame in frames:
        if session.is_closed:
            break
        cut = source.randrange(len(frame) + 1) if source.random() < 0.2 else len(frame)
        for piece in frame[:cut], frame[cut:]:
            if piece and not session.is_closed:
                session.on_bytes(piece)
        if source.random() < 0.1:
            world.on_command("broker-a", world.brokers.command())
        world.brokers.run()
        world.clock.advance(source.choice([0, 1, 100]))
    if not session.is_closed:
        session.on_closed()
    assert len(output.data) < 1 << 20
    for _ in range(5):
        world.brokers.run()


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_requests_with_damage_are_answered_or_end_their_connection(seed):
    source = random.Random(seed)
    serve(RemotingWorld(source), hostile(source), source)


@given(st.binary(max_size=300))
def test_any_bytes_are_answered_or_end_their_connection(data):
    source = random.Random(len(data))
    serve(RemotingWorld(source), [data], source)


def main(wanted: int, seed: int) -> None:
    """Sends hostile frames, and prints how that went."""
    source = random.Random(seed)
    world, sent, connections, slowest = RemotingWorld(source), 0, 0, 0.0
    begun = time.process_time()
    while sent < wanted:
        frames = hostile(source)
        sent += len(frames)
        connections += 1
        at = time.process_time()
        serve(world, frames, source)
        slowest = max(slowest, time.process_time() - at)
    taken = time.process_time() - begun
    print(
        f"{sent} frames by {connections} connections in {taken:.0f} s of processor time, "
        f"{world.broken} broken, {len(world.backend.members)} members left, "
        f"slowest connection {slowest * 1_000:.1f} ms"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
