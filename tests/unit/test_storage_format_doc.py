"""The page docs/storage-format.md and the code say the same about the record batch."""

import re
import struct
from pathlib import Path

import msgspec
import pytest

from mqmesh import message, units
from mqmesh.batch import payload, record_batch
from mqmesh.batch.record_batch import Attributes, BatchHeader, BatchMeta, SparseMeta
from mqmesh.message import BatchInfo, Message, StoredMessage

TYPES = {"s": "bytes", "B": "u8", "H": "u16", "I": "u32", "Q": "u64", "q": "i64"}


@pytest.fixture(scope="module")
def chapter(project_root: Path) -> str:
    page = (project_root / "docs" / "storage-format.md").read_text(encoding="utf-8")
    return page.partition("\n## Record batch\n")[2].partition("\n## ")[0]


def table(chapter: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without marks of code."""
    text = chapter if not heading else chapter.partition(f"\n### {heading}\n")[2]
    rows = []
    for line in text.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line.replace("`", ""))[1:-1]
            rows.append([cell.strip() for cell in cells])
        elif rows:
            break
    return rows[2:]


def docstring_table() -> list[list[str]]:
    """The rows of the byte table at the head of the module."""
    assert record_batch.__doc__ is not None
    lines = record_batch.__doc__.splitlines()
    bars = [number for number, line in enumerate(lines) if line.startswith("====")]
    starts = [found.start() for found in re.finditer("=+", lines[bars[0]])]
    ends = [*starts[1:], None]
    return [
        [line[start:end].strip().replace("`", "") for start, end in zip(starts, ends, strict=True)]
        for line in lines[bars[1] + 1 : bars[2]]
    ]


def struct_rows(format_: str, position: int = 0) -> list[list[str]]:
    """Position, size and type of every field of a struct format."""
    rows = []
    for count, code in re.findall(r"(\d*)([a-zA-Z])", format_):
        size = struct.calcsize(f"<{count}{code}")
        rows.append([str(position), str(size), TYPES[code]])
        position += size
    return rows


def test_page_and_docstring_have_the_same_byte_table(chapter: str) -> None:
    assert table(chapter, "") == docstring_table()
    assert len(docstring_table()) == 23


def test_byte_table_is_that_of_the_code(chapter: str) -> None:
    rows = table(chapter, "")
    assert [row[:3] for row in rows[:-2]] == struct_rows(record_batch._HEADER.format)
    assert [row[0] for row in rows[-2:]] == [str(record_batch.HEADER_SIZE), "…"]
    fields = [re.findall(r"\w+", row[3])[0] for row in rows[:-2]]
    assert fields == [field.name for field in msgspec.structs.fields(BatchHeader)]


def test_parts_of_the_header_are_cut_from_the_same_table() -> None:
    whole = struct_rows(record_batch._HEADER.format)
    assert struct_rows(record_batch._BROKER_PART.format) == whole[:8]
    assert struct_rows(record_batch._PRODUCER_PART.format, 52) == whole[9:]
    # What the store's check covers is packed at once: all around the check itself.
    stamped = struct_rows(record_batch._STAMPED.format, 8)
    assert [row[1:] for row in stamped] == [row[1:] for row in (*whole[2:7], *whole[8:10])]


def test_magic_and_version_are_those_of_the_page(chapter: str) -> None:
    rows = table(chapter, "")
    assert rows[0][3] == f"magic, {record_batch.MAGIC.decode()}"
    assert [row[3] for row in rows if row[0] == "56"] == [f"version, {record_batch.VERSION}"]
    assert [row[3] for row in rows if row[0] == "57"] == [
        f"codec of the payload: {record_batch.CODEC_NONE} none, {record_batch.CODEC_ZSTD} zstd"
    ]


def test_attributes_are_those_of_the_code(chapter: str) -> None:
    rows = table(chapter, "Attributes")
    assert {row[1]: int(row[0]) for row in rows} == {
        name: bit.value for name, bit in Attributes.__members__.items()
    }


def test_meta_has_the_fields_of_the_code(chapter: str) -> None:
    rows = table(chapter, "Meta")
    fields = [field.name for field in msgspec.structs.fields(BatchMeta)]
    assert [row[:2] for row in rows] == [[str(n), name] for n, name in enumerate(fields)]


def test_messages_have_the_fields_of_the_code_in_that_order(chapter: str) -> None:
    rows = table(chapter, "Payload")
    fields = [field.name for field in msgspec.structs.fields(Message)]
    assert [row[:2] for row in rows] == [[str(n), name] for n, name in enumerate(fields)]
    stored = [field.name for field in msgspec.structs.fields(StoredMessage)]
    assert stored == [*fields, "queue_offset", "batch"]
    assert {"topic", "queue_id", "producer_id"} <= set(BatchInfo.__struct_fields__)


def test_bounds_of_messages_are_those_of_the_code(chapter: str) -> None:
    bounds = {row[1]: row[3] for row in table(chapter, "Payload")}
    assert f"1 to {message.MAX_TOPIC_LENGTH} " in bounds["topic"]
    assert bounds["tag"] == f"1 to {message.MAX_TAG_LENGTH} characters"
    assert bounds["keys"] == (
        f"up to {message.MAX_KEYS}, each of 1 to {message.MAX_KEY_LENGTH} characters"
    )
    assert f"{message.MAX_PROPERTIES_BYTES // units.KIB} KiB" in bounds["properties"]
    assert bounds["sharding_key"] == f"1 to {message.MAX_SHARDING_KEY_LENGTH} characters"
    assert bounds["flag"] == bounds["delay_level"] == f"0 to {message.MAX_FLAG}"
    assert bounds["deliver_at_ms"] == f"0 to {units.MAX_TIMESTAMP_MS}"


def test_limits_are_those_of_the_code(chapter: str) -> None:
    for name, value, _ in table(chapter, "Limits"):
        owner = record_batch if hasattr(record_batch, name) else payload
        assert getattr(owner, name) == int(value), name


def test_the_meta_of_cut_batches_is_described(chapter: str) -> None:
    fields = SparseMeta.__struct_fields__
    described = [(int(row[0]), row[1]) for row in table(chapter, "Cut batches")]
    assert described == list(enumerate(fields))[len(BatchMeta.__struct_fields__) :]
