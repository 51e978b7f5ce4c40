"""Rights to topics that no header tells: handlers have them looked up before anything is done."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec
import pytest
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from harness.filled_headers import filled
from harness.peers import KeptPeer
from harness.served import OF_THE_PROCESS

from mqmesh.errors import BrokerError, NoPermission, OffsetIllegal
from mqmesh.message import format_message_id
from mqmesh.protocol.codes import ResponseCode
from mqmesh.protocol.command import (
    EMPTY_REPLY,
    Principal,
    decode_frame,
    encode_frame,
    encode_header,
)
from mqmesh.protocol.commands import (
    COMMANDS,
    IN_BODY,
    LOOKED_UP,
    CommandSpec,
    RequestCode,
    Right,
    ServedBy,
    served_by,
)
from mqmesh.protocol.messaging import encode_send
from mqmesh.protocol.pulling import ViewMessageRequest
from mqmesh.protocol.request import Request
from mqmesh.protocol.transactions import (
    Decision,
    EndHalfMessageRequest,
    EndOutcome,
    ViewHalfMessageRequest,
)
from mqmesh.roles.broker.core import no_message_at
from mqmesh.roles.dispatch import Dispatch

FOUND_OUT = {
    code.name
    for code, spec in COMMANDS.items()
    if {IN_BODY, LOOKED_UP} & set(spec.topics) and ServedBy.BROKER in spec.servers
}


SERVED = [
    spec
    for code, spec in served_by(ServedBy.BROKER).items()
    if code not in {*served_by(ServedBy.ALL), *OF_THE_PROCESS}
]


class Nobody:
    """Permits nothing.

    Attributes:
        asked: For which right, by whom, and to which topics and groups.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[Right, object, list[str], list[str]]] = []

    def check(self, principal, spec, header):
        names = ([], []) if spec.fixed else (spec.topic_names(header), spec.group_names(header))
        self.asked.append((spec.right, principal, *names))
        raise NoPermission("planned: nothing for you")

    check_topic = check_group = check


def fields_named(value: object, name: str) -> Iterator[str]:
    """What stands in the fields of a name, at any depth."""
    for one in value if isinstance(value, list) else ():
        yield from fields_named(one, name)
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            inner = getattr(value, field)
            if field == name and isinstance(inner, str):
                yield inner
            yield from fields_named(inner, name)


def asking(spec: CommandSpec) -> tuple[Request, object]:
    """A request that says something in every field, and its header."""
    header = None if spec.request is None else filled(spec.request)
    data = encode_send(3_000, 1, PRODUCER_KEY) if spec.fixed else b""
    data = data if header is None else encode_header(header)
    return Request(KeptPeer(b"peer"), decode_frame(encode_frame(spec.code, 1, header=data))), header


@pytest.mark.parametrize("spec", SERVED, ids=lambda spec: spec.code.name)
def test_each_command_asks_for_its_right_before_anything_is_done(stage, spec):
    nobody, served = Nobody(), []
    dispatch = Dispatch(ServedBy.BROKER, stage.clock.monotonic_ns, nobody)
    dispatch.open(stage.features.commands())
    request, header = asking(spec)
    before = traces(stage)
    for _ in range(2):
        with pytest.raises(NoPermission, match="planned"):
            dispatch.handlers[spec.code](request)
        dispatch.open({spec.code: lambda *asked: served.append(asked) or EMPTY_REPLY})
    assert not served
    assert traces(stage) == before
    right, principal, topics, groups = nobody.asked[0]
    assert (right, principal) == (spec.right, request.peer.principal)
    if spec.right is not Right.INTERNAL:
        assert set(fields_named(header, "topic")) <= set(topics)
        assert set(fields_named(header, "group")) <= set(groups)
    assert len(topics) + len(groups) >= len({*spec.topics, *spec.groups} - {IN_BODY, LOOKED_UP})


def traces(stage) -> tuple[object, ...]:
    """What any command leaves somewhere."""
    features = stage.features
    return (
        features.core.store.stats(),
        features.state.topics.version,
        len(features.state.group_table),
        len(features.state.committed),
        features.state.groups.client_count,
        len(features.state.queue_locks),
        features.state.schedule.session,
        features.state.half_messages.table.pending_count,
        len(features.state.moved),
        len(stage.notices),
        len(stage.answers),
        list(stage.saved),
    )


def test_each_command_that_finds_topics_out_is_looked_at_here():
    assert {
        "SEND_MESSAGE",
        "VIEW_MESSAGE",
        "QUERY_MESSAGE_BY_ID",
        "END_TRANSACTION",
        "VIEW_HALF_MESSAGE",
        "END_HALF_MESSAGE",
        "CANCEL_DELAYED",  # test_schedule_session.py
        "CONSUME_MESSAGE_DIRECTLY",  # test_asking.py
        "RESEND_DEAD_LETTERS",  # test_dead_letters.py
    } == FOUND_OUT


def test_a_batch_of_a_forbidden_topic_is_refused_and_the_others_are_stored(stage):
    stage.guard.forbidden.add("secret")
    good, bad, unknown = stage.send(stage.batch("t"), stage.batch("secret", 1), stage.batch("t", 2))
    assert (good.code, bad.code, unknown.code) == (0, ResponseCode.NO_PERMISSION, 0)
    assert "secret" not in stage.store.topics()
    assert stage.features.state.topics.get("secret") is None, "nor is it made"
    assert ("SEND_MESSAGE", "t") in stage.guard.told


def test_a_half_batch_is_of_the_topic_that_it_goes_to(scene):
    scene.stage.guard.forbidden.add("secret")
    assert scene.send_half(b"x", topic="secret").code == ResponseCode.NO_PERMISSION
    assert scene.desk.table.pending_count == 0


def test_a_half_batch_is_of_the_group_whose_members_are_asked_about_it(scene):
    scene.stage.guard.forbidden.add("pg")
    assert scene.send_half(b"x").code == ResponseCode.NO_PERMISSION
    assert scene.desk.table.pending_count == 0


def test_a_stored_batch_is_shown_to_those_who_may_read_its_topic(stage):
    (sent,) = stage.send(stage.batch("secret"))
    view = ViewMessageRequest(sent.commitlog_offset)
    assert stage.ask(RequestCode.VIEW_MESSAGE, view).body
    stage.guard.forbidden.add("secret")
    with pytest.raises(NoPermission, match="secret"):
        stage.ask(RequestCode.VIEW_MESSAGE, view)


def test_a_half_message_is_shown_and_ended_by_those_who_may(scene):
    stage = scene.stage
    base = scene.half(b"x", topic="secret")
    stage.guard.forbidden.add("secret")
    with pytest.raises(NoPermission):
        scene.end((base, 0, 0, 1, Decision.COMMIT))
    message_id = format_message_id(PRODUCER_ID, 0)
    with pytest.raises(NoPermission):
        stage.ask(RequestCode.VIEW_HALF_MESSAGE, ViewHalfMessageRequest(message_id))
    with pytest.raises(NoPermission):
        stage.ask(RequestCode.END_HALF_MESSAGE, EndHalfMessageRequest(message_id, Decision.COMMIT))
    assert scene.desk.table.pending_count == 1
    assert scene.bodies("secret") == []


def of_namespace(stage, name=b"peer") -> None:
    stage.peer(name).principal = Principal("u", namespace="bank")


def test_a_stored_batch_of_another_namespace_is_as_if_it_were_not_there(stage):
    (sent,) = stage.send(stage.batch("shop%t"))
    of_namespace(stage)
    for offset in (sent.commitlog_offset, sent.commitlog_offset + 1):
        with pytest.raises(OffsetIllegal) as caught:
            stage.ask(RequestCode.VIEW_MESSAGE, ViewMessageRequest(offset))
        assert str(caught.value) == str(no_message_at(offset))


def test_a_half_message_of_another_namespace_is_as_if_it_were_not_there(scene):
    stage = scene.stage
    base = scene.half(b"x", topic="shop%t")
    message_id = format_message_id(PRODUCER_ID, 0)
    of_namespace(stage)
    half = scene.desk.table.batches[base]
    with pytest.raises(OffsetIllegal):
        stage.ask(RequestCode.VIEW_MESSAGE, ViewMessageRequest(half.commitlog_offset))
    for code, request in (
        (RequestCode.VIEW_HALF_MESSAGE, ViewHalfMessageRequest),
        (RequestCode.END_HALF_MESSAGE, partial(EndHalfMessageRequest, decision=Decision.COMMIT)),
    ):
        for one in (message_id, format_message_id(PRODUCER_ID, 99)):
            with pytest.raises(BrokerError, match=f"no half message {one} waits") as caught:
                stage.ask(code, request(one))
            assert caught.value.code == ResponseCode.QUERY_NOT_FOUND
    stage.guard.forbidden.add("shop%t")
    assert scene.end((base, 0, 0, 1, Decision.COMMIT)) == [EndOutcome.NOT_PROVEN]
    assert scene.desk.table.pending_count == 1
