"""Every command at every role for every kind of user: nothing succeeds without the right to it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.listening import family, listening
from harness.patience import until
from harness.rights import TOPIC, Found, callers, frame_of, intruders, may, message_id_of
from harness.secured import Roles, place_of

from mqmesh.batch.half_batch import half_parts, have_immunity
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.protocol.admin import RuntimeInfo, RuntimeInfoRequest
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import decode_frame, decode_header, encode_frame, encode_header
from mqmesh.protocol.commands import COMMANDS, CommandSpec, RequestCode, Right, ServedBy, served_by
from mqmesh.protocol.messaging import decode_outcomes, encode_send
from mqmesh.protocol.queries import QueryMessageResponse
from mqmesh.protocol.route import TopicRoutes
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.admin.dead_letters import DeadLetterClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.security.keys import KeyRing, load_credentials
from mqmesh.transport.zmq import sockets

CALLERS, INTRUDERS = callers(), intruders()
PATIENCE_MS = 10_000
ROLES = [
    ServedBy.NAMESRV,
    ServedBy.COORDINATOR,
    ServedBy.FILTERSRV,
    ServedBy.SCHEDULE,
    ServedBy.BROKER,
]
REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
}
LAST = 1_000_000
"""Opaque of the PING behind all other requests."""
DISTURBING = {RequestCode.OPEN_SCHEDULE}
"""Whoever opens it takes the broker from the schedule service, which cancels nothing then."""
ON_ITS_CONNECTION = {(ServedBy.SCHEDULE, RequestCode.NOTIFY_SCHEDULE)}
"""It is not asked for, but told by the broker that it has connected to."""
SILENT = {RequestCode.PULL_SCHEDULE}
"""It may wait for something to answer with."""


class Answer(NamedTuple):
    code: int
    header: memoryview
    body: memoryview


class Wire:
    """Asks the processes as whoever one likes."""

    def __init__(self, roles: Roles) -> None:
        self.context = sockets.new_context()
        self.roles = roles
        self.admin = load_credentials(roles.keys / "client.toml")

    def open(self, role, own, endpoint=None):
        """A connection as somebody, to where a role listens."""
        socket = sockets.dealer(self.context)
        socket.sndtimeo = socket.rcvtimeo = PATIENCE_MS
        ring = None if own is None else KeyRing(own, self.server_key(role))
        sockets.connect(socket, endpoint or self.endpoint(role), ring)
        return socket

    def server_key(self, role) -> str:
        return self.roles.server_key(role)

    def endpoint(self, role) -> str:
        return place_of(self.roles.roles[role].endpoint)

    def ask_all(self, role, own, frames, endpoint=None) -> dict[int, Answer]:
        """Sends frames and a PING behind them; returns what comes by opaque."""
        socket = self.open(role, own, endpoint)
        for frame in (*frames, encode_frame(RequestCode.PING, LAST)):
            socket.send(frame)
        waited = {decode_frame(frame).opaque for frame in frames} - SILENT
        waited -= {code for code in waited if COMMANDS[RequestCode(code)].oneway}
        waited.add(LAST)
        answers = {}
        while waited - answers.keys():
            assert socket.poll(PATIENCE_MS), [RequestCode(one) for one in waited - answers.keys()]
            answer = decode_frame(socket.recv())
            if answer.is_response:
                answers[answer.opaque] = Answer(answer.code, answer.header, answer.body)
        socket.close(0)
        return answers

    def requests(self, role) -> int:
        """What a role has taken so far, this question too."""
        return self.metric(role, "requests_total")

    def metric(self, role, name) -> int:
        """A metric of a role."""
        code = int(RequestCode.GET_BROKER_RUNTIME_INFO)
        frame = encode_frame(code, code, header=encode_header(RuntimeInfoRequest()))
        told = self.ask_all(role, self.admin, [frame])[code]
        metrics = decode_header(RuntimeInfo, told.header).metrics
        (found,) = [one for one in metrics if one.metric.name == name]
        return found.samples[0].value


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    users = [one.user for one in (*CALLERS, *INTRUDERS) if one.user is not None]
    with Roles(tmp_path_factory.mktemp("r"), users=users) as roles:
        wire = Wire(roles)
        yield wire
        wire.context.destroy(linger=0)


def index_lag(wire) -> int:
    """Bytes that the index does not know of yet."""
    return wire.metric(ServedBy.BROKER, "index_lag_bytes")


@pytest.fixture(scope="module")
def found(wire) -> Found:
    """What the commands are about."""
    address, keys = wire.roles.namesrv_addr, str(wire.roles.keys / "client.toml")
    with AdminClient(address, credentials=keys) as admin:
        admin.create_topic(TOPIC)
    with Producer("p", namesrv_addr=address, credentials=keys) as producer:
        delayed = [producer.send(Message(TOPIC, b"x").delayed_by(3_600_000)) for _ in CALLERS]
    half = [Message(TOPIC, b"x")]
    parts = half_parts(
        encode_payload(half),
        producer_group="p",
        real_topic=TOPIC,
        real_queue_id=0,
        has_immunity=have_immunity(half),
        producer_id=PRODUCER_ID,
        first_sequence=0,
        born_timestamp=1,
    )
    plain = encode_batch(
        half, topic=TOPIC, queue_id=0, producer_id=PRODUCER_ID, first_sequence=1, born_timestamp=1
    )
    frame = encode_frame(
        RequestCode.SEND_MESSAGE,
        int(RequestCode.SEND_MESSAGE),
        *parts,
        plain,
        header=encode_send(3_000, 2, PRODUCER_KEY),
    )
    answers = wire.ask_all(ServedBy.BROKER, wire.admin, [frame])
    told = answers[RequestCode.SEND_MESSAGE]
    halved, stored = decode_outcomes(told.header, told.body)
    assert (halved.code, stored.code) == (0, 0)
    until(lambda: index_lag(wire) == 0)
    return Found(
        stored.commitlog_offset,
        message_id_of(1),
        halved.base_queue_offset,
        [(one.producer_id, one.sequence) for one in delayed],
    )


def places(wire, role) -> list[str]:
    """Where a role takes requests."""
    if role is ServedBy.SCHEDULE:
        return [wire.endpoint(role)]
    local = [one for one in listening(wire.roles.roles[role].pid) if one.startswith("ipc://")]
    return [wire.endpoint(role), *local]


NOT_THERE = {
    RequestCode.VIEW_MESSAGE: ResponseCode.OFFSET_ILLEGAL,
    RequestCode.CANCEL_DELAYED: ResponseCode.QUERY_NOT_FOUND,
}
"""Answers about what is of another namespace, as if it were not there."""


def is_done(spec: CommandSpec, answer: Answer | None) -> bool:
    """Something was done, or told, or not for want of a right."""
    if answer is None:
        assert spec.oneway or spec.code in SILENT
        return True
    code = answer.code
    if code == ResponseCode.SUCCESS and spec.code == RequestCode.SEND_MESSAGE:
        (outcome,) = decode_outcomes(answer.header, answer.body)
        code = outcome.code
    if code == ResponseCode.SUCCESS and spec.code == RequestCode.QUERY_MESSAGE_BY_ID:
        # Of any topic, so what one may not read is left out.
        return decode_header(QueryMessageResponse, answer.header).message_count > 0
    if code == ResponseCode.SUCCESS and spec.code == RequestCode.GET_ROUTES_OF_TOPICS:
        return bool(decode_header(TopicRoutes, answer.header).routes)  # likewise
    hidden = (code == ResponseCode.TOPIC_NOT_EXIST and spec.right is Right.NONE) or (
        code == NOT_THERE.get(spec.code)
    )
    return code != ResponseCode.NO_PERMISSION and not hidden


def test_every_role_and_every_command_is_asked():
    assert set(ROLES) == set(ServedBy) - {
        ServedBy.ALL,
        ServedBy.CLIENT,
        ServedBy.INDEXER,
        ServedBy.GATEWAY,
    }
    assert set(COMMANDS) == set(RequestCode)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_nobody_does_without_the_right_and_everybody_with_it(wire, found, role):
    served, wrong = served_by(role), []
    first = [spec for spec in COMMANDS.values() if spec.code not in DISTURBING]
    last = [COMMANDS[code] for code in sorted(DISTURBING)]
    turns = [(specs, place) for specs in (first, last) for place in places(wire, role)]
    for specs, place in turns:
        for number, caller in enumerate(CALLERS):
            frames = [frame_of(spec, number, found) for spec in specs]
            answers = wire.ask_all(role, caller.credentials, frames, place)
            for spec in specs:
                answer = answers.get(int(spec.code))
                if spec.code not in served:
                    is_right = answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                elif (role, spec.code) in ON_ITS_CONNECTION:
                    is_right = answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
                else:
                    is_right = is_done(spec, answer) == may(caller, spec)
                if not is_right:
                    told = None if answer is None else ResponseCode(answer.code).name
                    wrong.append((place, caller.name, spec.code.name, told))
    assert not wrong


@pytest.fixture(scope="module")
def tenants(wire) -> dict[str, dict[str, Any]]:
    """Keywords of the clients of two tenants, by the namespaces that they have worked in."""
    found = {}
    for caller in CALLERS:
        if caller.namespace:
            key = wire.admin.namesrv_server_key
            found[caller.namespace] = {
                "namesrv_addr": wire.roles.namesrv_addr,
                "credentials": msgspec.structs.replace(caller.credentials, namesrv_server_key=key),
                "namespace": caller.namespace,
            }
    return found


@pytest.fixture(scope="module")
def message_ids(tenants) -> dict[str, str]:
    """Ids of messages that the tenants have sent, read and rejected, under the same names."""
    return {namespace: work(client, namespace.encode()) for namespace, client in tenants.items()}


def work(client: dict[str, Any], body: bytes) -> str:
    with AdminClient(**client) as admin:
        admin.create_topic("payments")
    with Producer("till", **client) as producer:
        sent = [
            producer.send(Message("payments", body, tag=tag, keys=["k"])) for tag in (None, "bad")
        ]
    assert {one.message_queue.topic for one in sent} == {"payments"}
    left = 2
    with SimpleConsumer("ledger", consume_from_where="FIRST_OFFSET", **client) as consumer:
        consumer.subscribe("payments")
        while left:
            for one in consumer.receive(wait_ms=PATIENCE_MS):
                assert (one.topic, one.message_queue.topic) == ("payments", "payments")
                assert one.body == body
                if one.tag is None:
                    consumer.ack(one)
                else:
                    consumer.reject(one, "bad")
                left -= 1
    return sent[0].message_id


def test_a_tenant_sees_what_is_in_its_namespace(tenants, message_ids):
    for namespace, client in tenants.items():
        body = namespace.encode()
        with GroupAdmin(**client) as admin:
            topics = set(admin.topics())
            assert topics >= {"payments", "%DLQ%ledger"}
            assert not {one for one in topics if "%" in one.removeprefix("%DLQ%")}
            (groups,) = admin.groups().values()
            assert "ledger" in [one.config.group for one in groups]
            assert {one.progress.topic for one in admin.progress("ledger").queues} >= {"payments"}
            (readings,) = admin.runtime_info().values()
            labels = (f"{namespace}%payments", "normal", "false")
            assert readings.number("topic_put_messages_total", *labels) == 2
        with DeadLetterClient(**client) as dead:
            (found,) = dead.scan("ledger")
            assert (found.message.topic, found.message.body) == ("payments", body)
        with QueryClient(**client) as query:
            (found,) = query.by_key("payments", "k", max_count=1).messages
            assert (found.topic, found.body) == ("payments", body)
            for other, message_id in message_ids.items():
                bodies = [one.body for one in query.by_id(message_id).messages]
                assert bodies == [body] * (other == namespace)


def test_no_answer_to_a_tenant_says_anything_of_another_one(wire, message_ids):
    prefixes = {f"{one}%".encode() for one in message_ids}
    for role in ROLES:
        specs = [one for one in served_by(role).values() if one.scoped]
        frames = [
            encode_frame(one.code, one.code, header=encode_header(one.request())) for one in specs
        ]
        for caller in CALLERS:
            if caller.namespace or caller.name == "admin":
                answers = wire.ask_all(role, caller.credentials, frames)
                said = {
                    prefix
                    for prefix in prefixes
                    for one in answers.values()
                    if prefix in bytes(one.header) + bytes(one.body)
                }
                own = {f"{caller.namespace}%".encode()} if caller.namespace else prefixes
                assert said <= own
                assert said == own or role is not ServedBy.BROKER
                assert all(answers[one.code].code == ResponseCode.SUCCESS for one in specs)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_who_may_not_connect_has_no_request_read(wire, found, role):
    frames = [frame_of(spec, 0, found) for spec in COMMANDS.values()]
    for place in places(wire, role):
        before = wire.requests(role)
        for own in (None, *(one.credentials for one in INTRUDERS)):
            socket = wire.context.socket(zmq.DEALER)
            monitor = sockets.monitor(socket, with_refusals=True)
            ring = None if own is None else KeyRing(own, wire.server_key(role))
            sockets.connect(socket, place, ring)
            for frame in frames:
                try:
                    socket.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    break  # The role has refused the connection already, and nothing leaves.
            events = set()
            while not events & REFUSALS:
                assert monitor.poll(PATIENCE_MS), (place, own, events)
                events |= {event for event, _ in sockets.read_monitor(monitor)}
            assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in events
            assert not socket.poll(0)
            socket.setsockopt(zmq.LINGER, 0)
            sockets.close(socket, monitor)
        # The cluster's own processes ask a little meanwhile; an intruder asks for everything.
        assert wire.requests(role) < before + len(frames)


def test_what_needs_no_key_is_reached_by_nobody_else(wire):
    """Helpers of a role listen to their own user alone: in folders that are closed to others."""
    told = {place for role in ROLES for place in places(wire, role)}
    others = [
        place
        for role in ROLES
        for pid in family(wire.roles.roles[role].pid)[1:]
        for place in listening(pid)
        if place not in told
    ]
    assert others, "a broker has an index process"
    for place in others:
        kind, _, path = place.partition("://")
        assert kind == "ipc"
        assert not stat.S_IMODE(Path(path).parent.stat().st_mode) & 0o077
