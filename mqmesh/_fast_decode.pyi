from mqmesh.message import BatchInfo, StoredMessage
from mqmesh.payload import Buffer

class Decoder:
    def __init__(
        self,
        *,
        message_type: type,
        no_keys: tuple[str, ...],
        limits: tuple[int, int, int, int, int, int],
    ) -> None: ...
    def decode(
        self, payload: Buffer, count: int, topic: str, first_offset: int, batch: BatchInfo, /
    ) -> list[StoredMessage] | None: ...
