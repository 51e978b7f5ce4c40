"""Codecs of ``App`` for FastStream."""

from collections.abc import Sequence
from typing import Any

from fast_depends.library.serializer import SerializerProto
from faststream.message import StreamMessage

from mqmesh.errors import InvalidArgument, Reject
from mqmesh.sdk.app.bodies import Codec
from mqmesh.sdk.faststream.message import Delivery, parse


class MQMeshCodec:
    """FastStream codec of bodies in the form of a ``Codec``, for brokers and subscribers::

        broker = MQMeshBroker(codec=MQMeshCodec(mqmesh.MSGPACK_CODEC))

    Bodies are decoded without a wanted type (``Any``); FastStream makes the handler's parameters of
    the decoded values.

    Args:
        codec: Form of the bodies.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    async def encode(
        self, msg: Any, serializer: SerializerProto | None = None
    ) -> tuple[bytes, str | None]:
        """Return the body of a value, and its content type.

        Raises:
            InvalidArgument: The codec does not take the value.
        """
        try:
            return self._codec.encode(msg), self._codec.content_type
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{self._codec.content_type}: {error}") from error

    async def encode_batch(
        self, msgs: Sequence[Any], serializer: SerializerProto | None = None
    ) -> list[tuple[bytes, str | None]]:
        """Return the bodies of values as ``encode`` does."""
        return [await self.encode(one, serializer) for one in msgs]

    async def decode(self, msg: StreamMessage[Any]) -> Any:
        """Return the value of a body.

        Raises:
            Reject: It has another content type, or is no such value: no retry mends it.
        """
        named, own = msg.content_type, self._codec.content_type
        if named and named != own:
            raise Reject(f"the body is {named[:300]}; this handler decodes {own}")
        try:
            return self._codec.decode(msg.body, Any)
        except ValueError as error:
            raise Reject(f"the body is no {own}: {error}") from None

    async def decode_batch(self, msg: StreamMessage[Any]) -> list[Any]:
        """Return the values of a list's bodies; errors as of ``decode``."""
        return [await self.decode(await parse(Delivery(one))) for one in msg.raw_message.messages]
