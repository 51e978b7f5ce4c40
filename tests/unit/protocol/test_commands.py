"""The table of commands: what a row says fits the headers."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.command import encode_header
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
from mqmesh.protocol.groups import CloneOffsetRequest
from mqmesh.protocol.membership import (
    ConsumerData,
    HeartbeatRequest,
    LockBatchRequest,
    LockEntry,
    Subscription,
)
from mqmesh.protocol.messaging import encode_send
from mqmesh.protocol.pulling import PullRequest


def test_every_role_but_the_client_answers_ping():
    for server in set(ServedBy) - {ServedBy.ALL}:
        assert RequestCode.PING in served_by(server), server


def inner(kind):
    """The struct of a field: also of the members of a list, and beside None."""
    found = msgspec.inspect.type_info(kind)
    options = found.types if isinstance(found, msgspec.inspect.UnionType) else (found,)
    (one,) = (one for one in options if not isinstance(one, msgspec.inspect.NoneType))
    is_list = isinstance(one, msgspec.inspect.ListType)
    one = one.item_type if is_list else one
    return (one.cls if isinstance(one, msgspec.inspect.StructType) else None), is_list


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_topics_and_groups_stand_where_the_row_says(spec: CommandSpec):
    for path in {*spec.topics, *spec.groups} - {IN_BODY, LOOKED_UP}:
        kind = spec.request
        for step in path.split("."):
            fields = {one.name: one.type for one in msgspec.structs.fields(kind)}
            kind, is_list = inner(fields[step.removesuffix("[]")])
            assert is_list == step.endswith("[]"), path
        assert kind is None, path


@pytest.mark.parametrize("spec", COMMANDS.values(), ids=lambda spec: spec.code.name)
def test_no_field_with_the_name_of_a_topic_or_group_is_left_out(spec: CommandSpec):
    if spec.request is None or spec.right is Right.INTERNAL:
        return
    fields = set(spec.request.__struct_fields__)
    for name, places in (("topic", spec.topics), ("group", spec.groups)):
        assert name not in fields or name in places


def test_whoever_needs_a_right_to_topics_or_groups_says_where_they_stand():
    """Where that is not the header, handlers look the right up: test_permits.py."""
    for spec in COMMANDS.values():
        if spec.right is Right.PUB:
            assert spec.topics, spec.code
        if spec.right is Right.SUB:
            assert spec.topics or spec.groups, spec.code


def test_names_are_taken_from_lists_and_lists_in_lists():
    beat = HeartbeatRequest(
        "c",
        consumers=[
            ConsumerData("g", "CLUSTERING", "FIRST", [Subscription("a"), Subscription("b")]),
            ConsumerData("h", "CLUSTERING", "FIRST", [Subscription("c")]),
        ],
    )
    spec = COMMANDS[RequestCode.HEART_BEAT]
    assert spec.topic_names(beat) == ["a", "b", "c"]
    assert spec.group_names(beat) == ["g", "h"]
    lock = LockBatchRequest("g", "c", [LockEntry("a", 0), LockEntry("b", 1)])
    assert COMMANDS[RequestCode.LOCK_BATCH_MQ].topic_names(lock) == ["a", "b"]
    clone = CloneOffsetRequest("from", "to")
    spec = COMMANDS[RequestCode.CLONE_GROUP_OFFSET]
    assert (spec.topic_names(clone), spec.group_names(clone)) == ([], ["from", "to"])


def test_a_header_is_decoded_by_its_row():
    pull = PullRequest("g", "t", 0, 7)
    spec = COMMANDS[RequestCode.PULL_MESSAGE]
    assert spec.decoder()(memoryview(encode_header(pull))) == pull
    with pytest.raises(RemoteProtocolError, match="PullRequest"):
        spec.decoder()(memoryview(b"\x00"))
    send = COMMANDS[RequestCode.SEND_MESSAGE].decoder()
    assert send(memoryview(encode_send(3_000, 2, bytes(16)))) == (3_000, 2, bytes(16))
    with pytest.raises(RemoteProtocolError):
        send(memoryview(b""))


def test_a_header_without_fields_may_be_left_out():
    decode = COMMANDS[RequestCode.GET_BROKER_CLUSTER_INFO].decoder()
    assert decode(memoryview(b"")) == decode(memoryview(b"\x90"))
    with pytest.raises(RemoteProtocolError):
        decode(memoryview(b"\x00"))
    assert COMMANDS[RequestCode.PING].decoder()(memoryview(b"anything")) is None
