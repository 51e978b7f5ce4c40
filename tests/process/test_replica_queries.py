"""Messages are looked up by key and id at slaves."""

from __future__ import annotations

from harness.patience import until
from harness.replica_group import Group, indexed_batches_at, pair

from mqmesh import Message, Producer
from mqmesh.cli.main import main
from mqmesh.sdk.admin.queries import QueryClient, QueryResult

COUNT = 50


def send(namesrv: str) -> str:
    """Sends messages with one key; the id of the last."""
    with Producer("shop", namesrv_addr=namesrv, send_msg_timeout_ms=20_000) as producer:
        for number in range(COUNT - 1):
            producer.send(Message("t", b"%d" % number, keys=["order-7"]))
        return producer.send(Message("t", b"last", keys=["order-7"])).message_id


def by_key(namesrv: str) -> QueryResult:
    with QueryClient(namesrv) as query:
        return query.by_key("t", "order-7", max_count=COUNT + 1)


def test_a_slave_answers_queries_without_its_master_and_as_the_master(short_tmp_path, capsys):
    group = Group(short_tmp_path)
    try:
        pair(group)
        namesrv = group.namesrv.endpoint
        message_id = send(namesrv)
        until(group.is_caught_up)
        until(lambda: indexed_batches_at(group.endpoints[1]) >= COUNT)
        group.replicas[0].kill()
        until(lambda: group.status(0) is None and not group.status(1).connected)
        found = by_key(namesrv)
        assert (len(found.messages), found.notes) == (COUNT, {})
        group.admin.promote("broker-a", 1)
        until(lambda: group.status(0) is not None)
        found = by_key(namesrv)
        assert (len(found.messages), found.notes) == (COUNT, {})
        for command in (["by-key", "order-7", "-t", "t"], ["by-id", message_id]):
            assert main(["--namesrv", namesrv, "query", *command, "--json"]) == 0
            assert message_id in capsys.readouterr().out
    finally:
        group.close()
