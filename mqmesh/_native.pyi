from collections.abc import Callable, Sequence
from typing import Any

from mqmesh.batch.payload import Buffer
from mqmesh.message import BatchInfo, Message, StoredMessage
from mqmesh.sdk.producer.lanes import Lane, TopicLanes
from mqmesh.sdk.producer.send_buffer import SendBuffer
from mqmesh.sdk.producer.send_result import PendingBatch, SendFuture

_FieldLimits = tuple[int, int, int, int, int, int, int]

class Encoder:
    def __init__(
        self,
        *,
        message_type: type,
        hashes: dict[str, bytes],
        reserved: frozenset[str],
        limits: tuple[int, int, int, int],
        field_limits: _FieldLimits,
    ) -> None: ...
    def encode(
        self, messages: Sequence[Message], max_body_bytes: int, is_one: bool, /
    ) -> tuple[bytes, bool, bytes | None] | None: ...

class Decoder:
    def __init__(
        self,
        *,
        message_type: type,
        batch_type: type,
        no_keys: tuple[str, ...],
        max_strings: int,
        field_limits: _FieldLimits,
    ) -> None: ...
    def decode(
        self, payload: Buffer, count: int, topic: str, first_offset: int, batch: BatchInfo, /
    ) -> list[StoredMessage] | None: ...

class Field:
    def __init__(self, decoder: Decoder, name: str, otherwise: Any) -> None: ...

class PropertyMethod:
    def __init__(self, decoder: Decoder, otherwise: Callable[..., Any]) -> None: ...

class Checker:
    def __init__(self, *, max_strings: int, field_limits: _FieldLimits) -> None: ...
    def check(self, payload: Buffer, count: int, topic: str, max_body_bytes: int, /) -> bool: ...
    def keys(self, payload: Buffer, count: int, /) -> tuple[bytes, int] | None: ...

class FastSend:
    def __init__(
        self,
        *,
        otherwise: Callable[..., SendFuture],
        buffer: SendBuffer,
        topics: dict[str, TopicLanes],
        lock: Any,
        clock_ns: Callable[[], int],
        give_way: Callable[[int], Any],
        reserved: frozenset[str],
        message_type: type,
        lanes_type: type[TopicLanes],
        lane_type: type[Lane],
        batch_type: type[PendingBatch],
        future_type: type[SendFuture],
        timeout_ms: int,
        limits: tuple[int, int, int, int, int, int],
        field_limits: _FieldLimits,
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> SendFuture: ...
