"""Options of consumers."""

from typing import Annotated, Literal, TypedDict

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.protocol.delivery import MAX_INVISIBLE_MS, MIN_INVISIBLE_MS, DeliveryMode
from mqmesh.protocol.membership import ConsumeFromWhere, MessageModel
from mqmesh.protocol.pulling import MAX_PULL_BYTES, MAX_SUSPEND_MS
from mqmesh.protocol.retries import DEFAULT_MAX_RECONSUME_TIMES
from mqmesh.sdk.client.options import Ms
from mqmesh.sdk.consumer.fetching.process_queue import FlowLimits
from mqmesh.sdk.consumer.fetching.pull_loop import PullSettings
from mqmesh.sdk.consumer.receiving.received_runs import RunSettings
from mqmesh.sdk.tracing.tracing_options import TracingKeywords, TracingOptions
from mqmesh.units import MAX_OFFSET, MIB

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class ConsumerOptions(TracingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of every consumer; beside these, the fields of ``TracingOptions``.

    Attributes:
        message_model: CLUSTERING: one member of the group gets each message. BROADCASTING:
            every member gets every message, and offsets stay in a file of its own.
        consume_from_where: Start of the group in queues without a committed offset.
        consume_timestamp_ms: For ``TIMESTAMP``, ms since 1970.
        rebalance_interval_ms: Members and queues are looked at again after this, as the
            safety net below the brokers' notices.
        persist_consumer_offset_interval_ms: Between commits.
        pull_max_bytes: Size of one answer, 1 to 16 MiB; at least one batch comes, of any size.
        broker_suspend_max_time_ms: Longest wait of a pull that finds nothing at the broker.
        pull_timeout_ms: Longest wait for its answer beyond that.
        pull_threshold_for_queue: Messages held of a queue before pulling pauses.
        pull_threshold_size_for_queue: The same in MiB.
        start_timeout_ms: Longest wait of ``start`` for the first queues.
        topic_wait_ms: How long a topic may be missing, 0 to 3,600,000 ms: ``start`` waits so long
            for it. After that the log says so, at once and each minute.
        topic_must_exist: A topic that is missing for longer than ``topic_wait_ms`` is an error:
            ``start``, or a poll, raises ``TopicNotFound``.
        offsets_dir: Folder of offset files, for BROADCASTING.
        admin_introspection: Administrators may see this consumer's settings, its messages at hand
            and where its threads stand (`mqmesh group running`).
    """

    message_model: MessageModel = MessageModel.CLUSTERING
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.LAST_OFFSET
    consume_timestamp_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0
    rebalance_interval_ms: Ms = 20_000
    persist_consumer_offset_interval_ms: Ms = 5_000
    pull_max_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PULL_BYTES)] = MIB
    broker_suspend_max_time_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_SUSPEND_MS)] = 15_000
    pull_timeout_ms: Ms = 10_000
    pull_threshold_for_queue: Count = 1_000
    pull_threshold_size_for_queue: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 100
    start_timeout_ms: Ms = 3_000
    topic_wait_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 0
    topic_must_exist: bool = False
    offsets_dir: str = "~/.mqmesh/offsets"
    admin_introspection: bool = True

    def pull_settings(self) -> PullSettings:
        """Return the options of pulls."""
        return PullSettings(
            max_bytes=self.pull_max_bytes,
            suspend_ms=self.broker_suspend_max_time_ms,
            timeout_ms=self.pull_timeout_ms,
        )


class PushConsumerOptions(ConsumerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a push consumer.

    Attributes:
        consume_thread_count: Most threads that call the listener, started as needed.
        consume_message_batch_max_size: Most messages that one call gets.
        consume_concurrently_max_span: Queue offsets between the first message not yet
            handled and the last one held, before pulling pauses.
        consume_timeout_ms: A message that is with the listener for longer is sent back for a
            later try, though the call goes on; BROADCASTING and ``consume_orderly`` only report
            it.
        close_timeout_ms: Longest wait of ``close`` for listeners that run.
        consume_orderly: Each queue is consumed by one member and one call at a time, in order;
            a message that fails holds up its queue until it succeeds.
        suspend_current_queue_time_ms: So long, with ``consume_orderly``.
        max_reconsume_times: A message retried so often that fails once more goes to the dead
            letters. -1 is 16 times, and with ``consume_orderly`` without limit. BROADCASTING does
            not try again.
        dead_letter_undecodable: With ``consume_orderly``, undecodable messages go to the dead
            letters, also without ``max_reconsume_times``; else their queue waits for an
            administrator. Where order does not matter they always go there.
        rebalance_lock_interval_ms: Between renewals of the queues' locks, with
            ``consume_orderly``; brokers keep them for 60 s.
        delivery: ``queue``: members divide the queues. ``message``: each message goes to any
            member. ``fifo``: the same, and messages of one sharding key go to one member at a time,
            in order. All members of a group have the same.
        invisible_ms: With the latter two, length of the leases of messages, 1,000 to 43,200,000 ms,
            which are extended while listeners work; 0 for that of the group's settings. So long
            after a member was killed its messages come again, or sooner (``lost_grace_ms``).
    """

    consume_thread_count: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 20
    consume_message_batch_max_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1
    consume_concurrently_max_span: Count = 2_000
    consume_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=86_400_000)] = 900_000
    close_timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 1_000
    consume_orderly: bool = False
    suspend_current_queue_time_ms: Annotated[int, msgspec.Meta(ge=10, le=30_000)] = 1_000
    max_reconsume_times: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = -1
    dead_letter_undecodable: bool = False
    rebalance_lock_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=30_000)] = 20_000
    delivery: DeliveryMode = DeliveryMode.QUEUE
    invisible_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_INVISIBLE_MS)] = 0

    def check_delivery(self) -> None:
        """Check that the other options fit ``delivery``.

        Raises:
            InvalidArgument: They do not.
        """
        if self.delivery is DeliveryMode.QUEUE:
            return
        unfit = {
            "message_model = BROADCASTING": self.message_model == MessageModel.BROADCASTING,
            "consume_orderly (take delivery = fifo)": self.consume_orderly,
            "consume_from_where = TIMESTAMP": self.consume_from_where == ConsumeFromWhere.TIMESTAMP,
            "max_reconsume_times (the group has retry_max_times)": self.max_reconsume_times >= 0,
            f"invisible_ms below {MIN_INVISIBLE_MS}": 0 < self.invisible_ms < MIN_INVISIBLE_MS,
        }
        for what, is_so in unfit.items():
            if is_so:
                raise InvalidArgument(f"delivery = {self.delivery} does not go with {what}")

    def most_retries(self) -> int:
        """Return ``max_reconsume_times`` as brokers get it."""
        most = self.max_reconsume_times
        return DEFAULT_MAX_RECONSUME_TIMES if most < 0 else most

    def dead_letters_after(self) -> int | None:
        """Return the retries after which a failing message is a dead letter; None for never."""
        is_endless = self.consume_orderly and self.max_reconsume_times < 0
        is_tried_again = self.message_model == MessageModel.CLUSTERING and not is_endless
        return self.most_retries() if is_tried_again else None

    def run_settings(self) -> RunSettings:
        """Return the options of messages that are received under leases."""
        return RunSettings(
            delivery=self.delivery,
            invisible_ms=self.invisible_ms,
            workers=self.consume_thread_count,
            batch_size=self.consume_message_batch_max_size,
            consume_timeout_ms=self.consume_timeout_ms,
            suspend_ms=self.broker_suspend_max_time_ms,
        )

    def flow_limits(self) -> FlowLimits:
        """Return the limits beyond which a queue is not pulled."""
        return FlowLimits(
            messages=self.pull_threshold_for_queue,
            size_bytes=self.pull_threshold_size_for_queue * MIB,
            span=self.consume_concurrently_max_span,
        )


class PullConsumerOptions(ConsumerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a pull consumer.

    Attributes:
        auto_commit: Commit messages of earlier polls by itself, each
            ``persist_consumer_offset_interval_ms`` and on close.
        pull_batch_size: Most messages that a poll returns, unless it says otherwise.
        request_timeout_ms: For calls that ask a broker.
    """

    auto_commit: bool = True
    pull_batch_size: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 32
    request_timeout_ms: Ms = 3_000


class SimpleConsumerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a simple consumer.

    Attributes:
        delivery: ``message``, or ``fifo``: messages of one sharding key go to one member at a
            time, in order. All members of a group have the same.
        consume_from_where: Start of the group in queues from which it never received:
            FIRST_OFFSET or LAST_OFFSET.
        settle_timeout_ms: So long an acknowledgement is tried while no broker takes it.
        report_after_ms: The log says why nothing can be received after so long.
        topic_wait_ms: How long a topic may be missing, 0 to 3,600,000 ms, before the log says so.
        topic_must_exist: A topic that is missing for longer is an error: ``receive`` raises
            ``TopicNotFound``.
    """

    delivery: DeliveryMode = DeliveryMode.MESSAGE
    consume_from_where: ConsumeFromWhere = ConsumeFromWhere.FIRST_OFFSET
    settle_timeout_ms: Ms = 10_000
    report_after_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 3_000
    topic_wait_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)] = 0
    topic_must_exist: bool = False


class ConsumerKeywords(TracingKeywords, total=False):
    """Fields of ``ConsumerOptions``, as keyword arguments."""

    message_model: MessageModel | Literal["CLUSTERING", "BROADCASTING"]
    consume_from_where: ConsumeFromWhere | Literal["LAST_OFFSET", "FIRST_OFFSET", "TIMESTAMP"]
    consume_timestamp_ms: int
    rebalance_interval_ms: int
    persist_consumer_offset_interval_ms: int
    pull_max_bytes: int
    broker_suspend_max_time_ms: int
    pull_timeout_ms: int
    pull_threshold_for_queue: int
    pull_threshold_size_for_queue: int
    start_timeout_ms: int
    topic_wait_ms: int
    topic_must_exist: bool
    offsets_dir: str
    admin_introspection: bool


class PushConsumerKeywords(ConsumerKeywords, total=False):
    """Fields of ``PushConsumerOptions``, as keyword arguments."""

    consume_thread_count: int
    consume_message_batch_max_size: int
    consume_concurrently_max_span: int
    consume_timeout_ms: int
    close_timeout_ms: int
    consume_orderly: bool
    suspend_current_queue_time_ms: int
    max_reconsume_times: int
    dead_letter_undecodable: bool
    rebalance_lock_interval_ms: int
    delivery: DeliveryMode | Literal["queue", "message", "fifo"]
    invisible_ms: int


class PullConsumerKeywords(ConsumerKeywords, total=False):
    """Fields of ``PullConsumerOptions``, as keyword arguments."""

    auto_commit: bool
    pull_batch_size: int
    request_timeout_ms: int


class SimpleConsumerKeywords(TypedDict, total=False):
    """Fields of ``SimpleConsumerOptions``, as keyword arguments."""

    delivery: DeliveryMode | Literal["queue", "message", "fifo"]
    consume_from_where: ConsumeFromWhere | Literal["LAST_OFFSET", "FIRST_OFFSET", "TIMESTAMP"]
    settle_timeout_ms: int
    report_after_ms: int
    topic_wait_ms: int
    topic_must_exist: bool
