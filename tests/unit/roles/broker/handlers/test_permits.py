"""Rights to topics that no header tells: handlers have them looked up before anything is done."""

from __future__ import annotations

import pytest
from harness.batches import PRODUCER_ID

from mqmesh.errors import NoPermission
from mqmesh.message import format_message_id
from mqmesh.protocol.codes import RequestCode, ResponseCode
from mqmesh.protocol.commands import COMMANDS, IN_BODY, LOOKED_UP, ServedBy
from mqmesh.protocol.pulling import ViewMessageRequest
from mqmesh.protocol.transactions import (
    Decision,
    EndHalfMessageRequest,
    ViewHalfMessageRequest,
)

FOUND_OUT = {
    code.name
    for code, spec in COMMANDS.items()
    if {IN_BODY, LOOKED_UP} & set(spec.topics) and ServedBy.BROKER in spec.servers
}


def test_each_command_that_finds_topics_out_is_looked_at_here():
    assert {
        "SEND_MESSAGE",
        "VIEW_MESSAGE",
        "QUERY_MESSAGE_BY_ID",
        "END_TRANSACTION",
        "VIEW_HALF_MESSAGE",
        "END_HALF_MESSAGE",
        "CANCEL_DELAYED",  # test_schedule_session.py
    } == FOUND_OUT


def test_a_batch_of_a_forbidden_topic_is_refused_and_the_others_are_stored(stage):
    stage.guard.forbidden.add("secret")
    good, bad, unknown = stage.send(stage.batch("t"), stage.batch("secret", 1), stage.batch("t", 2))
    assert (good.code, bad.code, unknown.code) == (0, ResponseCode.NO_PERMISSION, 0)
    assert "secret" not in stage.store.topics()
    assert stage.context.topics.get("secret") is None, "nor is it made"
    assert ("SEND_MESSAGE", "t") in stage.guard.told


def test_a_half_batch_is_of_the_topic_that_it_goes_to(scene):
    scene.stage.guard.forbidden.add("secret")
    assert scene.send_half(b"x", topic="secret").code == ResponseCode.NO_PERMISSION
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
