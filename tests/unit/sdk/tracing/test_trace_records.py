"""Records of the message trace: RocketMQ's are read, ours are theirs, and nonsense does no harm."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.sdk.tracing.trace_records import (
    ContextCode,
    TraceKind,
    TraceMessageType,
    TraceRecord,
    decode_records,
    encode_record,
    plain_text,
)

ID = "7F000001123418B4AAC20000000B000"


@pytest.fixture(scope="module")
def golden(project_root) -> str:
    return (project_root / "tests" / "data" / "trace-records-rocketmq-4.9.8.txt").read_text()


def test_records_of_rocketmq_are_read(golden):
    records, strange = decode_records(golden)
    assert strange == 0
    pubs = [one for one in records if one.kind is TraceKind.PUB]
    whole = TraceRecord(
        TraceKind.PUB,
        ID + "1",
        1_780_000_000_123,
        "DefaultRegion",
        "billing-ü",
        "orders",
        "new",
        "4711 größe 订单",
        "10.0.0.7:10911",
        128,
        17,
        TraceMessageType.NORMAL,
        "0A0000070002A9F0000000000000BEEF",
        True,
    )
    expected = [
        msgspec.structs.replace(whole, message_type=kind.value, success=success)
        for kind in TraceMessageType
        if kind is not TraceMessageType.ORDER  # RocketMQ 5 has added it
        for success in (True, False)
    ]
    bare = msgspec.structs.replace(whole, tag="null", keys="null", offset_id="null", cost_ms=0)
    assert pubs == [*expected, bare]
    begun = [one for one in records if one.kind is TraceKind.SUB_BEFORE]
    assert [(one.message_id, one.retry_times, one.keys) for one in begun] == [
        (ID + "1", 2, "4711 größe 订单"),
        (ID + "2", 16, "null"),
    ]
    ended = [one for one in records if one.kind is TraceKind.SUB_AFTER]
    assert [(one.context_code, one.success) for one in ended[::2]] == [
        (code, code is ContextCode.SUCCESS) for code in ContextCode
    ]
    assert {one.request_id for one in begun + ended} == {ID + "3"}
    transactions = [one for one in records if one.kind is TraceKind.END_TRANSACTION]
    assert [(one.state, one.from_check) for one in transactions] == [
        ("COMMIT_MESSAGE", False),
        ("ROLLBACK_MESSAGE", True),
        ("UNKNOW", False),
    ]


def test_what_is_read_is_written_byte_for_byte(golden):
    records, _ = decode_records(golden)
    assert "".join(map(encode_record, records)) == golden


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Pub|1|r|g|t|id|a|k|h|5|6|0|true",
            TraceRecord(TraceKind.PUB, "id", 1, "r", "g", "t", "a", "k", "h", 5, 6),
        ),
        (
            "Pub|1|r|g|t|id|a|k|h|5|6|3|off|false|10.0.0.1",
            TraceRecord(
                TraceKind.PUB,
                "id",
                1,
                "r",
                "g",
                "t",
                "a",
                "k",
                "h",
                5,
                6,
                3,
                "off",
                False,
                client_host="10.0.0.1",
            ),
        ),
        (
            "SubAfter|req|id|7|true|k",
            TraceRecord(TraceKind.SUB_AFTER, "id", request_id="req", cost_ms=7, keys="k"),
        ),
        (
            "SubAfter|req|id|7|false|k|4",
            TraceRecord(
                TraceKind.SUB_AFTER,
                "id",
                request_id="req",
                cost_ms=7,
                success=False,
                keys="k",
                context_code=4,
            ),
        ),
        (
            "Pub|1|r|g|t|id1,id2|null|null|h|5|6|4|off1,off2|true",
            TraceRecord(
                TraceKind.PUB,
                "id1,id2",
                1,
                "r",
                "g",
                "t",
                "null",
                "null",
                "h",
                5,
                6,
                TraceMessageType.ORDER,
                "off1,off2",
            ),
        ),
        (
            "Recall|1|r|g|t|id|false",
            TraceRecord(TraceKind.RECALL, "id", 1, "r", "g", "t", success=False),
        ),
        (
            "SubBefore|1|r|g|req|id|0|",
            TraceRecord(TraceKind.SUB_BEFORE, "id", 1, "r", "g", request_id="req"),
        ),
    ],
)
def test_records_of_older_and_newer_clients_are_read(text, expected):
    assert decode_records(text.replace("|", "\x01") + "\x02") == ([expected], 0)


@given(st.text(alphabet="Pub|SubAfterBefore\x01\x02-1999", max_size=80) | st.text(max_size=40))
def test_nonsense_is_counted(text):
    records, strange = decode_records(text)
    assert len(records) + strange <= text.count("\x02") + 1


@pytest.mark.parametrize(
    "line",
    [
        "Pub|x|r|g|t|id|a|k|h|5|6|0|true",
        "Pub|-1|r|g|t|id|a|k|h|5|6|0|true",
        "Pub|1|r|g|t|id|a|k|h|5|6|9|true",
        "Pub|1|r|g",
        "SubBefore|" + "9" * 5_000 + "|r|g|req|id|0|k",
        "SubAfter|req|id|99999999999999999999|true|k",
        "Recall|1|r|g|t|id",
        "Unheard|1",
    ],
)
def test_what_cannot_be_read_leaves_the_others(line):
    text = "".join(
        one.replace("|", "\x01") + "\x02" for one in (line, "SubBefore|1|r|g|req|id|0|k")
    )
    records, strange = decode_records(text)
    assert ([one.kind for one in records], strange) == ([TraceKind.SUB_BEFORE], 1)


def test_nobody_forges_records():
    assert plain_text("a\x02Pub\x01b") == "a Pub b"
    assert plain_text(text := "größe") is text
