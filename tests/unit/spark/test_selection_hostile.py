"""Snapshots that were made to harm whoever reads them."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from harness.batches import join_batch
from harness.indexed_store import make_messages_batch
from harness.snapshots import take_snapshot
from harness.store_files import StoreFiles

from mqmesh.batch.payload import CODEC_ZSTD, MAX_RAW_BYTES
from mqmesh.batch.record_batch import BatchMeta, check_batch
from mqmesh.errors import CorruptRecord
from mqmesh.message import Message
from mqmesh.spark.selection import Selection, plan, read_task
from mqmesh.storage.interface import BatchToPut
from mqmesh.storage.tools.snapshot_reading import Snapshot
from mqmesh.testing.store_contract import NOW
from mqmesh.units import MIB, TimestampMs

UNFOLDED = 256 * MIB
MOST_BYTES = 10 * MAX_RAW_BYTES
"""What a reader may take, by docs/storage-format.md."""


def bomb(declared: int | None) -> bytes:
    """A frame of 256 MiB that declares another size, or none."""
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=declared is not None)
    stream = compressor.compressobj(size=-1 if declared is None else UNFOLDED)
    pieces = [stream.compress(bytes(MIB)) for _ in range(UNFOLDED // MIB)]
    frame = bytearray(b"".join([*pieces, stream.flush()]))
    if declared is not None:
        assert frame[4] >> 6 == 2, "the size has 4 bytes"
        struct.pack_into("<I", frame, 5 if frame[4] & 0x20 else 6, declared)
    return bytes(frame)


def hostile(root: Path, frame: bytes, raw_size: int) -> str:
    """A snapshot of a good batch, the frame in a batch with a fitting checksum, and a good one."""
    files = StoreFiles(root / "store")
    store = files.open()
    try:
        good = [
            make_messages_batch([Message("topic", body)], first_sequence=first)
            for first, body in ((0, b"one"), (10, b"two"))
        ]
        data = join_batch(
            frame,
            BatchMeta("topic"),
            raw_size=raw_size,
            codec=CODEC_ZSTD,
            message_count=1,
            queue_id=0,
            producer_id=1,
            first_sequence=9,
            born_timestamp=NOW,
            attributes=0,
        )
        bad = BatchToPut("topic", 0, check_batch(data), memoryview(data), b"")
        for batch in (good[0], bad, good[1]):
            store.put([batch], TimestampMs(NOW))
        directory, _ = take_snapshot(store, files.directory, root / "snapshots")
    finally:
        files.close()
    return str(directory)


def bodies(path: str, wanted: Selection) -> list[bytes]:
    snapshot = Snapshot(Path(path))
    return [
        message.body
        for task in plan(path, wanted)
        for _, messages in read_task(snapshot, task, wanted)
        for message in messages
    ]


@pytest.mark.parametrize(
    ("declared", "raw_size"),
    [(None, 10_000), (UNFOLDED, MAX_RAW_BYTES), (10_000, 10_000), (MAX_RAW_BYTES, MAX_RAW_BYTES)],
)
def test_a_frame_that_unfolds_without_end_is_damage(
    tmp_path: Path, declared: int | None, raw_size: int
) -> None:
    path = hostile(tmp_path, bomb(declared), raw_size)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRecord, match=r"is damaged: .*(declare|inflate).*onDamage"):
            bodies(path, Selection())
        assert bodies(path, Selection(on_damage="skip")) == [b"one", b"two"]
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
