"""Messages of ``apache.rocketmq.v2``, as far as the gateway reads or writes them.

A class is made of each message of the table below, in a pool of descriptors of its own: the
official client for Python registers the same names in the common one. Enums stand as numbers, which
are the same on the wire; their names are in ``codes.py``. Fields that are left out here are passed
over when they come.
"""

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from mqmesh.units import MIB

GrpcMessage = Any
"""A message of one of the classes: these are made at run time, so that no checker knows them."""

SERVICE: Final = "apache.rocketmq.v2.MessagingService"

_PACKAGE: Final = "apache.rocketmq.v2"
_TABLE: Final = """
Timestamp: seconds int64 1, nanos int32 2
Duration: seconds int64 1, nanos int32 2
Status: code int32 1, message string 2
Resource: resource_namespace string 1, name string 2
Address: host string 1, port int32 2
Endpoints: scheme int32 1, addresses *Address 2
Broker: name string 1, id int32 2, endpoints Endpoints 3
MessageQueue: topic Resource 1, id int32 2, permission int32 3, broker Broker 4,
    accept_message_types *int32 5
FilterExpression: type int32 1, expression string 2
SubscriptionEntry: topic Resource 1, expression FilterExpression 2
Digest: type int32 1, checksum string 2
DeadLetterQueue: topic string 1, message_id string 2
SystemProperties: tag string 1, keys *string 2, message_id string 3, body_digest Digest 4,
    body_encoding int32 5, message_type int32 6, born_timestamp Timestamp 7, born_host string 8,
    store_timestamp Timestamp 9, store_host string 10, delivery_timestamp Timestamp 11,
    receipt_handle string 12, queue_id int32 13, queue_offset int64 14,
    invisible_duration Duration 15, delivery_attempt int32 16, message_group string 17,
    trace_context string 18, orphaned_transaction_recovery_duration Duration 19,
    dead_letter_queue DeadLetterQueue 20, lite_topic string 21, priority ?int32 22
UserProperty: key string 1, value string 2
Message: topic Resource 1, user_properties *UserProperty 2, system_properties SystemProperties 3,
    body bytes 4
ExponentialBackoff: initial Duration 1, max Duration 2, multiplier float 3
CustomizedBackoff: next *Duration 1
RetryPolicy: max_attempts int32 1, exponential_backoff ExponentialBackoff 2,
    customized_backoff CustomizedBackoff 3
Publishing: topics *Resource 1, max_body_size int32 2, validate_message_type bool 3
Subscription: group Resource 1, subscriptions *SubscriptionEntry 2, fifo ?bool 3,
    receive_batch_size int32 4, long_polling_timeout Duration 5
UA: language int32 1, version string 2, platform string 3, hostname string 4
Metric: on bool 1, endpoints Endpoints 2
Settings: client_type int32 1, access_point Endpoints 2, backoff_policy RetryPolicy 3,
    request_timeout Duration 4, publishing Publishing 5, subscription Subscription 6,
    user_agent UA 7, metric Metric 8
QueryRouteRequest: topic Resource 1, endpoints Endpoints 2
QueryRouteResponse: status Status 1, message_queues *MessageQueue 2
SendMessageRequest: messages *Message 1
SendResultEntry: status Status 1, message_id string 2, transaction_id string 3, offset int64 4,
    recall_handle string 5
SendMessageResponse: status Status 1, entries *SendResultEntry 2
QueryAssignmentRequest: topic Resource 1, group Resource 2, endpoints Endpoints 3
Assignment: message_queue MessageQueue 1
QueryAssignmentResponse: status Status 1, assignments *Assignment 2
ReceiveMessageRequest: group Resource 1, message_queue MessageQueue 2,
    filter_expression FilterExpression 3, batch_size int32 4, invisible_duration Duration 5,
    auto_renew bool 6, long_polling_timeout Duration 7, attempt_id string 8
ReceiveMessageResponse: status Status 1, message Message 2, delivery_timestamp Timestamp 3
AckMessageEntry: message_id string 1, receipt_handle string 2
AckMessageRequest: group Resource 1, topic Resource 2, entries *AckMessageEntry 3
AckMessageResultEntry: message_id string 1, receipt_handle string 2, status Status 3
AckMessageResponse: status Status 1, entries *AckMessageResultEntry 2
ForwardMessageToDeadLetterQueueRequest: group Resource 1, topic Resource 2,
    receipt_handle string 3, message_id string 4, delivery_attempt int32 5,
    max_delivery_attempts int32 6
ForwardMessageToDeadLetterQueueResponse: status Status 1
HeartbeatRequest: group Resource 1, client_type int32 2
HeartbeatResponse: status Status 1
EndTransactionRequest: topic Resource 1, message_id string 2, transaction_id string 3,
    resolution int32 4, source int32 5, trace_context string 6
EndTransactionResponse: status Status 1
RecoverOrphanedTransactionCommand: message Message 1, transaction_id string 2
ThreadStackTrace: nonce string 1, thread_stack_trace string 2
VerifyMessageResult: nonce string 1
PrintThreadStackTraceCommand: nonce string 1
VerifyMessageCommand: nonce string 1, message Message 2
TelemetryCommand: status Status 1, settings Settings 2, thread_stack_trace ThreadStackTrace 3,
    verify_message_result VerifyMessageResult 4,
    recover_orphaned_transaction_command RecoverOrphanedTransactionCommand 5,
    print_thread_stack_trace_command PrintThreadStackTraceCommand 6,
    verify_message_command VerifyMessageCommand 7
NotifyClientTerminationRequest: group Resource 1
NotifyClientTerminationResponse: status Status 1
ChangeInvisibleDurationRequest: group Resource 1, topic Resource 2, receipt_handle string 3,
    invisible_duration Duration 4, message_id string 5, suspend bool 7
ChangeInvisibleDurationResponse: status Status 1, receipt_handle string 2
PullMessageRequest: group Resource 1, message_queue MessageQueue 2, offset int64 3,
    batch_size int32 4, filter_expression FilterExpression 5, long_polling_timeout Duration 6
PullMessageResponse: status Status 1, message Message 2, next_offset ?int64 3
UpdateOffsetRequest: group Resource 1, message_queue MessageQueue 2, offset int64 3
UpdateOffsetResponse: status Status 1
GetOffsetRequest: group Resource 1, message_queue MessageQueue 2
GetOffsetResponse: status Status 1, offset int64 2
QueryOffsetRequest: message_queue MessageQueue 1, query_offset_policy int32 2,
    timestamp Timestamp 3
QueryOffsetResponse: status Status 1, offset int64 2
RecallMessageRequest: topic Resource 1, recall_handle string 2
RecallMessageResponse: status Status 1, message_id string 2
"""
"""Names, types and numbers of fields; ``*`` for lists, ``?`` where 0 is not the same as none. The
numbers are RocketMQ's."""

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _FIELD.TYPE_BOOL,
    "bytes": _FIELD.TYPE_BYTES,
    "float": _FIELD.TYPE_FLOAT,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "string": _FIELD.TYPE_STRING,
}

MOST_BESIDE_BYTES: Final = 1 * MIB
"""Bytes of a send that are no bodies: each two of them may become an object of 56."""
MOST_FIELDS: Final = 32_768
"""Fields of a send that has more bytes, with those of its messages."""
_MESSAGES: Final = 1
_BODY: Final = 4
_FIXED_BYTES: Final = {1: 8, 5: 4}


def check_send(data: bytes) -> None:
    """Check the size of a SendMessageRequest before its classes take it apart.

    Args:
        data: The request as it came.

    Raises:
        ValueError: It has too many fields, too many bytes that are no bodies, or cannot be read.
    """
    beside = len(data)
    if beside <= MOST_BESIDE_BYTES:
        return
    fields = 0
    for number, start, end in _fields(data, 0, beside):
        fields += 1
        for inner, first, last in _fields(data, start, end) if number == _MESSAGES else ():
            fields += 1
            if inner == _BODY:
                beside -= last - first
            if fields > MOST_FIELDS:
                break
        if fields > MOST_FIELDS:
            raise ValueError(f"a long send with more than {MOST_FIELDS} fields")
    if beside > MOST_BESIDE_BYTES:
        raise ValueError(f"{beside} bytes beside bodies (limit {MOST_BESIDE_BYTES})")


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each field of a message."""
    while at < end:
        tag, at = _varint(data, at, end)
        kind, start = tag & 7, at
        if kind == 2:
            length, start = _varint(data, at, end)
            at = start + length
        elif kind == 0:
            _, at = _varint(data, at, end)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise ValueError(f"a field of kind {kind}")
        if at > end:
            raise ValueError("a field that is cut off")
        yield tag >> 3, start, at


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    found = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        one = data[at]
        at += 1
        found |= (one & 0x7F) << shift
        if one < 0x80:
            return found, at
    raise ValueError("a number that is cut off")


def _describe() -> Any:
    """Return the table as the description of a file."""
    file = descriptor_pb2.FileDescriptorProto(
        name="mqmesh/rocketmq_v2.proto", package=_PACKAGE, syntax="proto3"
    )
    for line in _TABLE.strip().replace(",\n", ",").splitlines():
        name, _, fields = line.partition(":")
        message = file.message_type.add(name=name)
        for one in fields.split(","):
            field_name, kind, number = one.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = _FIELD.LABEL_REPEATED if kind[0] == "*" else _FIELD.LABEL_OPTIONAL
            if kind[0] == "?":
                # A field that says whether it is there is the only one of a group of its own.
                field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field_name}")
            kind = kind.lstrip("*?")
            if kind in _SCALARS:
                field.type = _SCALARS[kind]
            else:
                field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    return file


def _classes() -> dict[str, GrpcMessage]:
    pool = descriptor_pool.DescriptorPool()
    file = _describe()
    pool.Add(file)
    return {
        one.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{_PACKAGE}.{one.name}")
        )
        for one in file.message_type
    }


CLASSES: Final[dict[str, GrpcMessage]] = _classes()
"""Class of each message, by its name in the table."""


def duration(length_ms: int) -> GrpcMessage:
    """Return a length of time, ms, as the protocol has it."""
    return CLASSES["Duration"](seconds=length_ms // 1_000, nanos=length_ms % 1_000 * 1_000_000)
