"""Views of messages that were sent."""

import msgspec

from mqmesh.sdk.admin.views.fields import view_of
from mqmesh.sdk.probes import Probe
from mqmesh.sdk.producer.send_result import SendResult


class SentView(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was sent; as ``SendResult``."""

    status: str
    message_id: str
    topic: str
    broker_name: str
    queue_id: int
    queue_offset: int
    store_timestamp: int


class ProbeView(msgspec.Struct, frozen=True, kw_only=True):
    """A test message.

    Attributes:
        topic: Topic.
        broker_name: Broker group.
        queue_id: From 0.
        took_ms: Time until the answer.
        status: Name of a ``SendStatus``, "" if there is no answer.
        problem: Why there is none.
    """

    topic: str
    broker_name: str
    queue_id: int
    took_ms: float
    status: str
    problem: str


def sent_view(result: SendResult) -> SentView:
    """Makes the view of a message that was sent."""
    queue = result.message_queue
    return view_of(
        SentView,
        result,
        status=result.status.name,
        topic=queue.topic,
        broker_name=queue.broker_name,
        queue_id=queue.queue_id,
    )


def probe_view(probe: Probe) -> ProbeView:
    """Makes the view of a test message."""
    return view_of(
        ProbeView,
        probe,
        topic=probe.message_queue.topic,
        broker_name=probe.message_queue.broker_name,
        queue_id=probe.message_queue.queue_id,
        took_ms=round(probe.took_ms, 3),
        status="" if probe.status is None else probe.status.name,
    )
