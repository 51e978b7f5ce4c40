"""A table over a log that a disk has damaged, and that another replica's bytes put right."""

from __future__ import annotations

from harness.served import features_on
from harness.store_files import StoreFiles, settle

from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.protocol.route import TopicConfig
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.testing.clock import ManualClock
from mqmesh.testing.store_contract import NOW


def put(writes, number: int) -> None:
    data = encode_batch(
        [Message("kv", b"%d" % number, keys=[f"k{number}"])],
        topic="kv",
        queue_id=0,
        producer_id=7,
        first_sequence=number,
        born_timestamp=NOW,
    )
    writes.put_encoded([data], lambda outcomes: None)
    writes.write()


def test_rows_wait_for_the_repair_of_their_queue_and_get_what_a_replica_gave(files: StoreFiles):
    clock = ManualClock()
    store = files.open(clock=clock)
    features = features_on(store, BrokerConfig(), clock)
    features.load()
    features.state.topics.set(TopicConfig("kv", 1, 1, history=1), clock.wall_ms())
    place = store.stats().max_commitlog_offset
    for number in range(3):
        put(features.writes, number)
    end = settle(store, clock.monotonic_ms())
    good = store.read_raw(place, max_bytes=1)
    tables = features.state.tables

    def keys() -> dict[str, bytes]:
        (table,) = tables
        return {key.decode(): row.value for key, row in tables.rows_behind(table, b"", None, 10)}

    files.flip(place + 100)
    tables.begin_anew("planned")
    features.tables.tick(0)
    assert store.is_repairing("kv", 0)
    assert keys() == {}, "nothing is passed over yet"
    while store.is_repairing("kv", 0):
        store.tick(end := end + 1)
    features.tables.tick(0)
    assert keys() == {"k1": b"1", "k2": b"2"}
    store.repair.put_back(good)
    tables.begin_anew("the log was repaired")
    features.tables.tick(0)
    assert keys() == {"k0": b"0", "k1": b"1", "k2": b"2"}
