"""Codec of a producer's batches: numbers messages, encodes batches, reads their outcomes."""

import logging
from collections.abc import Sequence
from functools import partial

from mqmesh.batch.delayed_batch import DelayedMeta, ExpiringMeta, pack_due_times
from mqmesh.batch.native_encode import encode_at_once
from mqmesh.batch.payload import MAX_RAW_BYTES, Payload, encode_payload, pick_messages
from mqmesh.batch.record_batch import Attributes, batch_parts
from mqmesh.errors import InvalidArgument, RemoteProtocolError
from mqmesh.message import Message
from mqmesh.message_checks import Extras
from mqmesh.namespaces import prefix_of
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.command import Command
from mqmesh.protocol.messaging import BatchOutcome, decode_outcomes
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.options import born_host
from mqmesh.sdk.hooks import HookCalls
from mqmesh.sdk.producer.lanes import PendingBatch
from mqmesh.sdk.producer.send_buffer import AT_TIMES
from mqmesh.sdk.producer.send_result import run_after_send, trace_stored
from mqmesh.sdk.tracing.message_trace import MessageTrace, facts_of
from mqmesh.sdk.tracing.trace_records import TraceMessageType
from mqmesh.units import MAX_TIMESTAMP_MS

_log = logging.getLogger(__name__)


class BatchCodec:
    """Codec that numbers the messages of one producer instance and encodes its batches.

    Args:
        key: Of the instance, see ``producer_key``.
        compress_over_bytes: See ``record_batch.encode_batch``.
        hooks: Called before a batch is encoded, and when it is done.
        trace: Called with some of the stored messages.
        group: The producer's.
        namespace: Of the client; names in batches have it.
    """

    is_half = False
    """The messages are half messages of transactions."""

    def __init__(
        self,
        key: bytes,
        compress_over_bytes: int | None,
        hooks: HookCalls | None = None,
        trace: MessageTrace | None = None,
        group: str = "",
        namespace: str = "",
    ) -> None:
        self.key = key
        self._prefix = prefix_of(namespace)
        self._group = self._prefix + group
        self._hooks = hooks if hooks is not None and hooks.sees_sends else None
        self._trace = trace
        self.producer_id = producer_id_of(key)
        self._compress_over_bytes = compress_over_bytes
        self._born_host = born_host()
        self._lock = ranked_lock(LockRank.LEAF)
        self._next_sequence = 0

    def payload(self, messages: Sequence[Message], extras: Extras = Extras.ANY) -> Payload:
        """Encodes messages; ``extras`` as for ``payload.encode_payload``.

        Raises:
            InvalidArgument: The messages do not fit into one batch.
        """
        try:
            return encode_payload(
                messages,
                compress_over_bytes=self._compress_over_bytes,
                extras=extras,
                prefix=self._prefix,
            )
        except Exception as error:
            # Also errors of messages that were changed after they were checked.
            raise InvalidArgument(f"the messages cannot be sent as one batch: {error}") from error

    def at_once(
        self, messages: Sequence[Message], max_message_size: int, *, is_one: bool
    ) -> Payload | None:
        """Checks and encodes messages at once; see ``native_encode.encode_at_once``."""
        try:
            return encode_at_once(
                messages,
                max_body_bytes=max_message_size,
                is_one=is_one,
                compress_over_bytes=self._compress_over_bytes,
                with_places=is_one and self._trace is not None,
                prefix=self._prefix,
            )
        except Exception as error:
            # The way that encodes them one by one finds the error, or has the memory.
            _log.debug("messages cannot be encoded at once: %s", error)
            return None

    def encode(self, batch: PendingBatch, now_ms: int) -> tuple[bytes, ...]:
        """Return the batch in pieces; encoded once a queue, numbered once for ever.

        Raises:
            InvalidArgument: The messages do not fit into one batch.
        """
        if batch.encoded is not None:
            return batch.encoded
        payload = batch.payload
        if payload is None:
            if self._hooks is not None:
                self._call_hooks(self._hooks, batch, now_ms)
            # Checked when they were sent; this is the quickest way to encode most of them.
            payload = self.at_once(batch.messages, MAX_RAW_BYTES, is_one=False)
            if payload is None:
                payload = self.payload(batch.messages)
            batch.payload = payload
            if batch.delay == AT_TIMES:
                batch.due_times = pack_due_times([one.deliver_at_ms for one in batch.messages])
        if batch.first_sequence < 0:
            batch.producer_id, batch.born_timestamp = self.producer_id, now_ms
            with self._lock:
                batch.first_sequence = self._next_sequence
                self._next_sequence += payload.message_count
            if self._trace is not None:
                try:
                    self._begin_trace(self._trace, batch, payload)
                except Exception:
                    _log.exception("a batch for %s is sent without a trace", batch.queue)
        try:
            batch.encoded = self._parts(batch, payload)
        except Exception as error:
            # After any error: a batch that is taken must have its outcome.
            raise InvalidArgument(f"the messages cannot be sent as one batch: {error}") from error
        return batch.encoded

    def _call_hooks(self, hooks: HookCalls, batch: PendingBatch, now_ms: int) -> None:
        context = hooks.before_send(batch.messages, batch.queue, now_ms, is_half=self.is_half)
        batch.messages = context.messages.copy()
        with batch.lock:
            batch.callbacks.insert(0, partial(run_after_send, hooks, context, batch))

    def _begin_trace(self, trace: MessageTrace, batch: PendingBatch, payload: Payload) -> None:
        first_id = batch.producer_id, batch.first_sequence
        positions = trace.chosen(batch.queue.topic, first_id, payload.message_count)
        if not positions:
            return
        # Of a batch that its sender made only the payload is left: to keep hundreds of messages
        # for some of them costs a third of making and sending them.
        own = batch.messages
        picked = [own[at] for at in positions] if own else pick_messages(payload, positions)
        facts = list(map(facts_of, picked, positions))
        kind = TraceMessageType.DELAY if batch.delay else TraceMessageType.NORMAL
        if self.is_half:
            kind = TraceMessageType.HALF
        with batch.lock:
            batch.callbacks.append(partial(trace_stored, trace, facts, kind, batch))

    def _parts(self, batch: PendingBatch, payload: Payload) -> tuple[bytes, ...]:
        attributes = 0 if batch.wait_store else int(Attributes.NO_WAIT_STORE)
        meta = None
        topic = self._prefix + batch.queue.topic
        facts = (
            topic,
            payload.tag_hashes,
            self._born_host,
            0 if batch.delay == AT_TIMES else batch.delay,
            batch.due_times,
        )
        if batch.delay:
            attributes |= Attributes.HAS_DELAY
            meta = DelayedMeta(*facts)
        if batch.ttl_ms:
            # The time to live of delayed messages begins at their delivery, which the broker knows.
            expires_ms = -batch.ttl_ms if batch.delay else batch.born_timestamp + batch.ttl_ms
            attributes |= Attributes.HAS_EXPIRY
            meta = ExpiringMeta(*facts, expires_ms=min(expires_ms, MAX_TIMESTAMP_MS))
        return batch_parts(
            payload,
            topic=topic,
            queue_id=batch.queue.queue_id,
            producer_id=batch.producer_id,
            first_sequence=batch.first_sequence,
            born_timestamp=batch.born_timestamp,
            born_host=self._born_host,
            attributes=attributes,
            meta=meta,
        )


def read_outcomes(answer: Command, batch_count: int) -> list[BatchOutcome]:
    """Return the outcomes of a request's batches.

    Raises:
        RemoteProtocolError: The answer cannot be read, or does not fit the request.
    """
    outcomes = decode_outcomes(answer.header, answer.body)
    if len(outcomes) != batch_count:
        raise RemoteProtocolError(f"{len(outcomes)} outcomes for {batch_count} batches")
    return outcomes
