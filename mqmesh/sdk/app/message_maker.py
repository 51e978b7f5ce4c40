"""Values of one type as messages of one topic."""

from collections.abc import Sequence
from typing import Generic, TypedDict, TypeVar, Unpack, cast

from mqmesh.message import PROPERTY_CONTENT_TYPE, Message, check_topic
from mqmesh.sdk.app.bodies import Codec, encoder_of

T = TypeVar("T")


class OwnFields(TypedDict, total=False):
    """Fields of a message beside its topic, body and properties; see ``Message``."""

    tag: str | None
    keys: Sequence[str]
    flag: int
    sharding_key: str | None
    delay_level: int
    deliver_at_ms: int


class SendFields(OwnFields, total=False):
    """Fields of a message beside its topic, body and properties, its priority and life time."""

    priority: int | None
    ttl_ms: int | None


def own_fields(fields: SendFields) -> OwnFields:
    """Return the fields of the message itself."""
    found = fields.copy()
    found.pop("priority", None)
    found.pop("ttl_ms", None)
    return cast(OwnFields, found)


class MessageFields(OwnFields, total=False):
    """Fields of a message beside its topic and body."""

    properties: dict[str, str] | None


class MessageMaker(Generic[T]):
    """Maker of messages from values.

    Args:
        topic: Topic.
        kind: Type of the values.
        codec: Form of the bodies, noted in the property ``CONTENT_TYPE``; None for JSON, bytes and
            text, without a note.

    Raises:
        InvalidArgument: The topic's name is illegal, or values of this type cannot be sent.
    """

    def __init__(self, topic: str, kind: type[T], codec: Codec | None = None) -> None:
        self.topic = check_topic(topic)
        self._codec = codec
        self._encode = encoder_of(kind, codec)

    def message(self, value: T, **fields: Unpack[MessageFields]) -> Message:
        """Return the message that is sent; for transactions and batches, too.

        Args:
            value: Becomes the body.
            fields: ``tag``, ``keys``, ``properties``, ``flag``, ``sharding_key``,
                ``delay_level`` and ``deliver_at_ms`` of the ``Message``.

        Raises:
            InvalidArgument: The value is none of the type.
        """
        if self._codec is not None:
            noted = {PROPERTY_CONTENT_TYPE: self._codec.content_type}
            fields["properties"] = {**noted, **(fields.get("properties") or {})}
        return Message(self.topic, self._encode(value), **fields)
