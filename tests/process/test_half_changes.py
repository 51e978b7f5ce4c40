"""Commands that change two brokers, one of which does not answer: who has it, and how it ends."""

from __future__ import annotations

import shlex

import pytest

from mqmesh.cli import main
from mqmesh.errors import RequestTimeout
from mqmesh.message import Message
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.groups import GroupConfig, ResetWhere
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster
from mqmesh.transport.zmq.transport import ZmqTransport

A, B = BROKERS = ("broker-a", "broker-b")
CHANGES = {
    RequestCode.UPDATE_AND_CREATE_TOPIC,
    RequestCode.DELETE_TOPIC_IN_BROKER,
    RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
    RequestCode.DELETE_SUBSCRIPTIONGROUP,
    RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
    RequestCode.CLONE_GROUP_OFFSET,
}
COMMANDS = (
    "topic create made --queues 2",
    "topic create made-anew --queues 2 --if-missing",
    "topic update narrow --perm r",
    "topic delete doomed --yes",
    "group create made --retry-max-times 3",
    "group create made-anew --if-missing",
    "group update billing --no-notify",
    "group delete doomed --yes",
    "group clone-offset billing copy --yes",
    "group reset-offset billing --topic orders --to-last --yes",
    "group skip audit --yes",
)


@pytest.fixture
def cluster(tmp_path):
    with ProcessCluster(tmp_path, brokers=BROKERS) as cluster:
        with GroupAdmin(cluster.namesrv_addr) as admin:
            for topic in ("orders", "doomed"):
                admin.create_topic(topic, queues=1)
            admin.put_topic({A: TopicConfig("narrow", 8, 8), B: TopicConfig("narrow", 2, 1)})
            for group in ("billing", "audit", "doomed"):
                admin.create_group(GroupConfig(group))
            with Producer("p", namesrv_addr=cluster.namesrv_addr) as producer:
                for queue in producer.fetch_publish_queues("orders"):
                    producer.send(Message("orders", b"x"), queue=queue)
            for group in ("billing", "audit"):
                admin.reset_offset(group, "orders", ResetWhere.FIRST)
        yield cluster


class Deaf:
    """A connection by which no change comes through."""

    def __init__(self, channel):
        self.close = channel.close
        self._channel = channel

    def request(self, code, *parts, **options):
        if code in CHANGES:
            raise RequestTimeout("no answer in time")
        return self._channel.request(code, *parts, **options)


def offsets(admin, group):
    queues = admin.progress(group, "orders").queues
    return {one.broker_name: one.progress.consumer_offset for one in queues}


def test_it_is_said_who_has_the_change_and_repeating_finishes_it(cluster, monkeypatch, capsys):
    connect, deaf = ZmqTransport.channel, f"tcp://{cluster.brokers[B].endpoint}"

    def channel(transport, endpoint):
        found = connect(transport, endpoint)
        return Deaf(found) if endpoint == deaf else found

    def run(line):
        code = main.main([*shlex.split(line), "--namesrv", cluster.namesrv_addr])
        return code, capsys.readouterr().err

    with monkeypatch.context() as patch:
        patch.setattr(ZmqTransport, "channel", channel)
        for line in COMMANDS:
            code, said = run(line)
            assert code == 1, line
            assert f"broker {B}: no answer in time (done already at {A})" in said, line
    with GroupAdmin(cluster.namesrv_addr) as admin:
        assert (list(admin.topic_configs("made")), list(admin.groups("made"))) == ([A], [A])
        assert offsets(admin, "audit") == {A: 1, B: 0}
        for line in COMMANDS:
            assert run(line) == (0, ""), line
        both = list(BROKERS)
        for name in ("made", "made-anew"):
            assert (list(admin.topic_configs(name)), list(admin.groups(name))) == (both, both)
        assert admin.topic_configs("narrow") == {
            A: [TopicConfig("narrow", 8, 8, perm=4)],
            B: [TopicConfig("narrow", 2, 1, perm=4)],
        }
        assert "doomed" not in admin.topics()
        assert "doomed" not in {
            one.config.group for found in admin.groups().values() for one in found
        }
        settings = [one.config for found in admin.groups("billing").values() for one in found]
        assert settings == [GroupConfig("billing", notify_consumer_ids_changed_enable=False)] * 2
        assert offsets(admin, "billing") == offsets(admin, "audit") == {A: 1, B: 1}
        assert offsets(admin, "copy") == {A: 1, B: 0}  # billing stood there


def test_what_exists_everywhere_is_not_made_anew(cluster, capsys):
    for line in ("topic create orders --queues 1", "group create billing"):
        assert main.main([*shlex.split(line), "--namesrv", cluster.namesrv_addr]) == 1
        assert "exists already" in capsys.readouterr().err
