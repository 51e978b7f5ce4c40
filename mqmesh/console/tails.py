"""Live tails of topics: a pull consumer that commits nothing, for a minute, for one page."""

import asyncio
import secrets
import tempfile
from typing import Any, Final

import msgspec

from mqmesh.aio import PullConsumer
from mqmesh.clock import Clock
from mqmesh.console.body_view import view_body
from mqmesh.errors import MQMeshError, NoPermission
from mqmesh.message import StoredMessage
from mqmesh.protocol.groups import LOOK_GROUP_PREFIX
from mqmesh.protocol.membership import MessageModel
from mqmesh.sdk.client.options import WHOLE_CLUSTER

LONGEST_MS: Final = 60_000
MAX_MESSAGES: Final = 1_000
MAX_TAILS: Final = 16
"""Tails of all users at a time."""
UNWATCHED_MS: Final = 15_000
"""A tail that no page has requested for so long ends."""
POLL_MS: Final = 500
MAX_PREVIEW: Final = 2_000
"""Characters of a body."""


class TailedMessage(msgspec.Struct, frozen=True):
    """A message of a tail.

    Attributes:
        message_id: Its id.
        broker_name: Broker group.
        queue_id: Queue.
        queue_offset: Offset in the queue.
        stored_ms: Store time, ms since 1970.
        tag: "" for none.
        keys: Keys.
        body: Beginning of the body as text, JSON or hex; "" where bodies are not shown.
        size: Of the body, bytes.
    """

    message_id: str
    broker_name: str
    queue_id: int
    queue_offset: int
    stored_ms: int
    tag: str
    keys: list[str]
    body: str
    size: int


class TailView(msgspec.Struct, frozen=True):
    """A tail so far.

    Attributes:
        state: ``starting``, ``listening``, or why it ended.
        is_over: It ended.
        messages: In the order in which they came.
    """

    state: str
    is_over: bool
    messages: list[TailedMessage]


class _Tail:
    def __init__(self, now_ms: int) -> None:
        self.state = "starting"
        self.is_over = False
        self.began_ms = self.last_poll_ms = now_ms
        self.messages: list[TailedMessage] = []
        self.task: asyncio.Task[None] | None = None


class Tails:
    """All tails of one cluster; of one event loop.

    Args:
        namesrv_addr: Name servers.
        clock: Source of time.
        shows_bodies: Bodies are shown.
        consume: Makes a consumer of a group, with keywords of ``mqmesh.aio.PullConsumer``.
    """

    def __init__(
        self,
        namesrv_addr: list[str],
        clock: Clock,
        *,
        shows_bodies: bool = True,
        consume: Any = PullConsumer,
    ) -> None:
        self._namesrv_addr = namesrv_addr
        self._clock = clock
        self._shows_bodies = shows_bodies
        self._consume = consume
        self._tails: dict[tuple[str, str, str], _Tail] = {}

    def follow(self, credentials: str, topic: str, name: str) -> TailView:
        """Return a tail so far; the first call begins it.

        Args:
            credentials: File of the user's keys.
            topic: Topic.
            name: Chosen by the page: another one begins anew.

        Raises:
            NoPermission: There are 16 tails already.
        """
        now_ms = self._clock.monotonic_ms()
        key = (credentials, topic, name)
        tail = self._tails.get(key)
        if tail is None:
            self._forget_old(now_ms)
            if len(self._tails) >= MAX_TAILS:
                raise NoPermission(f"{MAX_TAILS} tails are open already; stop one first")
            tail = self._tails[key] = _Tail(now_ms)
            tail.task = asyncio.ensure_future(self._run(tail, credentials, topic))
        tail.last_poll_ms = now_ms
        return TailView(tail.state, tail.is_over, list(tail.messages))

    async def stop(self, credentials: str, topic: str, name: str) -> None:
        """End a tail, if there is one; its messages stay for the page."""
        tail = self._tails.get((credentials, topic, name))
        if tail is not None and not tail.is_over:
            tail.state, tail.is_over = "stopped", True
            if tail.task is not None:
                await asyncio.wait([tail.task])

    async def close(self) -> None:
        """End all tails."""
        for credentials, topic, name in list(self._tails):
            await self.stop(credentials, topic, name)
        self._tails.clear()

    def _forget_old(self, now_ms: int) -> None:
        for key, tail in list(self._tails.items()):
            if tail.is_over and now_ms - tail.last_poll_ms > UNWATCHED_MS:
                del self._tails[key]

    async def _run(self, tail: _Tail, credentials: str, topic: str) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="mqmesh-tail-") as folder:
                consumer = self._consume(
                    f"{LOOK_GROUP_PREFIX}{secrets.token_hex(8)}",
                    namesrv_addr=self._namesrv_addr,
                    credentials=credentials,
                    namespace=WHOLE_CLUSTER,
                    message_model=MessageModel.BROADCASTING,
                    auto_commit=False,
                    offsets_dir=folder,
                )
                async with consumer:
                    await self._listen(tail, consumer, topic)
        except MQMeshError as error:
            tail.state, tail.is_over = str(error), True

    async def _listen(self, tail: _Tail, consumer: Any, topic: str) -> None:
        queues = await consumer.queues(topic)
        await consumer.assign(queues)
        await consumer.seek_to_end(*queues)
        if not tail.is_over:
            tail.state = "listening"
        while not tail.is_over:
            capacity = MAX_MESSAGES - len(tail.messages)
            for message in await consumer.poll(POLL_MS, capacity):
                tail.messages.append(self._shown(message))
            self._judge(tail)

    def _judge(self, tail: _Tail) -> None:
        now_ms = self._clock.monotonic_ms()
        if len(tail.messages) >= MAX_MESSAGES:
            tail.state, tail.is_over = f"ended after {MAX_MESSAGES:,} messages", True
        elif now_ms - tail.began_ms >= LONGEST_MS:
            tail.state, tail.is_over = f"ended after {LONGEST_MS // 1_000} s", True
        elif now_ms - tail.last_poll_ms >= UNWATCHED_MS:
            tail.state, tail.is_over = "ended: nobody looked", True

    def _shown(self, message: StoredMessage) -> TailedMessage:
        body = view_body(bytes(message.body)).text[:MAX_PREVIEW] if self._shows_bodies else ""
        return TailedMessage(
            message.message_id,
            message.broker_name,
            message.queue_id,
            message.queue_offset,
            message.store_timestamp,
            message.tag or "",
            list(message.keys),
            body,
            len(message.body),
        )
