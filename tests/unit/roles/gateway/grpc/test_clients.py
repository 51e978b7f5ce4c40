"""Clients by gRPC, and questions to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from harness.grpc_world import FrontWorld

from mqmesh.errors import ClientNotOnline
from mqmesh.protocol.client_rpc import RunningInfo, RunningInfoRequest
from mqmesh.protocol.groups import GroupConfig
from mqmesh.protocol.grpc.messages import CLASSES
from mqmesh.roles.gateway.grpc import questions
from mqmesh.roles.gateway.grpc.clients import NODEJS, GrpcClient, GrpcClients, consumer_settings
from mqmesh.roles.gateway.grpc.questions import NO_STACKS, GrpcQuestions


class Plain:
    """An object with attributes, which is equal to no other one."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Scene:
    """One client at one broker."""

    def __init__(self) -> None:
        self.world = FrontWorld()
        self.asked: list[str] = []
        self.world.ask = lambda broker, *_: self.asked.append(broker)
        self.clients = GrpcClients(
            self.world,  # type: ignore[arg-type]
            lambda: ["broker-a"],
            10,
            lambda client: None,
            lambda client, reply: None,
        )
        self.session: Any = Plain(client_ids={}, peer="h:1")
        self.stream: Any = Plain(headers={}, send=lambda **fields: None)
        call: Any = SimpleNamespace(client_id="me", headers={}, session=self.session)
        self.client: GrpcClient = self.clients.of(call)
        self.client.streams[self.stream] = None
        self.questions = GrpcQuestions(self.world, self.clients)  # type: ignore[arg-type]


def test_a_client_without_a_connection_is_not_taken_back_from_another_worker():
    scene = Scene()
    scene.clients.join(scene.client, "broker-a", lambda error: None)
    scene.clients.tick()
    assert scene.asked == ["broker-a"] * 2
    scene.clients.session_ended(scene.session)
    scene.clients.tick()
    assert scene.asked == ["broker-a"] * 2


def test_a_client_that_does_not_show_its_stacks_is_described_without():
    scene = Scene()
    found: list[RunningInfo | ClientNotOnline] = []
    asked = RunningInfoRequest("g", "me", with_stacks=True)
    scene.questions.running_info(asked, found.append)
    scene.world.run()
    (info,) = found
    assert isinstance(info, RunningInfo)
    assert (info.client_id, info.stacks) == ("me", NO_STACKS)


def test_a_client_that_went_away_is_not_described():
    scene = Scene()
    found: list[RunningInfo | ClientNotOnline] = []
    scene.questions.running_info(RunningInfoRequest("g", "me", with_stacks=True), found.append)
    scene.client.streams.clear()
    scene.world.run()
    assert [type(one) for one in found] == [ClientNotOnline]


def test_a_message_that_cannot_be_written_leaves_no_question(monkeypatch):
    def fail(*arguments: object) -> None:
        raise ValueError("unreadable")

    scene = Scene()
    monkeypatch.setattr(questions, "write_message", fail)
    message: Any = SimpleNamespace(delivery_attempt=1)
    with pytest.raises(ValueError, match="unreadable"):
        scene.questions.hand_over("me", message, lambda found: None)
    assert not scene.world.soon


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GroupConfig("g", delivery="fifo"), (1, 1, 1.0)),
        (GroupConfig("g", delivery="message", retry_delays="5s"), (5, 5, 1.0)),
        (
            GroupConfig("g", delivery="message", retry_max_times=3, retry_delays="2s 6s 18s"),
            (2, 18, 3.0),
        ),
    ],
)
def test_node_js_which_knows_no_schedule_of_retries_gets_one_that_grows(config, expected):
    asked = CLASSES["Settings"](user_agent=CLASSES["UA"](language=NODEJS))
    policy = consumer_settings(asked, config).backoff_policy
    backoff = policy.exponential_backoff
    assert (backoff.initial.seconds, backoff.max.seconds, backoff.multiplier) == expected
    assert policy.max_attempts == (4 if config.retry_max_times == 3 else 17)
