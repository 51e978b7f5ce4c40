"""Frames that no client of ours would send, made from a seed. Pure."""

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgspec

from harness import zmtp
from harness.batches import PRODUCER_ID, PRODUCER_KEY
from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.protocol.command import ONEWAY, RESPONSE, encode_frame
from mqmesh.protocol.commands import COMMANDS, RequestCode
from mqmesh.protocol.messaging import encode_send
from mqmesh.units import MAX_TIMESTAMP_MS

NAMES: Final = (*(f"fuzz-{n}" for n in range(16)), "", "a" * 600, "%DLQ%fuzz-1", "%RETRY%fuzz-2")
EDGES: Final = (0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63))
CODES: Final = tuple(map(int, RequestCode))
_COPIES: Final = {RequestCode.CREATE_SNAPSHOT, RequestCode.COPY_INDEX}
"""Commands left out: each request takes a disk's time and space."""
HEADERS: Final[dict[RequestCode, type[msgspec.Struct]]] = {
    code: spec.request
    for code, spec in COMMANDS.items()
    if spec.request is not None and code not in _COPIES
}
"""Request headers by code, but for SEND_MESSAGE, whose header is no struct, and for requests that
make a folder where the caller says: their headers are garbage here."""
MOST_BODY_BYTES: Final = 2_000
MOST_DEPTH: Final = 3
TREE_SHARE: Final = 0.03
"""Share of a header's values that are of any type; less in its depth."""
OPAQUE_BIT: Final = 1 << 62
"""Bit in the opaque of frames sent here; a sender may use the others for its own frames."""

_PREFIX = struct.Struct("<BBHIQ")


class HostileFrames:
    """Makes one frame after the other.

    Args:
        seed: The same one makes the same frames.

    Attributes:
        kinds: Names of what is made, with how to make it.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._headers = [(code, msgspec.inspect.type_info(one)) for code, one in HEADERS.items()]
        self._sequence = 0
        self.kinds: dict[str, Callable[[], bytes]] = {
            "random bytes": self._random,
            "random header": self._random_header,
            "plausible request": self._plausible,
            "damaged request": self._damaged,
            "huge counts": self._huge_counts,
            "deep header": self._deep,
            "cut off": self._cut,
            "wrong version": self._wrong_version,
            "batch": self._batch,
            "damaged batch": self._damaged_batch,
        }
        self._names = list(self.kinds)
        self._tree_share = TREE_SHARE

    def command(self) -> tuple[str, bytes]:
        """Makes the next command.

        Returns:
            Its kind, and the frame as ZeroMQ would be given it.
        """
        kind = self._chance.choice(self._names)
        return kind, self.kinds[kind]()

    def on_wire(self, command: bytes) -> bytes:
        """Encodes a command for ZMTP; now and then with a second frame, which is refused."""
        *first, last = self.parts(command)
        return b"".join([*(zmtp.frame(one, zmtp.MORE) for one in first), zmtp.frame(last)])

    def parts(self, command: bytes) -> list[bytes]:
        """Returns the frames of a message; now and then with a second one, which is refused."""
        return [command, self._bytes(64)] if self._chance.random() < 0.02 else [command]

    def handshake_by(self, mechanism: bytes) -> bytes:
        """Begins a handshake by CURVE or PLAIN, where both sides have to prove something first."""
        chance = self._chance
        hello = b"\x05HELLO" + self._bytes(250)
        match chance.randrange(5):
            case 0:
                return self.handshake()
            case 1 if mechanism == b"CURVE":  # as it should be, but for what it is to prove
                hello = b"\x05HELLO\x01\x00" + bytes(72) + chance.randbytes(120)
            case 1:
                name = self._bytes(60)
                hello = b"\x05HELLO" + bytes((len(name),)) + name + b"\x01-"
            case 2:
                hello = b"\x08INITIATE" + self._bytes(900)
            case 3:
                hello = self._change(hello)
        wire = zmtp.greeting(mechanism=mechanism) + zmtp.frame(hello, zmtp.COMMAND)
        return wire[: chance.randrange(64, len(wire))] if chance.random() < 0.2 else wire

    def handshake(self) -> bytes:
        """Makes all bytes of a connection that breaks the handshake, or ends in its middle."""
        chance = self._chance
        good = zmtp.greeting() + zmtp.ready()
        match chance.randrange(8):
            case 0:
                return self._bytes(200)
            case 1:
                return good[: chance.randrange(len(good))]
            case 2:
                return self._change(good)
            case 3:
                return zmtp.greeting(version=bytes((chance.randrange(4), chance.randrange(256))))
            case 4:
                return b"\x01\x00" + self._bytes(60)  # ZMTP 1
            case 5:
                return zmtp.greeting(mechanism=chance.choice((b"PLAIN", b"CURVE", self._bytes(20))))
            case 6:
                return zmtp.greeting() + zmtp.ready(self._bytes(30), self._bytes(200))
            case _:
                return b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n"

    def after_handshake(self) -> bytes:
        """Returns bytes that break ZMTP, to send behind a good handshake."""
        chance = self._chance
        match chance.randrange(6):
            case 0:
                return zmtp.long_head(abs(chance.choice(EDGES))) + self._bytes(500)
            case 1:
                return zmtp.frame(self._bytes(200), zmtp.COMMAND)
            case 2:
                return zmtp.frame(b"\x04PING" + self._bytes(40), zmtp.COMMAND)
            case 3:
                return zmtp.frame(b"", zmtp.MORE) * chance.randrange(200)
            case 4:
                return zmtp.ready() * chance.randrange(1, 4)
            case _:
                wire = zmtp.frame(self._batch())
                return wire[: chance.randrange(len(wire))]

    # ---- Commands ---------------------------------------------------------------------

    def _opaque(self) -> int:
        return OPAQUE_BIT | self._chance.getrandbits(32)

    def _flags(self) -> int:
        return self._chance.choice(
            (0, 0, 0, 0, 0, 0, ONEWAY, RESPONSE, self._chance.randrange(256))
        )

    def _bytes(self, most: int) -> bytes:
        return self._chance.randbytes(self._chance.randint(0, most))

    def _random(self) -> bytes:
        return self._bytes(300)

    def _random_header(self) -> bytes:
        header = self._bytes(60)
        if self._chance.random() < 0.7:
            header = msgspec.msgpack.encode(
                [self._tree(0) for _ in range(self._chance.randrange(9))]
            )
        body = self._bytes(100)
        return self._frame(self._chance.choice(CODES), header, body)

    def _plausible(self) -> bytes:
        code, kind = self._chance.choice(self._headers)
        # A header with several lists would hardly ever be whole if each had damaged ones.
        self._tree_share = self._chance.choice((0.0, TREE_SHARE))
        header = msgspec.msgpack.encode(self._value(kind, 0))
        return self._frame(code, header, self._bytes(MOST_BODY_BYTES))

    def _damaged(self) -> bytes:
        return self._change(self._plausible())

    def _huge_counts(self) -> bytes:
        # Arrays, maps, texts and bytes of msgpack that say they have up to 2^32 - 1 elements.
        head = self._chance.choice(
            (0xDC, 0xDD, 0xDE, 0xDF, 0xD9, 0xDA, 0xDB, 0xC4, 0xC5, 0xC6, 0xC9)
        )
        size = self._chance.choice((2**32 - 1, 2**31, 2**24, 2**16, 300)).to_bytes(4, "big")
        header = bytes((0x90 | self._chance.randrange(16), head)) + size + self._bytes(60)
        frame = bytearray(self._frame(self._chance.choice(CODES), header, self._bytes(60)))
        if self._chance.random() < 0.3:
            struct.pack_into("<I", frame, 4, self._chance.choice((2**32 - 1, 2**31, 2**24, 17)))
        return bytes(frame)

    def _deep(self) -> bytes:
        header = self._chance.choice((b"\x91", b"\x81\x01")) * self._chance.choice(
            (30, 30, 2_000, 2_000, 20_000)
        )
        return self._frame(self._chance.choice(CODES), header, b"")

    def _cut(self) -> bytes:
        frame = self._plausible() if self._chance.random() < 0.5 else self._batch()
        return frame[: self._chance.randrange(len(frame))]

    def _wrong_version(self) -> bytes:
        return bytes((self._chance.randrange(256),)) + self._plausible()[1:]

    def _batch(self) -> bytes:
        self._sequence += 4
        topic = self._chance.choice(NAMES[:16])
        count = self._chance.randint(1, 4)
        batch = encode_batch(
            [Message(topic, self._bytes(500)) for _ in range(count)],
            topic=topic,
            queue_id=self._chance.choice((0, 0, 0, 3, 65_535, 2**32 - 1)),
            producer_id=PRODUCER_ID,
            first_sequence=self._sequence,
            born_timestamp=self._chance.choice((1, MAX_TIMESTAMP_MS)),
        )
        copies = self._chance.choice((1, 1, 1, 2, 50))
        said = self._chance.choice((copies, copies, copies, 1, 4_096, 0, 2**16 - 1))
        header = encode_send(3_000, said, PRODUCER_KEY)
        return self._frame(RequestCode.SEND_MESSAGE, header, batch * copies)

    def _damaged_batch(self) -> bytes:
        return self._change(self._batch(), first=16)

    def _frame(self, code: int, header: bytes, body: bytes) -> bytes:
        return encode_frame(code, self._opaque(), body, header=header, flags=self._flags())

    # ---- Values -----------------------------------------------------------------------

    def _change(self, data: bytes, *, first: int = 0) -> bytes:
        changed = bytearray(data)
        for _ in range(self._chance.randint(1, 4)):
            if len(changed) <= first:
                break
            at = self._chance.randrange(first, len(changed))
            match self._chance.randrange(5):
                case 0:
                    changed[at] ^= 1 << self._chance.randrange(8)
                case 1:
                    changed[at] = self._chance.choice((0, 255, 127, 128, 0xDD, 0xDF))
                case 2:
                    del changed[at : at + self._chance.randint(1, 20)]
                case 3:
                    changed[at:at] = changed[at : at + 40]
                case _:
                    changed[at:at] = self._bytes(20)
        return bytes(changed)

    def _tree(self, depth: int) -> Any:
        chance = self._chance
        match chance.randrange(8 if depth < MOST_DEPTH else 6):
            case 0:
                return None
            case 1:
                return chance.choice(EDGES)
            case 2:
                return chance.choice(NAMES)
            case 3:
                return self._bytes(40)
            case 4:
                return chance.random() * 10 ** chance.randrange(300)
            case 5:
                return chance.random() < 0.5
            case 6:
                return [self._tree(depth + 1) for _ in range(chance.randrange(6))]
            case _:
                return {chance.choice(NAMES): self._tree(depth + 1) for _ in range(3)}

    def _value(self, kind: msgspec.inspect.Type, depth: int) -> Any:
        """Makes a value of a type, mostly within its bounds."""
        chance = self._chance
        if chance.random() < self._tree_share / (depth + 1):
            return self._tree(depth)
        match kind:
            case msgspec.inspect.Metadata(type=named):
                return self._value(named, depth)
            case msgspec.inspect.IntType(ge=least, le=most):
                low = -(2**63) if least is None else least
                high = 2**63 - 1 if most is None else most
                near = [one for one in (*EDGES, low, high, low + 1) if low <= one <= high]
                return chance.choice((*near, chance.randint(low, min(high, max(low, 0) + 100))))
            case msgspec.inspect.StrType():
                return chance.choice(NAMES)
            case msgspec.inspect.BytesType():
                return self._bytes(64)
            case msgspec.inspect.BoolType():
                return chance.random() < 0.5
            case msgspec.inspect.FloatType():
                return chance.random() * 1e9
            case msgspec.inspect.ListType(item_type=item) | msgspec.inspect.SetType(item_type=item):
                return [self._value(item, depth + 1) for _ in range(chance.choice((0, 1, 2, 40)))]
            case msgspec.inspect.DictType(key_type=key, value_type=value):
                pairs = range(chance.choice((0, 1, 5)))
                return {
                    str(self._value(key, depth + 1)): self._value(value, depth + 1) for _ in pairs
                }
            case msgspec.inspect.StructType(fields=fields):
                return [self._value(field.type, depth + 1) for field in fields]
            case msgspec.inspect.UnionType(types=types):
                return self._value(chance.choice(types), depth)
            case _:
                return self._tree(depth)
