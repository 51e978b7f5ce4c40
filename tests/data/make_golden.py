"""Writes the golden files of batches, log, state records, what replicas keep and a coordinator.

A golden file is what some release has once written to a disk, so this script never overwrites
one: it adds what is missing. A new format version gets new cases and new files beside these.

Run in the checkout: ``python tests/data/make_golden.py``.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from mqmesh.batch.delayed_batch import ExpiringMeta, pack_due_times
from mqmesh.batch.payload import encode_payload
from mqmesh.batch.record_batch import (
    Attributes,
    batch_parts,
    check_batch,
    check_stored,
    encode_batch,
    read_meta,
    read_payload,
    stamp,
)
from mqmesh.batch.sparse_batch import cut_batch
from mqmesh.host import ProcessMark
from mqmesh.message import Message
from mqmesh.protocol.replication import HeldCommit
from mqmesh.roles.broker.features.groups.held_commits import HeldCommits, HeldDocument
from mqmesh.roles.broker.features.tables.row import (
    COUNTS_KEY,
    HEAD_KEY,
    TABLE_PREFIX,
    Revision,
    Row,
    RowCounts,
    RowsHead,
    TableHead,
    pack,
    row_key,
)
from mqmesh.roles.broker.ha.replica_state import ReplicaState, encode_replica_state
from mqmesh.roles.broker.state_records import (
    DeliveryRecord,
    DeliveryRun,
    GroupRecord,
    GroupSettings,
    MemberSubscriptions,
    OffsetsRecord,
    OwnersRecord,
    QueueOwner,
    RecordPart,
    SentBackRecord,
    TopicRecord,
    TopicSettings,
    encode_state,
    in_bodies,
)
from mqmesh.roles.started_as import StartedAs
from mqmesh.storage.lmdb.coordinator_file import KeptChange, KeptRecord, KeptSession, encode_pairs
from mqmesh.storage.log.control_record import GROUP_DATA, ControlKind, encode_control_record
from mqmesh.storage.log.store_key import StoreKey

LOG_FILE = Path(__file__).resolve().parent / "commitlog-v2.bin"
LOG_KEY = StoreKey(bytes(range(32)))
LOG_START = 2**33
"""Commit-log offset of the first record of ``LOG_FILE``."""
COORDINATOR_FILE = Path(__file__).resolve().parent / "coordinator-v1.json"
COORDINATOR = KeptChange(
    records={
        "groups/c/broker-a": KeptRecord(7, b'{"epoch":3}'),
        "settings/größe": KeptRecord(2**63 - 1, b""),
    },
    sessions={
        "0123456789abcdef0123456789abcdef": KeptSession(
            "groups/c/broker-a", 64, 3_000, b"{}", ProcessMark("host-1", 4_711, 99)
        ),
        "f" * 32: KeptSession("groups/c/broker-a", 1, 600_000, b"", None),
    },
)
"""All that the file of a coordinator may hold."""
ROWS_FILE = Path(__file__).resolve().parent / "table-rows-v2.json"
ROWS = {
    HEAD_KEY: RowsHead(2, 2**32 - 1, 3, 7, (4_096, 2**32 - 1)),
    COUNTS_KEY: RowCounts({0: (2, 11), 7: (1, 5)}, {1: 2}, {1: 16}),
    TABLE_PREFIX + b"kv": TableHead(1, 1_700_000_000_002, 9, (8_192, 5)),
    row_key(1, "größe".encode()): Row(
        [Revision(9, 8_192, 1_700_000_000_003, 0, 1_800_000_000_000, 4), Revision(2, 0, 5, 2)],
        b"1.80",
    ),
    row_key(1, b"gone"): Row([Revision(2**53, 2**40, 1_700_000_000_003, 1, 1_700_086_400_003)]),
}
"""Rows of a table, of all kinds that have a value."""
OLD_STATE_FILE = Path(__file__).resolve().parent / "state-v1.bin"
STATE_FILE_2 = Path(__file__).resolve().parent / "state-v2.bin"
STATE_FILE_3 = Path(__file__).resolve().parent / "state-v3.bin"
STATE_FILE_4 = Path(__file__).resolve().parent / "state-v4.bin"
STATE_FILE_5 = Path(__file__).resolve().parent / "state-v5.bin"
STATE_FILE = Path(__file__).resolve().parent / "state-v6.bin"
POLICIES = GroupSettings(
    False,
    False,
    3,
    False,
    retry_delays="exp 1s x2 max 2h jitter 20%",
    dead_letter="orders-dead",
    paused_until=1_700_000_000_000,
    paused_topics={"t": 1_700_000_000_001},
    max_messages_per_s=100,
    delivery="message",
    invisible_ms=1_000,
    max_unsettled=7,
    lost_grace_ms=0,
    priority_fairness=10,
)
STATE_3 = [
    TopicRecord(
        "t", TopicSettings(8, 4, 6, True, True, 3_600_000, 1_000_000, "{}", 8, True, "dead-letter")
    ),
    TopicRecord("gone"),
    GroupRecord("g", POLICIES),
    GroupRecord("gone"),
    OffsetsRecord("g", "t", {0: 7, 2**32 - 1: 2**63 - 1}, adds=True),
    OffsetsRecord("g", "gone"),
    SentBackRecord("g", 9),
    SentBackRecord("gone"),
    DeliveryRecord(
        "g",
        "t",
        2**32 - 1,
        7,
        2**63 - 1,
        2**32 + 5,
        [(7, 9), (70, 1_094)],
        [DeliveryRun(7, 2, 1, 0, 2**32 + 6), DeliveryRun(70, b"\x01\x80", 3, 1_700_000_000_000)],
        adds=True,
    ),
    DeliveryRecord("g", "gone", 0),
    OwnersRecord(
        "g",
        {
            "host:1@a#x": MemberSubscriptions(
                "CLUSTERING",
                "LAST_OFFSET",
                [("t", "a || b", "TAG"), ("u", "*", "TAG")],
                "queue",
                True,
            ),
            "gone": None,
        },
        [QueueOwner("t", 2**32 - 1, "host:1@a#x", 7 << 32 | 5), QueueOwner("t", 0)],
    ),
]
"""State records that version 3 has, of all kinds."""
STATE_4 = [*STATE_3, OwnersRecord("", known_epoch=7), RecordPart(0, False, b"\x92\x02\xa1")]
"""State records that version 4 has."""
STATE_5 = [*STATE_4, OffsetsRecord("g", "u", {0: 7, 1: 0}, True, [2**32 - 1, 0])]
"""State records that version 5 has."""
TABLE = TopicRecord("kv", TopicSettings(1, 1, 6, True, history=5, table_id=1_700_000_000_002))
STATE = [*STATE_5, TABLE]
"""All kinds of state records."""
STARTED_FILE = Path(__file__).resolve().parent / "started-as-v1.json"
STARTED = StartedAs(secured=True, follows=True)
"""All that a data folder remembers of its starts."""
REPLICA_FILE = Path(__file__).resolve().parent / "replica-state-v1.json"
REPLICA = ReplicaState(
    log_id=7,
    replica_id=2,
    identity="zw7t",
    promised_epoch=5,
    incarnation=3,
    boot_id="monday",
    place="12-34",
)
HELD_FILE = Path(__file__).resolve().parent / "held-commits-v1.json"
HELD = HeldDocument(7, [HeldCommit("g", "t", 0, -1, 70, 2), HeldCommit("h", "t", 4, 5, 6)])

FOLDER = Path(__file__).resolve().parent

CASES: dict[str, dict[str, Any]] = {
    "no-tags": {
        "messages": [Message("flights", b"one"), Message("flights", b"\x00\xff two")],
        "topic": "flights",
        "queue_id": 0,
        "producer_id": 1,
        "first_sequence": 0,
        "born_timestamp": 1_700_000_000_000,
    },
    "uniform-tag": {
        "messages": [Message("flights", b"x" * size, "UA") for size in (1, 40, 300)],
        "topic": "flights",
        "queue_id": 7,
        "producer_id": 0x0123456789ABCDEF,
        "first_sequence": 41,
        "born_timestamp": 1_700_000_000_001,
        "born_host": "host-1:4711",
    },
    "mixed-tags": {
        "messages": [
            Message("flights", b"a", "UA"),
            Message("flights", b"b"),
            Message("flights", b"c", "Zürich 東京"),
        ],
        "topic": "flights",
        "queue_id": 2**32 - 1,
        "producer_id": 2**64 - 1,
        "first_sequence": 2**64 - 4,
        "born_timestamp": 0,
        "born_host": "h:1",
    },
    "keys": {
        "messages": [
            Message("flights", b"a", None, ["N14228", "1545"]),
            Message("flights", b"b"),
            Message("flights", b"c", None, ["ключ"]),
        ],
        "topic": "flights",
        "queue_id": 3,
        "producer_id": 5,
        "first_sequence": 6,
        "born_timestamp": 1_700_000_000_002,
    },
    "properties": {
        "messages": [
            Message("flights", b"a", None, [], {"origin": "EWR", "leer": "", "naïve": "日本"}),
            Message("flights", b"b", None, [], {}),
        ],
        "topic": "flights",
        "queue_id": 3,
        "producer_id": 5,
        "first_sequence": 9,
        "born_timestamp": 1_700_000_000_003,
    },
    "everything": {
        "messages": [
            Message("T|a%_-", b"a", "tag", ["k"], {"p": "v"}, 2**31 - 1, "shard", 18),
            Message("T|a%_-", b"b", None, [], None, 0, None, 0, 253_402_300_799_999),
        ],
        "topic": "%RETRY%group",
        "queue_id": 1,
        "producer_id": 2,
        "first_sequence": 3,
        "born_timestamp": 253_402_300_799_999,
        "born_host": "host-1:4711",
        "attributes": 4 | 32 | 64,
    },
    "zstd": {
        "messages": [Message("flights", b"flight %d, " % number * 30) for number in range(20)],
        "topic": "flights",
        "queue_id": 4,
        "producer_id": 5,
        "first_sequence": 12,
        "born_timestamp": 1_700_000_000_004,
        "compress_over_bytes": 0,
    },
}
"""Arguments of ``encode_batch`` by the name of the case."""

STAMP = {
    "commitlog_offset": 2**40 + 3,
    "base_queue_offset": 2**33 + 5,
    "store_timestamp": 1_700_000_000_999,
    "epoch": 6,
    "store_id": 2**32 - 1,
    "store_check": lambda fields: hashlib.blake2b(
        fields, key=bytes(range(32)), digest_size=8, person=b"mqmesh batch"
    ).digest(),
}
"""What the broker adds to the case ``everything`` in the file ``stored``."""


def path_of(case: str) -> Path:
    """The golden file of a case."""
    return FOLDER / f"record-batch-v1-{case}.bin"


def encode_case(case: str) -> bytes:
    """The batch of a case as the code of today writes it."""
    if case == "sparse":
        # The case ``stored``, as a consumer gets it who wants its second message only.
        batch = encode_case("stored")
        header = check_stored(batch)
        meta, payload = read_meta(batch, header), read_payload(batch, header)
        return b"".join(cut_batch(header, meta, payload, b"\x00\x01"))
    if case == "expiring":
        # Delayed until then, and alive for an hour from then on.
        keys = CASES["keys"]
        payload = encode_payload(keys["messages"])
        due = pack_due_times([1_700_000_000_005])
        meta = ExpiringMeta("flights", payload.tag_hashes, "h:1", 0, due, expires_ms=-3_600_000)
        rest = {name: value for name, value in keys.items() if name != "messages"}
        attributes = Attributes.HAS_DELAY | Attributes.HAS_EXPIRY
        return b"".join(batch_parts(payload, **rest, attributes=attributes, meta=meta))
    if case == "stored":
        batch = encode_case("everything")
        part = stamp(check_batch(batch), **STAMP)
        return part + batch[len(part) :]
    return encode_batch(**CASES[case])


def encode_log() -> bytes:
    """A stretch of a log as the code of today writes it: an epoch, a batch, a group, a deletion."""
    log = b""

    def marker(kind: ControlKind, data: bytes) -> bytes:
        return encode_control_record(
            kind,
            commitlog_offset=LOG_START + len(log),
            epoch=STAMP["epoch"],
            store_id=STAMP["store_id"],
            store_timestamp=STAMP["store_timestamp"],
            data=data,
            store_check=LOG_KEY.marker_check,
        )

    def stored(case: str) -> bytes:
        batch = encode_case(case)
        part = stamp(check_batch(batch), **STAMP | {"commitlog_offset": LOG_START + len(log)})
        return part + batch[len(part) :]

    log += marker(ControlKind.EPOCH, b"replica 2")
    log += stored("no-tags")
    group = ("keys", "mixed-tags")
    size = sum(len(encode_case(case)) for case in group)
    log += marker(ControlKind.GROUP, GROUP_DATA.pack(size, len(group)))
    for case in group:
        log += stored(case)
    return log + marker(ControlKind.TOPIC_DELETED, b"flights")


def encode_records() -> bytes:
    """The batch of ``STATE`` as the code of today writes it."""
    (body,) = in_bodies(STATE, 10_000)
    return encode_state(body, 5, 1_700_000_000_000)  # type: ignore[arg-type]


def encode_rows() -> bytes:
    """The pairs of ``ROWS`` as the code of today writes them, in hexadecimal digits."""
    pairs = {key.hex(): pack(key, value).hex() for key, value in ROWS.items()}
    return json.dumps(pairs, indent=1).encode()


def encode_coordinator() -> bytes:
    """The pairs of ``COORDINATOR`` as the code of today writes them, in hexadecimal digits.

    The file itself has pages of LMDB around them.
    """
    pairs = encode_pairs(COORDINATOR, record_count=2)
    return json.dumps({key.hex(): value.hex() for key, value in pairs}, indent=1).encode()


def main() -> None:
    """Writes the files that are missing."""
    if not STATE_FILE.exists():
        STATE_FILE.write_bytes(encode_records())
        print(f"wrote {STATE_FILE}")
    if not LOG_FILE.exists():
        LOG_FILE.write_bytes(encode_log())
        print(f"wrote {LOG_FILE}")
    if not REPLICA_FILE.exists():
        REPLICA_FILE.write_bytes(encode_replica_state(REPLICA))
        print(f"wrote {REPLICA_FILE}")
    if not STARTED_FILE.exists():
        STARTED_FILE.write_bytes(msgspec.json.encode(STARTED))
        print(f"wrote {STARTED_FILE}")
    if not HELD_FILE.exists():
        HELD_FILE.write_bytes(HeldCommits(HELD).document())
        print(f"wrote {HELD_FILE}")
    if not ROWS_FILE.exists():
        ROWS_FILE.write_bytes(encode_rows())
        print(f"wrote {ROWS_FILE}")
    if not COORDINATOR_FILE.exists():
        COORDINATOR_FILE.write_bytes(encode_coordinator())
        print(f"wrote {COORDINATOR_FILE}")
    for case in (*CASES, "stored", "sparse", "expiring"):
        if not path_of(case).exists():
            path_of(case).write_bytes(encode_case(case))
            print(f"wrote {path_of(case)}")


if __name__ == "__main__":
    main()
