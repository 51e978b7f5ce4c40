"""Connections that send single requests of RocketMQ's remoting protocol, and show the answers."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mqmesh.protocol.remoting.frame import (
    RESPONSE,
    RemotingCommand,
    RemotingReader,
    encode_frame,
)
from mqmesh.protocol.remoting.loose_json import strict_json
from mqmesh.protocol.remoting.records import decode_properties
from mqmesh.roles.gateway.users import ACCESS_KEY, SIGNATURE, sign

ANSWER_S = 20
KEY_ID = "7F0000010000000000000000000000AA"
"""Id that a client gives a message; its end may be another."""
CLIENT_VERSION = 493
"""RocketMQ's ``MQVersion`` of client 5.3.3."""
_HEAD = struct.Struct(">iiiiiqqiq4siq4siiqi")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CLIENT = re.compile(r"\d+\.\d+\.\d+\.\d+@\d+#\d+")
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+:\d+")


class Keys(NamedTuple):
    """Keys of a user that signs its requests.

    Attributes:
        access: Its name.
        secret: Key of the signatures.
    """

    access: str
    secret: str


class Connection:
    """A connection of one client.

    Args:
        address: Name server or broker, ``host:port``.
        client_id: The client, in its heartbeats.
        keys: Keys that sign its requests; None for no signature.

    Attributes:
        pushed: Commands that the server sent by itself, in order.
    """

    def __init__(self, address: str, client_id: str = "oracle", keys: Keys | None = None) -> None:
        host, _, port = address.rpartition(":")
        self.address, self.client_id = address, client_id
        self._keys = keys
        self.pushed: list[RemotingCommand] = []
        self._socket = socket.create_connection((host, int(port)), ANSWER_S)
        self._reader = RemotingReader(1 << 25)
        self._answers: dict[int, RemotingCommand] = {}
        self._next = 0

    def close(self) -> None:
        """Ends it."""
        self._socket.close()

    def post(self, code: int, body: object = b"", flag: int = 0, **fields: Any) -> int:
        """Sends a request; its number."""
        self._next += 1
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        texts = {
            name.removesuffix("_"): str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in fields.items()
        }
        if self._keys is not None:
            texts[ACCESS_KEY] = self._keys.access
            texts[SIGNATURE] = sign(texts, data, self._keys.secret.encode()).decode()
        command = RemotingCommand(
            code, self._next, flag, texts, data, version=CLIENT_VERSION, language="JAVA"
        )
        self._socket.sendall(b"".join(encode_frame(command)))
        return self._next

    def ask(self, code: int, body: object = b"", **fields: Any) -> RemotingCommand:
        """Sends a request and waits for its answer."""
        return self.wait(self.post(code, body, **fields))

    def wait(self, number: int) -> RemotingCommand:
        """Waits for the answer of a request."""
        end = time.monotonic() + ANSWER_S
        while number not in self._answers:
            self._read(end, f"request {number} has no answer")
        return self._answers.pop(number)

    def wait_pushed(self, code: int) -> RemotingCommand:
        """Waits for a command of the server."""
        end = time.monotonic() + ANSWER_S
        while True:
            for command in self.pushed:
                if command.code == code:
                    self.pushed.remove(command)
                    return command
            self._read(end, f"no command {code} came")

    def reply(self, command: RemotingCommand, code: int = 0, body: bytes = b"") -> None:
        """Answers a command of the server."""
        self._socket.sendall(b"".join(encode_frame(command.answer(code, body=body))))

    def _read(self, end: float, otherwise: str) -> None:
        self._socket.settimeout(max(end - time.monotonic(), 0.001))
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError:
            raise AssertionError(f"{otherwise} within {ANSWER_S} s") from None
        assert data, f"{self.address} closed the connection: {otherwise}"
        for command in self._reader.feed(data):
            if command.flag & RESPONSE:
                self._answers[command.opaque] = command
            else:
                self.pushed.append(command)


def records_of(body: bytes) -> list[dict[str, Any]]:
    """Returns the stored messages of an answer's body, field by field."""
    found = []
    while body:
        (size, magic, crc, queue_id, flag, queue_offset, log_offset, system_flag, born_ms) = (
            _HEAD.unpack_from(body)[:9]
        )
        born, born_port, store_ms, store, store_port, tries, half, length = _HEAD.unpack_from(body)[
            9:
        ]
        text = body[_HEAD.size : _HEAD.size + length]
        position = _HEAD.size + length
        name_size = 1 if magic == -626843481 else 2
        name_end = (
            position + name_size + int.from_bytes(body[position : position + name_size], "big")
        )
        topic = body[position + name_size : name_end].decode()
        (properties_size,) = struct.unpack_from(">h", body, name_end)
        pairs = body[name_end + 2 : name_end + 2 + properties_size].decode()
        found.append(
            {
                "topic": topic,
                "queueId": queue_id,
                "flag": flag,
                "queueOffset": queue_offset,
                "commitLogOffset": log_offset,
                "sysFlag": system_flag,
                "bornTimestamp": born_ms,
                "bornHost": f"{socket.inet_ntoa(born)}:{born_port}",
                "storeTimestamp": store_ms,
                "storeHost": f"{socket.inet_ntoa(store)}:{store_port}",
                "reconsumeTimes": tries,
                "preparedTransactionOffset": half,
                "hasCrc": crc != 0,
                "body": text.decode(errors="replace")[:64],
                "properties": decode_properties(pairs),
            }
        )
        body = body[size:]
    return found


VOLATILE = {
    "commitLogOffset": "log offset",
    "tranStateTableOffset": "log offset",
    "preparedTransactionOffset": "log offset",
    "physicOffset": "log offset",
    "phyOffset": "log offset",
    "indexLastUpdatePhyoffset": "log offset",
    "version": "version",
    "subVersion": "time",
    "recallHandle": "handle",
}
"""Fields whose values differ in each run, with what is shown instead unless it is 0."""


def plain(value: Any, name: str = "") -> Any:
    """Returns a value without what differs in each run: times, ids, addresses and the like."""
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(one, key) for key, one in sorted(value.items())}
    if isinstance(value, list):
        return [plain(one, name) for one in value]
    text = str(value)
    if name in VOLATILE and (name == "commitLogOffset" or text not in ("0", "-1")):
        return f"<{VOLATILE[name]}>"
    if re.fullmatch(r"1[0-9]{12}|20[0-9]{2}-[0-9]{2}-.*:[0-9]{3}", text):
        return "<time>"
    if re.fullmatch(r"[0-9A-F]{32,56}(,[0-9A-F]{32,56})*", text):
        own = [KEY_ID[:30] == one[:30] for one in text.split(",")]
        ids = zip(text.split(","), own, strict=True)
        return ",".join(
            [
                one if is_own else "<offset id>" if one[:8] == "7F000001" else "<id>"
                for one, is_own in ids
            ]
        )
    if isinstance(value, str):
        return _UUID.sub("<uuid>", _CLIENT.sub("<client>", _ADDRESS.sub("<address>", value)))
    return value


def json_of(body: bytes) -> Any:
    """Returns a body in JSON, also as fastjson writes it; keys that are objects in one order."""
    return _with_one_order(json.loads(strict_json(body))) if body else None


def _with_one_order(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_one_order(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        json.dumps(json.loads(key), sort_keys=True) if key[:1] == "{" else key: _with_one_order(one)
        for key, one in value.items()
    }


View = Callable[[RemotingCommand], Any]


def shape(answer: RemotingCommand) -> Any:
    """Returns the names and types of a body in JSON; of a table with many keys those of one."""
    return _shape(json_of(answer.body)) if answer.body else None


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(plain(name)): _shape(one) for name, one in sorted(value.items())}
    if isinstance(value, list):
        return [_shape(value[0])] if value else []
    if value is None:
        return None
    return {str: "text", bool: "flag", int: "number", float: "number"}[type(value)]


def whole(answer: RemotingCommand) -> Any:
    """Returns a body in JSON with its values."""
    return plain(json_of(answer.body))


def messages(answer: RemotingCommand) -> Any:
    """Returns the stored messages of a body."""
    return [plain(one) for one in records_of(answer.body)]


def names(answer: RemotingCommand) -> Any:
    """Returns the names in a body in JSON: of a list, or of a table."""
    return dict.fromkeys(sorted(json_of(answer.body)), True)


def size(answer: RemotingCommand) -> Any:
    """Returns whether there is a body."""
    return "bytes" if answer.body else None


def shown(answer: RemotingCommand, view: View = size) -> dict[str, Any]:
    """Returns an answer as it is compared.

    Args:
        answer: The answer, or a command of the server.
        view: Shows its body.
    """
    found: dict[str, Any] = {"code": answer.code}
    if answer.flag & RESPONSE and answer.code:
        found["remark"] = bool(answer.remark)
    if answer.fields:
        found["fields"] = plain(dict(answer.fields))
    if (body := view(answer)) is not None:
        found["body"] = body
    return found


def properties_text(properties: Mapping[str, str]) -> str:
    """Returns properties as a client writes them."""
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


def batch_of(bodies: list[tuple[bytes, Mapping[str, str]]]) -> bytes:
    """Returns the body of a batch."""
    pieces = []
    for body, properties in bodies:
        text = properties_text(properties).encode()
        size = 20 + len(body) + 2 + len(text)
        pieces.append(
            struct.pack(">iiiii", size, 0, 0, 0, len(body))
            + body
            + struct.pack(">h", len(text))
            + text
        )
    return b"".join(pieces)
