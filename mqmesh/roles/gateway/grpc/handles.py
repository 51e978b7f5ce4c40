"""Handles that clients keep and give back: receipts, transaction ids, recall handles. Pure.

A handle says all that is needed to act on it, so any gateway with the same secret takes it, also
after a restart. It is base64 of 12 bytes of a signature and the fields as a msgpack array. The
signature holds for one kind of handle, and for a context: a receipt only counts with its group and
topic.
"""

import binascii
import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, TypeVar

import msgspec

from mqmesh.protocol.grpc.codes import RefusedCall, ReplyCode

SECRET_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 12
_MOST_CHARACTERS: Final = 2_048
_encoder: Final = msgspec.msgpack.Encoder()


class Receipt(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A delivery of a message.

    Attributes:
        broker_name: Broker group.
        lease: Number of its lease.
        queue_id: Message queue.
        queue_offset: Its place.
        is_retry: The queue is of the group's retry topic.
    """

    broker_name: str
    lease: int
    queue_id: int
    queue_offset: int
    is_retry: bool


class TransactionHandle(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A half message, and what proves that its end may be decided.

    Attributes:
        broker_name: Broker group.
        base_queue_offset: Queue offset of its batch, in the half topic.
        producer_id: Producer id of its batch.
        first_sequence: First sequence of its batch.
        ordinal: In its batch.
        hidden: The proof, as ``Handles.hide`` gives it.
    """

    broker_name: str
    base_queue_offset: int
    producer_id: int
    first_sequence: int
    ordinal: int
    hidden: bytes


class RecallHandle(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A delayed message that may be called back.

    Attributes:
        broker_name: Broker group.
        producer_id: First half of its id at mqmesh.
        sequence: Second half.
        message_id: Its client's id.
    """

    broker_name: str
    producer_id: int
    sequence: int
    message_id: str


Handle = TypeVar("Handle", Receipt, TransactionHandle, RecallHandle)

_ERROR: Final = {
    Receipt: ReplyCode.INVALID_RECEIPT_HANDLE,
    TransactionHandle: ReplyCode.INVALID_TRANSACTION_ID,
    RecallHandle: ReplyCode.BAD_REQUEST,
}
_DECODERS: Final = {kind: msgspec.msgpack.Decoder(kind) for kind in _ERROR}


class Handles:
    """Maker and reader of handles.

    Attributes:
        secret: Secret of the gateway, or of all that share it; 32 bytes, set before the first call.
    """

    def __init__(self) -> None:
        self.secret = b""

    def hide(self, proof: bytes, broker_name: str, base_queue_offset: int) -> bytes:
        """Return the proof about a half batch as a client may see it; and, of that, the proof.

        Args:
            proof: 16 bytes.
            broker_name: Broker group of the half batch.
            base_queue_offset: Its place in the half topic.
        """
        data = f"proof/{broker_name}/{base_queue_offset}".encode()
        pad = hmac.digest(self.secret, data, hashlib.sha256)
        return bytes(one ^ other for one, other in zip(proof, pad, strict=False))

    def seal(self, handle: Receipt | TransactionHandle | RecallHandle, context: str) -> str:
        """Return a handle as a text.

        Args:
            handle: Its fields.
            context: Must be the same when it comes back.
        """
        body = _encoder.encode(handle)
        signature = self._sign(type(handle).__name__, context, body)
        return urlsafe_b64encode(signature + body).rstrip(b"=").decode()

    def unseal(self, kind: type[Handle], text: str, context: str) -> Handle:
        """Return the fields of a handle.

        Raises:
            RefusedCall: It is none of ours, or another context's.
        """
        try:
            if len(text) > _MOST_CHARACTERS:
                raise ValueError(f"{len(text)} characters")
            data = urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4))
            signature, body = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(signature, self._sign(kind.__name__, context, body)):
                raise ValueError("its signature is wrong")
            found: Handle = _DECODERS[kind].decode(body)
        except (ValueError, binascii.Error, msgspec.MsgspecError) as error:
            raise RefusedCall(
                _ERROR[kind], f"no {kind.__name__} of this gateway's for {context}: {error}"
            ) from error
        return found

    def _sign(self, kind: str, context: str, body: bytes) -> bytes:
        data = b"%b\0%b\0%b" % (kind.encode(), context.encode(), body)
        return hmac.digest(self.secret, data, hashlib.sha256)[:_SIGNATURE_BYTES]
