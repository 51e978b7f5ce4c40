"""Options of producers."""

from typing import Annotated

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT
from mqmesh.sdk.tracing.tracing_options import TracingKeywords, TracingOptions
from mqmesh.units import MIB


class ProducerOptions(TracingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a producer; beside these, the fields of ``TracingOptions``.

    Attributes:
        send_msg_timeout_ms: For one message over all tries.
        failover_patience_ms: How long a batch that a broker may have stored is repeated at that
            broker group only, where masters are replaced: its new master recognises it, and another
            group would store it again. 0 for not at all.
        retry_times_when_send_failed: Further tries of a synchronous send after the first.
        retry_times_when_send_async_failed: The same for asynchronous ones.
        retry_another_broker_when_not_store_ok: Send messages again, to another broker, that were
            not flushed or replicated in time; may duplicate.
        send_latency_fault_enable: Avoid brokers that were slow or failed, for a while.
        max_message_size: Of one body, in bytes; the broker has the last word.
        compress_msg_body_over_how_much: Compress batches whose messages are on average at
            least so large, in bytes.
        buffer_memory_bytes: Room for messages without an outcome; beyond it ``send_async``
            waits for up to the send's timeout.
        linger_ms: How long a batch that is not full waits for more messages; each send takes so
            much longer, synchronous ones, too. 0 for not at all: batches grow while requests are in
            flight. Less than ``send_msg_timeout_ms``; a send with a timeout of its own of less than
            a quarter of a second more than this does not wait.
        batch_size_bytes: Asynchronous and concurrent sends share batches up to this size.
        batch_messages: And up to so many messages.
        max_requests_in_flight: Requests in flight a broker.
        busy_poll_us: Wait of a synchronous send, awake, for its answer before it sleeps;
            only as long as answers do come within that time. 0 spares the processor, and a send
            takes about half as long again.
        max_pending_requests: Calls of ``request`` that may wait for their replies at a time; and
            replies that may be on their way.
        close_timeout_ms: How long ``close``, and the end of the program, wait for sends that have
            no outcome yet.
    """

    send_msg_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=600_000)] = 3_000
    failover_patience_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 2_000
    retry_times_when_send_failed: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    retry_times_when_send_async_failed: Annotated[int, msgspec.Meta(ge=0, le=100)] = 2
    retry_another_broker_when_not_store_ok: bool = False
    send_latency_fault_enable: bool = False
    max_message_size: Annotated[int, msgspec.Meta(ge=1, le=15 * MIB)] = MAX_MESSAGE_BYTES_DEFAULT
    compress_msg_body_over_how_much: Annotated[int, msgspec.Meta(ge=1)] = 4_096
    buffer_memory_bytes: Annotated[int, msgspec.Meta(ge=1)] = 64 * MIB
    linger_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0
    batch_size_bytes: Annotated[int, msgspec.Meta(ge=1, le=8 * MIB)] = MIB // 4
    batch_messages: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 2_000
    max_requests_in_flight: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    busy_poll_us: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 200
    max_pending_requests: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    close_timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 3_000

    def __post_init__(self) -> None:
        """Check the rules between fields."""
        super().__post_init__()
        if self.linger_ms >= self.send_msg_timeout_ms:
            raise InvalidArgument(
                f"linger_ms ({self.linger_ms}) must be less than send_msg_timeout_ms "
                f"({self.send_msg_timeout_ms})"
            )


class TransactionOptions(ProducerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a transaction producer.

    Attributes:
        execute_thread_count: Most threads that run local transactions of
            ``send_message_in_transaction_async``, started as needed.
        check_thread_pool_max_size: Most threads that answer check-backs. One that hangs keeps
            its thread, so this is also how many may hang before the others wait.
        max_transactions_in_flight: Asynchronous transactions without an outcome; beyond it the
            next one waits for up to the send's timeout.
    """

    execute_thread_count: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 8
    check_thread_pool_max_size: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 64
    max_transactions_in_flight: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 10_000


class ProducerKeywords(TracingKeywords, total=False):
    """Fields of ``ProducerOptions``, as keyword arguments."""

    send_msg_timeout_ms: int
    failover_patience_ms: int
    retry_times_when_send_failed: int
    retry_times_when_send_async_failed: int
    retry_another_broker_when_not_store_ok: bool
    send_latency_fault_enable: bool
    max_message_size: int
    compress_msg_body_over_how_much: int
    buffer_memory_bytes: int
    linger_ms: int
    batch_size_bytes: int
    batch_messages: int
    max_requests_in_flight: int
    busy_poll_us: int
    max_pending_requests: int
    close_timeout_ms: int


class TransactionKeywords(ProducerKeywords, total=False):
    """Fields of ``TransactionOptions``, as keyword arguments."""

    execute_thread_count: int
    check_thread_pool_max_size: int
    max_transactions_in_flight: int
