"""SEND_REPLY_MESSAGE: a reply goes to the client that asked, and is not stored.

The replier is answered when the client has acknowledged the reply, so it knows what became of
it, and tries again when the connection to the client broke in between.
"""

from collections.abc import Mapping

from mqmesh.batch.payload_check import MESSAGE_OVERHEAD_BYTES
from mqmesh.errors import ClientNotOnline, MessageIllegal
from mqmesh.metrics import counter
from mqmesh.protocol.command import Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replies import (
    AcknowledgeReply,
    PushReply,
    SendReplyRequest,
    SendReplyResponse,
)
from mqmesh.protocol.request import Peer, PendingReply, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.consumer_groups import ConsumerGroups
from mqmesh.roles.broker.open_replies import (
    ACKNOWLEDGE_TIMEOUT_MS,
    ReplyTable,
)
from mqmesh.roles.dispatch import Handler
from mqmesh.units import MAX_OFFSET


class RequestReplyFeature(Feature):
    """Replies to requests, handed on to the client that asked.

    The replier is answered when the client has acknowledged the reply, so it knows what became of
    it, and tries again when the connection to the client broke in between.
    """

    def __init__(self, core: Core, groups: ConsumerGroups) -> None:
        self._settings = core.settings
        self._clock = core.clock
        self._stats = core.stats
        self._groups = groups
        self._open = ReplyTable()

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.SEND_REPLY_MESSAGE: self.send_reply_message,
            RequestCode.ACKNOWLEDGE_REPLY: self.acknowledge_reply,
        }

    @property
    def open_count(self) -> int:
        """Replies that were not acknowledged yet."""
        return len(self._open)

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Answer repliers whose reply may be lost with a connection."""
        self._give_up(self._open.on_disconnect(peer))

    def tick(self, now_ms: int) -> None:
        """Give up replies that were not acknowledged in time."""
        self._give_up(self._open.expire(now_ms))

    def stopping(self) -> None:
        """Give up all replies: acknowledgements will not be taken any more.

        The client that asked is at the next master soon, and the replier tries there.
        """
        self._give_up(self._open.expire(MAX_OFFSET))

    def send_reply_message(self, request: Request, header: SendReplyRequest) -> Reply | None:
        """Pushes a reply to the client that asked; the answer comes with its acknowledgement.

        Raises:
            ClientNotOnline: It is not connected to this broker, now.
            MessageIllegal: The reply is too large.
            SystemBusy: Too many replies are under way.
        """
        body = request.command.body
        most = self._settings.now.max_message_size + MESSAGE_OVERHEAD_BYTES
        if not 0 < len(body) <= most:
            raise MessageIllegal(
                f"a reply of {len(body)} bytes; 1 to {most} are allowed (max_message_size)"
            )
        client = self._groups.client(header.client_id)
        namespace = request.peer.principal.namespace
        if (
            client is None
            or client.peer is None
            or client.lost_at_ms is not None
            or not (namespace == "" or client.is_of(namespace))
        ):
            self._stats.total.replies_undeliverable += 1
            raise ClientNotOnline(
                f"client {header.client_id[:300]!r} is not connected to this broker"
            )
        deadline_ms = self._clock.monotonic_ms() + ACKNOWLEDGE_TIMEOUT_MS
        token = self._open.open(
            request.later(deadline_ms), client.peer, self._settings.now.max_open_replies
        )
        push = encode_header(
            PushReply(token, header.correlation_id, header.attempt_id, header.client_id)
        )
        self._stats.total.replies_pushed += 1
        client.peer.notify(RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT, push, body)
        return None

    def acknowledge_reply(self, request: Request, header: AcknowledgeReply) -> Reply:
        """The client that asked says what became of a reply; one that is not open is ignored."""
        waiting = self._open.on_acknowledged(request.peer, header.token)
        if waiting is not None:
            waiting.done(SendReplyResponse(header.taken))
        return Reply()

    def _give_up(self, late: list[PendingReply]) -> None:
        for pending in late:
            self._stats.total.replies_undeliverable += 1
            pending.fail(ClientNotOnline("the client that asked did not acknowledge the reply"))

    metrics = (
        counter(
            "replies_pushed_total",
            "replies handed to clients that asked",
            lambda feature: feature._stats.total.replies_pushed,
            unit="messages",
        ),
        counter(
            "replies_undeliverable_total",
            "replies whose client was not there, or did not acknowledge",
            lambda feature: feature._stats.total.replies_undeliverable,
            unit="messages",
        ),
    )
