"""JSON as fastjson writes it for RocketMQ: maps whose keys are objects or bare numbers.

``{"offsetTable":{{"brokerName":"a","queueId":0,"topic":"t"}:5}}`` is no JSON to others. Pure.
"""

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from mqmesh.errors import RemoteProtocolError

MAX_DEPTH: Final = 32
"""Objects and lists inside one another."""
MAX_KEY_BYTES: Final = 4_096

_TOKEN: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_encoder = msgspec.json.Encoder()


def encode_table(pairs: Iterable[tuple[object, object]]) -> msgspec.Raw:
    """Encode a map whose keys are objects.

    Args:
        pairs: Each key with its value; both are encoded as JSON.

    Returns:
        Content of a field of a body that is encoded as JSON.
    """
    encode = _encoder.encode
    return msgspec.Raw(b"{%b}" % b",".join([encode(k) + b":" + encode(v) for k, v in pairs]))


def strict_json(data: bytes) -> bytes:
    """Return the same in JSON: each key that is no text becomes the text of it.

    Raises:
        RemoteProtocolError: Brackets do not fit, a key is too long, or there are too many objects
            in one another.
    """
    pieces: list[bytes] = []
    starts = [0]  # of the key or value that is being read, at each depth
    for token in _TOKEN.findall(data):
        if token == b":":
            key = b"".join(pieces[starts[-1] :])
            if len(key) > MAX_KEY_BYTES:
                raise RemoteProtocolError(f"JSON with a key of over {MAX_KEY_BYTES} bytes")
            if not key.startswith(b'"'):
                pieces[starts[-1] :] = [_encoder.encode(key.decode(errors="replace"))]
        pieces.append(token)
        if token in b"{[":
            if len(starts) == MAX_DEPTH:
                raise RemoteProtocolError(f"JSON of more than {MAX_DEPTH} objects in one another")
            starts.append(len(pieces))
        elif token in b"}]":
            starts.pop()
            if not starts:
                raise RemoteProtocolError("JSON whose brackets do not fit")
        elif token in b",:":
            starts[-1] = len(pieces)
    return b"".join(pieces)
