from collections.abc import Callable
from typing import Any

from mqmesh.sdk.lanes import Lane, TopicLanes
from mqmesh.sdk.send_buffer import SendBuffer
from mqmesh.sdk.send_result import PendingBatch, SendFuture

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
        no_keys: tuple[str, ...],
        message_type: type,
        lanes_type: type[TopicLanes],
        lane_type: type[Lane],
        batch_type: type[PendingBatch],
        future_type: type[SendFuture],
        timeout_ms: int,
        limits: tuple[int, int, int, int, int, int, int, int, int],
    ) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> SendFuture: ...
