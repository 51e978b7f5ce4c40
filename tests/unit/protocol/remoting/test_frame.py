"""Frames of RocketMQ's remoting protocol; golden ones are of its Java classes 4.9.8."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqmesh.errors import RemoteProtocolError
from mqmesh.protocol.remoting.codes import VERSION
from mqmesh.protocol.remoting.frame import (
    MAX_FIELDS,
    MAX_HEADER_BYTES,
    ONEWAY,
    RESPONSE,
    RemotingCommand,
    RemotingReader,
    encode_frame,
)

JSON = bytes.fromhex(
    "000000b6000000ae7b22636f6465223a3331302c226578744669656c6473223a7b2262223a226f72646572"
    "73222c2265223a2233222c2269223a22544147535c75303030316e65775c7530303032227d2c22666c6167"
    "223a322c226c616e6775616765223a224a415641222c226f7061717565223a372c2272656d61726b223a22"
    "6772c3bcc39f222c2273657269616c697a655479706543757272656e74525043223a224a534f4e222c2276"
    "657273696f6e223a307d626f6479"
)
BINARY = bytes.fromhex(
    "000000480100004001360000000000000700000002000000066772c3bcc39f00000025000162000000066f"
    "726465727300016500000001330001690000000954414753016e657702626f6479"
)
FIELDS = {"b": "orders", "e": "3", "i": "TAGS\x01new\x02"}


def read(data: bytes, most: int = 1 << 20) -> list[RemotingCommand]:
    return list(RemotingReader(most).feed(data))


@pytest.mark.parametrize(("data", "is_json"), [(JSON, True), (BINARY, False)])
def test_what_java_encoded_is_read(data, is_json):
    (found,) = read(data)
    assert (found.code, found.opaque, found.flag, found.remark) == (310, 7, ONEWAY, "grüß")
    assert (found.fields, found.body, found.is_json) == (FIELDS, b"body", is_json)
    assert found.is_oneway


@pytest.mark.parametrize("data", [JSON, BINARY])
def test_an_answer_has_the_form_and_number_of_its_request(data):
    (asked,) = read(data)
    answer = asked.answer(17, {"offset": "5"}, body=b"x", remark="größer")
    (found,) = read(b"".join(encode_frame(answer)))
    assert (found.code, found.opaque, found.flag) == (17, 7, RESPONSE)
    assert (found.fields, found.body, found.remark) == ({"offset": "5"}, b"x", "größer")
    assert (found.is_json, found.version) == (asked.is_json, VERSION)


def test_a_header_of_java_is_written_byte_for_byte():
    command = RemotingCommand(310, 7, ONEWAY, FIELDS, b"body", "grüß", 0, is_json=False)
    # But for the language, whose number is that of Java there.
    found = bytearray(b"".join(encode_frame(command)))
    found[10] = 0
    assert bytes(found) == BINARY


@given(st.lists(st.integers(1, 40), max_size=40))
def test_frames_are_found_wherever_they_are_cut(sizes):
    data, reader, found = (JSON + BINARY) * 3, RemotingReader(1 << 20), []
    for size in [*sizes, len(data)]:
        found += reader.feed(data[:size])
        data = data[size:]
    assert [one.is_json for one in found] == [True, False] * 3


def test_numbers_of_other_languages_are_texts():
    header = b'{"code":11,"opaque":1,"extFields":{"queueId":3,"a":true,"b":null,"c":1.5}}'
    data = struct.pack(">II", 4 + len(header), len(header)) + header
    assert read(data)[0].fields == {"queueId": "3", "a": "true", "c": "1.5"}


def frame(header: bytes, form: int = 1, size: int | None = None) -> bytes:
    said = len(header) if size is None else size
    return struct.pack(">II", 4 + len(header), form << 24 | said) + header


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">I", 3), "a frame of 3 bytes"),
        (struct.pack(">I", (1 << 20) + 1), "max_frame_bytes"),
        (frame(b"", 0, 5), "a header of 5 bytes in a frame of 4"),
        (frame(b"x" * (MAX_HEADER_BYTES + 1)), str(MAX_HEADER_BYTES)),
        (frame(b"{}", 2), "form 2"),
        (frame(b"[]", 0), "no JSON of a command"),
        (frame(b"\xff", 0), "no JSON of a command"),
        (frame(b"123"), "cut off"),
        (frame(struct.pack(">hBhiiI", 1, 0, 0, 0, 0, 9)), "a text of 9 bytes"),
        (frame(struct.pack(">hBhiiII", 1, 0, 0, 0, 0, 0, 9)), "fields of 9 bytes"),
        (frame(struct.pack(">hBhiiIIh", 1, 0, 0, 0, 0, 0, 2, -1)), "a text of -1 bytes"),
        (
            frame(struct.pack(">hBhiiII", 1, 0, 0, 0, 0, 0, 3) + struct.pack(">hB", 1, 0xFF)),
            "no text",
        ),
    ],
)
def test_what_is_no_frame_is_refused_with_a_reason(data, why):
    with pytest.raises(RemoteProtocolError, match=why):
        read(data)


@pytest.mark.parametrize("form", ["json", "binary"])
def test_a_header_has_so_many_fields_at_most(form):
    fields = {f"f{number}": "" for number in range(MAX_FIELDS + 1)}
    command = RemotingCommand(1, fields=fields, is_json=form == "json")
    with pytest.raises(RemoteProtocolError, match=f"more than {MAX_FIELDS} fields"):
        read(b"".join(encode_frame(command)))


@given(st.binary(max_size=200), st.integers(0, 2))
def test_bytes_that_nobody_meant_raise_nothing_else(data, form):
    for sent in (data, frame(data, form)):
        try:
            read(sent)
        except RemoteProtocolError:
            pass
