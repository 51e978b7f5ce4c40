"""Simple consumers of a group that elects its master: nothing acknowledged comes again."""

from __future__ import annotations

import threading
from pathlib import Path

from harness.failovers import ElectedGroup
from harness.patience import until
from harness.replica_group import indexed_batches_at

from mqmesh.errors import StaleReceipt
from mqmesh.message import Message
from mqmesh.sdk.admin.queries import QueryClient
from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer
from mqmesh.sdk.producer.producer import Producer

COUNT = 600
KEYED = 50
"""Messages of those that have a key."""


def test_a_lost_master_costs_nothing_that_was_acknowledged_or_is_held(short_tmp_path: Path):
    """A member holds ten messages over a failover, while another one works on all others.

    The new master finds messages by their key at once: its replica has indexed them.
    """
    group = ElectedGroup(short_tmp_path)
    acked: set[bytes] = set()
    again: list[bytes] = []
    ended = threading.Event()
    address = group.namesrv.endpoint

    def work() -> None:
        with SimpleConsumer("billing", namesrv_addr=address, settle_timeout_ms=60_000) as consumer:
            consumer.subscribe("orders")
            while not ended.is_set():
                found = consumer.receive(10, wait_ms=300)
                again.extend(one.body for one in found if one.body in acked)
                try:
                    consumer.ack_many(found)
                except StaleReceipt:
                    continue
                acked.update(one.body for one in found)

    try:
        group.admin.create_topic("orders")
        with Producer("p", namesrv_addr=address) as producer:
            for number in range(KEYED):
                producer.send(Message("orders", b"%d" % number, keys=["k"]))
            for replica in group.replicas.values():
                until(lambda at=replica.endpoint: indexed_batches_at(at) >= KEYED)
            sent = [
                producer.send_async(Message("orders", b"%d" % number))
                for number in range(KEYED, COUNT)
            ]
            for one in sent:
                one.result()
        holder = SimpleConsumer("billing", namesrv_addr=address)
        holder.subscribe("orders")
        holder.start()
        held = until(lambda: holder.receive(10, 60_000))
        worker = threading.Thread(target=work)
        worker.start()
        until(lambda: len(acked) >= 100)
        was = group.master()
        group.replicas[was].kill()
        until(lambda: group.master() not in (0, was))
        with QueryClient(address) as query:
            found = query.by_key("orders", "k", max_count=KEYED + 1)
        assert (len(found.messages), found.notes) == (KEYED, {})
        until(lambda: len(acked) == COUNT - len(held))
        assert not acked & {one.body for one in held}, "nobody else got what is held"
        holder.ack_many(held)
        holder.close()
        ended.set()
        worker.join()
    finally:
        ended.set()
        group.close()
    assert again == []
