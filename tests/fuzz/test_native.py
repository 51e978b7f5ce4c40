"""Payloads with anything wrong in them, read by the parts in C; ``scripts/sanitize`` reads more.

Whatever is read, is read within the payload: it stands in a buffer of exactly its size, where the
sanitizers see the first byte behind it.
"""

import random
import sys
from array import array

import msgspec

from mqmesh.batch.native_decode import decode_at_once, is_compiled
from mqmesh.batch.payload import decode_payload, encode_payload
from mqmesh.batch.payload_check import check_payload, keys_in
from mqmesh.errors import MessageIllegal
from mqmesh.message import BatchInfo, CommitLogOffset, Message, QueueOffset, TimestampMs

COUNT = 3
BATCH = BatchInfo(
    "t",
    3,
    "broker-a",
    QueueOffset(1),
    CommitLogOffset(77),
    500,
    TimestampMs(1),
    TimestampMs(2),
    "host:1",
    "host:2",
    5,
    6,
    7,
)
WHOLE = [
    encode_payload([Message("t", b"x") for _ in range(COUNT)]).data,
    encode_payload(
        [Message("t", bytes(300), "é", ("k", "l" * 40), {"a": "b", "é": ""}, 300, "s", 0, 1 << 40)]
        * COUNT
    ).data,
    encode_payload(
        [
            Message("t", b"y" * 20, "tag", ("k" * 32,) * 17, {f"n{n}": "v" * n for n in range(40)}),
            Message("t", b"", None, (), {}, 1 << 20, None, 70_000),
            Message("t", b"z", "tag", ("é",), None, 0, "s" * 50),
        ]
    ).data,
]
HEADS = [
    bytes([0xDB, 0xFF, 0xFF, 0xFF, 0xFF]),
    bytes([0xDD, 0xFF, 0xFF, 0xFF, 0xFF]),
    bytes([0xDF, 0x7F, 0xFF, 0xFF, 0xFF]),
    bytes([0xC6, 0x80, 0, 0, 0]),
    bytes([0xDC, 0xFF, 0xFF]),
    bytes([0xDE, 0xFF, 0xFF]),
    bytes([0xDA, 0, 0]),
    bytes([0xCF]) + bytes([0xFF] * 8),
    bytes([0xD9]),
    bytes([0xC0]),
]
"""What msgpack can say of lengths and numbers, at its most and its least."""


def damaged(chance: random.Random) -> bytes:
    """A payload, changed at one to four places."""
    data = bytearray(chance.choice(WHOLE))
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1 and place < len(data):
            data[place] = chance.randrange(256)
        elif kind == 2:
            head = chance.choice(HEADS)
            data[place : place + chance.choice((0, 1, len(head)))] = head
        elif kind == 3:
            del data[place : place + chance.choice((1, 2, 8, 100))]
        elif kind == 4:
            start = chance.randrange(len(data) + 1)
            data[place:place] = data[start : start + chance.randrange(40)]
        else:
            del data[place:]
    return bytes(data)


def read(data: bytes) -> bool:
    """Has every part look at a payload, and compares them; returns whether it could be decoded."""
    exact = array("B", data)
    found = keys_in(exact, COUNT)
    messages = decode_at_once(exact, COUNT, BATCH)
    try:
        check_payload(exact, COUNT, "t", 1_000)
    except MessageIllegal:
        pass
    if messages is None:
        return False
    # Of every other message properties are looked for while they are encoded still.
    carefully = decode_payload(data)
    if found is not None:
        raw, arrays = found
        keys = [list(other.keys) for other in carefully if other.keys]
        assert msgspec.msgpack.decode(b"\xdd" + arrays.to_bytes(4, "big") + raw) == keys
    for number, (message, other) in enumerate(zip(messages, carefully, strict=True)):
        for name in ("a", "n39", "é", ""):
            if number % 2:
                assert message.keys == other.keys
            assert message.property(name) == (other.properties or {}).get(name)
        assert (message.keys, message.properties) == (other.keys, other.properties)
        assert message.body == other.body
        assert len(message.message_id) == 32
    sent = [message.to_message() for message in messages]
    assert [m.to_message() for m in decode_payload(encode_payload(sent).data)] == sent
    return True


def fuzz(seed: int, payloads: int) -> int:
    """Reads damaged payloads; returns how many of them could be decoded nevertheless."""
    assert is_compiled()
    chance = random.Random(seed)
    return sum(read(damaged(chance)) for _ in range(payloads))


def test_whatever_is_wrong_with_a_payload_it_is_read_alike_or_left_to_python():
    assert all(map(read, WHOLE))
    assert fuzz(1, 5_000) > 100


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    print(f"{fuzz(2, wanted)} of {wanted} damaged payloads could be decoded")
