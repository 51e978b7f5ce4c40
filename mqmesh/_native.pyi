from collections.abc import Callable, Sequence
from typing import Any

from mqmesh.batch.payload import Buffer
from mqmesh.message import BatchInfo, Message, StoredMessage
from mqmesh.sdk.producer.lanes import PendingBatch, TopicLanes
from mqmesh.sdk.producer.send_result import SendFuture

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
        self,
        messages: Sequence[Message],
        max_body_bytes: int,
        is_one: bool,
        with_places: bool,
        prefix: str,
        /,
    ) -> tuple[bytes, bool, bytes | None, bytes] | None: ...

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
        self,
        payload: Buffer,
        count: int,
        topic: str,
        first_offset: int,
        batch: BatchInfo,
        shown: str,
        /,
    ) -> list[StoredMessage] | None: ...

class Field:
    def __init__(self, decoder: Decoder, name: str, otherwise: Any) -> None: ...

class PropertyMethod:
    def __init__(self, decoder: Decoder, otherwise: Callable[..., Any]) -> None: ...

class Checker:
    def __init__(self, *, max_strings: int, field_limits: _FieldLimits) -> None: ...
    def check(self, payload: Buffer, count: int, topic: str, max_body_bytes: int, /) -> bool: ...
    def keys(self, payload: Buffer, count: int, /) -> tuple[bytes, int] | None: ...

class OpenBatch:
    def __init__(
        self,
        pending: PendingBatch,
        messages: list[Message],
        deadline_ms: int,
        deadline_max_ms: int,
        usual: bool,
    ) -> None: ...

class Admission:
    def __init__(
        self,
        *,
        topics: dict[str, TopicLanes],
        lock: Any,
        clock_ns: Callable[[], int],
        give_way: Callable[[int], None],
        make_future: Callable[[PendingBatch, int], SendFuture],
        reserved: frozenset[str],
        message_type: type,
        batch_type: type[OpenBatch],
        timeout_ms: int,
        max_bytes: int,
        limits: tuple[int, int, int, int, int, int],
        field_limits: _FieldLimits,
    ) -> None: ...
    def join(self, message: Message, /) -> SendFuture | None: ...
