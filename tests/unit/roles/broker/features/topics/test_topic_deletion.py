"""A topic is deleted: who knows of it is told before and after."""

from __future__ import annotations

import pytest

from mqmesh.errors import StorageError
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.route import DeleteTopicRequest, TopicConfig


def test_a_topic_stays_when_its_messages_cannot_be_deleted(stage, monkeypatch):
    features = stage.features
    features.state.topics.set(TopicConfig("t"), 1)

    def fail(topic: str) -> None:
        raise StorageError("planned: the disk is full")

    monkeypatch.setattr(features.core.store, "delete_topic", fail)
    with pytest.raises(StorageError, match="planned"):
        stage.ask(RequestCode.DELETE_TOPIC_IN_BROKER, DeleteTopicRequest("t"))
    assert features.state.topics.get("t") is not None
