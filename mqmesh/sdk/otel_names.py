"""Names of OpenTelemetry's conventions for messaging, as of August 2026: in development.

They may still change. All names that mqmesh uses stand here and nowhere else.
"""

from typing import Final

SYSTEM: Final = "mqmesh"

# ---- Operations: their name, which a span's begins with, and their type ----------------------

SEND: Final = "send"
CREATE: Final = "create"
RECEIVE: Final = "receive"
PROCESS: Final = "process"
REPLY: Final = "reply"
COMMIT: Final = "commit"
ROLLBACK: Final = "rollback"
SETTLE: Final = "settle"
"""Type of ``commit`` and ``rollback``; the others have their own name, ``reply`` that of send."""

# ---- Attributes ------------------------------------------------------------------------------

MESSAGING_SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION_NAME: Final = "messaging.destination.name"
PARTITION_ID: Final = "messaging.destination.partition.id"
CONSUMER_GROUP: Final = "messaging.consumer.group.name"
MESSAGE_ID: Final = "messaging.message.id"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
BODY_SIZE: Final = "messaging.message.body.size"
BATCH_COUNT: Final = "messaging.batch.message_count"
CLIENT_ID: Final = "messaging.client.id"
MESSAGE_TAG: Final = "messaging.rocketmq.message.tag"
MESSAGE_KEYS: Final = "messaging.rocketmq.message.keys"
MESSAGE_TYPE: Final = "messaging.rocketmq.message.type"
DELAY_LEVEL: Final = "messaging.rocketmq.message.delay_time_level"
DELIVERY_TIMESTAMP: Final = "messaging.rocketmq.message.delivery_timestamp"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

# ---- Events of spans, and their attributes; the conventions have none ------------------------

EVENT_RETRY: Final = "retry"
"""A listener gets a message that failed before."""
EVENT_BACK: Final = "back to retry"
"""A message that failed comes again."""
EVENT_DEAD: Final = "dead letter"
"""A message that failed does not."""
RECONSUME_TIMES: Final = "messaging.mqmesh.reconsume_times"

# ---- Metrics ---------------------------------------------------------------------------------

OPERATION_DURATION: Final = "messaging.client.operation.duration"
SENT_MESSAGES: Final = "messaging.client.sent.messages"
CONSUMED_MESSAGES: Final = "messaging.client.consumed.messages"
PROCESS_DURATION: Final = "messaging.process.duration"

# ---- Properties of messages ------------------------------------------------------------------

TRACEPARENT: Final = "traceparent"
"""Property of W3C Trace Context: the context in which a message was made."""
