"""The page docs/storage-format.md and the code say the same about everything that is stored."""

import re
import struct
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from mqmesh import message, units
from mqmesh.batch import payload, record_batch
from mqmesh.batch.record_batch import Attributes, BatchHeader, BatchMeta, SparseMeta
from mqmesh.message import BatchInfo, Message, StoredMessage
from mqmesh.storage.commitlog import checkpoint
from mqmesh.storage.index import blocks, entries, part, texts
from mqmesh.storage.log import control_record, store_key, tail_cut
from mqmesh.storage.queues import consume_queue

RECORD_BATCH = "## Record batch"
TYPES = {"s": "bytes", "B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}


@pytest.fixture(scope="module")
def page(project_root: Path) -> str:
    return (project_root / "docs" / "storage-format.md").read_text(encoding="utf-8")


def table(page: str, heading: str) -> list[list[str]]:
    """Rows of the first table below a heading, without marks of code."""
    rows = []
    for line in page.partition(f"\n{heading}\n")[2].splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.replace("`", ""))[1:-1]
            rows.append([cell.strip() for cell in cells if cell.strip()])
        elif rows:
            break
    return rows[2:]


def docstring_table(module: ModuleType) -> list[list[str]]:
    """Rows of the byte table at the head of a module; a row may go over several lines."""
    lines = (module.__doc__ or "").splitlines()
    bars = [number for number, line in enumerate(lines) if line.startswith("====")]
    starts = [found.start() for found in re.finditer("=+", lines[bars[0]])]
    ends = [*starts[1:], None]
    rows: list[list[str]] = []
    for line in lines[bars[1] + 1 : bars[2]]:
        parts = [line[start:end] for start, end in zip(starts, ends, strict=True)]
        cells = [cell.strip().replace("`", "") for cell in parts]
        if cells[0]:
            rows.append([cell for cell in cells if cell])
        else:
            rows[-1][-1] += " " + cells[-1]
    return rows


def struct_rows(layout: struct.Struct, position: int = 0) -> list[list[str]]:
    """Position, size and type of every field of a struct."""
    rows = []
    for count, code in re.findall(r"(\d*)([a-zA-Z])", layout.format):
        size = struct.calcsize(f"<{count}{code}")
        rows.append([str(position), str(size), TYPES[code]])
        position += size
    return rows


@pytest.mark.parametrize(
    ("heading", "module", "layout"),
    [
        ("## Record batch", record_batch, record_batch._HEADER),
        ("### ControlRecord", control_record, control_record._MARKER),
        ("## Consume queue", consume_queue, consume_queue.ENTRY),
        ("## Checkpoint", checkpoint, checkpoint._SLOT),
        ("### Store key", store_key, store_key._LAYOUT),
        ("## Log cut", tail_cut, tail_cut._LAYOUT),
        ("### Index entry", entries, None),
        ("### Index block", blocks, None),
        ("### Index text", texts, None),
    ],
)
def test_tables_of_page_docstring_and_code_agree(
    page: str, heading: str, module: ModuleType, layout: struct.Struct | None
) -> None:
    rows = table(page, heading)
    assert len(rows) >= 2
    assert rows == docstring_table(module)
    if layout is not None:
        assert [row[:3] for row in rows if row[1] != "…"] == struct_rows(layout)


def test_fields_of_the_record_batch_are_those_of_the_code(page: str) -> None:
    fields = [re.findall(r"\w+", row[3])[0] for row in table(page, RECORD_BATCH)[:-2]]
    assert fields == [field.name for field in msgspec.structs.fields(BatchHeader)]


def test_parts_of_the_header_are_cut_from_the_same_table() -> None:
    whole = struct_rows(record_batch._HEADER)
    assert struct_rows(record_batch._BROKER_PART) == whole[:8]
    assert struct_rows(record_batch._PRODUCER_PART, 52) == whole[9:]
    # What the store's check covers is packed at once: all around the check itself.
    stamped = struct_rows(record_batch._STAMPED, 8)
    assert [row[1:] for row in stamped] == [row[1:] for row in (*whole[2:7], *whole[8:10])]


def test_magic_and_version_are_those_of_the_page(page: str) -> None:
    rows = table(page, RECORD_BATCH)
    assert rows[0][3] == f"magic, {record_batch.MAGIC.decode()}"
    assert [row[3] for row in rows if row[0] == "56"] == [f"version, {record_batch.VERSION}"]
    assert [row[3] for row in rows if row[0] == "57"] == [
        f"codec of the payload: {record_batch.CODEC_NONE} none, {record_batch.CODEC_ZSTD} zstd"
    ]


def test_attributes_are_those_of_the_code(page: str) -> None:
    rows = table(page, "### Attributes")
    assert {row[1]: int(row[0]) for row in rows} == {
        name: bit.value for name, bit in Attributes.__members__.items()
    }


def test_meta_has_the_fields_of_the_code(page: str) -> None:
    rows = table(page, "### Meta")
    fields = [field.name for field in msgspec.structs.fields(BatchMeta)]
    assert [row[:2] for row in rows] == [[str(n), name] for n, name in enumerate(fields)]


def test_messages_have_the_fields_of_the_code_in_that_order(page: str) -> None:
    rows = table(page, "### Payload")
    fields = [field.name for field in msgspec.structs.fields(Message)]
    assert [row[:2] for row in rows] == [[str(n), name] for n, name in enumerate(fields)]
    stored = [field.name for field in msgspec.structs.fields(StoredMessage)]
    assert stored == [*fields, "queue_offset", "batch"]
    assert {"topic", "queue_id", "producer_id"} <= set(BatchInfo.__struct_fields__)


def test_bounds_of_messages_are_those_of_the_code(page: str) -> None:
    bounds = {row[1]: row[3] for row in table(page, "### Payload")}
    assert f"1 to {message.MAX_TOPIC_LENGTH} " in bounds["topic"]
    assert bounds["tag"] == f"1 to {message.MAX_TAG_LENGTH} characters"
    assert bounds["keys"] == (
        f"up to {message.MAX_KEYS}, each of 1 to {message.MAX_KEY_LENGTH} characters"
    )
    assert f"{message.MAX_PROPERTIES_BYTES // units.KIB} KiB" in bounds["properties"]
    assert bounds["sharding_key"] == f"1 to {message.MAX_SHARDING_KEY_LENGTH} characters"
    assert bounds["flag"] == bounds["delay_level"] == f"0 to {message.MAX_FLAG}"
    assert bounds["deliver_at_ms"] == f"0 to {units.MAX_TIMESTAMP_MS}"


def test_limits_are_those_of_the_code(page: str) -> None:
    for name, value, _ in table(page, "### Limits"):
        owner = record_batch if hasattr(record_batch, name) else payload
        assert getattr(owner, name) == int(value), name


def test_the_meta_of_cut_batches_is_described(page: str) -> None:
    fields = SparseMeta.__struct_fields__
    described = [(int(row[0]), row[1]) for row in table(page, "### Cut batches")]
    assert described == list(enumerate(fields))[len(BatchMeta.__struct_fields__) :]


def test_kinds_of_control_records_are_those_of_the_page(page: str) -> None:
    section = page.partition("### ControlRecord\n")[2].partition("\n##")[0]
    found = re.findall(r"^\| (\d) \| `(\w+)` \|", section, re.MULTILINE)
    kinds = control_record.ControlKind
    assert [(int(number), name) for number, name in found] == [(k.value, k.name) for k in kinds]


def test_slots_are_where_the_page_says(page: str) -> None:
    assert checkpoint.SLOT_POSITIONS == (0, 4096)
    assert "One slot stands at byte 0, one at byte 4096" in page


def test_sizes_fields_and_directories_of_the_index_are_those_of_the_page(page: str) -> None:
    assert (entries.ENTRY_SIZE, entries.HASH_SIZE, part.SPAN_BYTES) == (20, 16, 4 << 20)
    assert f"1 to {blocks.BLOCK_ENTRIES}" in table(page, "### Index block")[-1][-1]
    rows = table(page, "### Index head")
    fields = [field.name for field in msgspec.structs.fields(part.PartHead)]
    assert [row[:2] for row in rows] == [[str(n), name] for n, name in enumerate(fields)]
    assert rows[0][2] == str(part.FORMAT_VERSION)
    chapter = page.partition("\n## Index\n")[2].partition("\n## ")[0]
    assert all(f"`<segment>{suffix}`" in chapter for suffix in (".live/", ".sealed/", ".new/"))
