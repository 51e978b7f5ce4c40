"""Tracing options; part of the options of every client."""

from typing import Annotated, Literal, TypedDict

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.message import MAX_TOPIC_LENGTH, TRACE_TOPIC, check_topic, is_closed_topic
from mqmesh.sdk.hooks import Hooks


class TracingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of tracing; see docs/tracing.md.

    Attributes:
        msg_trace: Share of the messages, 0 to 1, of which it writes RocketMQ's message trace; with
            the same share at all clients these are the same messages.
        trace_topic: Topic of the trace.
        telemetry: ``otel`` for spans and metrics of OpenTelemetry.
        otel_create_spans: A span for each message of a batch, too.
        otel_parent: ``message``: the work of a listener belongs to the trace of the message; else
            it has a trace of its own, which is linked to that.
    """

    msg_trace: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    trace_topic: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOPIC_LENGTH)] = (
        TRACE_TOPIC
    )
    telemetry: Literal["", "otel"] = ""
    otel_create_spans: bool = False
    otel_parent: Literal["", "message"] = ""

    def __post_init__(self) -> None:
        """Looks at the name of the trace topic."""
        if is_closed_topic(check_topic(self.trace_topic)):
            raise InvalidArgument(f"trace_topic {self.trace_topic!r} is reserved")


class TracingKeywords(TypedDict, total=False):
    """Fields of ``TracingOptions``, as keyword arguments."""

    msg_trace: float
    trace_topic: str
    telemetry: Literal["", "otel"]
    otel_create_spans: bool
    otel_parent: Literal["", "message"]


class Telemetry(Hooks):
    """Interface of ``Otel``, for clients that may not have its package."""

    def instrument(self, client: object) -> None:
        """Puts spans around a client's methods."""
