"""A batch that its sender made: checked, and encoded where it is sent from."""

from collections.abc import Sequence

import msgspec

from mqmesh.batch.delayed_batch import pack_due_times
from mqmesh.batch.payload import Payload
from mqmesh.errors import InvalidArgument
from mqmesh.message import Message
from mqmesh.message_checks import Extras, check_messages_of_batch
from mqmesh.sdk.producer.batch_codec import BatchCodec
from mqmesh.sdk.producer.send_buffer import AT_TIMES, delay_of


class ExplicitBatch(msgspec.Struct, frozen=True):
    """Messages that stay together.

    Attributes:
        first: The first message; its topic and sharding key are those of all.
        payload: All of them.
        delay: Delay level of all, ``AT_TIMES`` for points in time, 0 for no delay.
        due_times: Those points in time; see ``delayed_batch.DelayedMeta``.
    """

    first: Message
    payload: Payload
    delay: int = 0
    due_times: bytes = b""


def explicit_batch(
    messages: Sequence[Message], codec: BatchCodec, max_message_size: int
) -> ExplicitBatch:
    """Checks and encodes messages that are to stay together.

    Args:
        messages: At least one.
        codec: The producer's.
        max_message_size: Largest body in bytes, the setting of that name.

    Raises:
        InvalidArgument: One of them is illegal, they do not belong together, or are too many
            for one batch.
    """
    if type(messages) is list:
        # A copy, since another thread may change the list meanwhile.
        messages = messages[:]
    payload = codec.at_once(messages, max_message_size, is_one=True)
    if payload is not None:
        delay = delay_of(messages[0])
        return ExplicitBatch(messages[0], payload, delay, _due_times(messages, delay))
    checked, extras = check_messages_of_batch(messages, max_message_size=max_message_size)
    first, delay, due_times = checked[0], 0, b""
    if extras is Extras.ANY:
        if any(one.sharding_key != first.sharding_key for one in checked):
            raise InvalidArgument("the messages of a batch have different sharding keys")
        delay = delay_of(first)
        if any(delay_of(one) != delay for one in checked):
            raise InvalidArgument("the messages of a batch have different delays")
        due_times = _due_times(checked, delay)
    return ExplicitBatch(first, codec.payload(checked, extras), delay, due_times)


def _due_times(messages: Sequence[Message], delay: int) -> bytes:
    return pack_due_times([one.deliver_at_ms for one in messages]) if delay == AT_TIMES else b""
