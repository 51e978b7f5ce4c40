from collections.abc import Sequence

from mqmesh.message import Message

class Encoder:
    def __init__(
        self,
        *,
        message_type: type,
        limits: tuple[int, int, int, int, int, int, int, int, int],
    ) -> None: ...
    def encode(
        self, messages: Sequence[Message], max_body_bytes: int, one_sharding_key: bool, /
    ) -> tuple[bytes, bool, bool] | None: ...
