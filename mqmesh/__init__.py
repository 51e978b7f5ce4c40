"""mqmesh: a message queue for Python teams, on ZeroMQ.

What users import stands here; it is loaded when it is first used, so that a
process that needs only the storage or the record batch loads no ZeroMQ.
Nothing inside the project imports from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mqmesh.version import VERSION as __version__

if TYPE_CHECKING:
    from mqmesh.errors import MQMeshError as MQMeshError
    from mqmesh.filtering.python_filter import PythonFilter as PythonFilter
    from mqmesh.message import Message as Message
    from mqmesh.message import MessageQueue as MessageQueue
    from mqmesh.message import StoredMessage as StoredMessage
    from mqmesh.protocol.membership import ConsumeFromWhere as ConsumeFromWhere
    from mqmesh.protocol.membership import MessageModel as MessageModel
    from mqmesh.protocol.messaging import SendStatus as SendStatus
    from mqmesh.sdk.dead_letters import DeadLetterClient as DeadLetterClient
    from mqmesh.sdk.delays import DelayClient as DelayClient
    from mqmesh.sdk.group_admin import GroupAdmin as GroupAdmin
    from mqmesh.sdk.message_selector import MessageSelector as MessageSelector
    from mqmesh.sdk.producer import Producer as Producer
    from mqmesh.sdk.pull_consumer import PullConsumer as PullConsumer
    from mqmesh.sdk.push_consumer import ConsumeResult as ConsumeResult
    from mqmesh.sdk.push_consumer import PushConsumer as PushConsumer
    from mqmesh.sdk.requests import is_request as is_request
    from mqmesh.sdk.send_result import SendFuture as SendFuture
    from mqmesh.sdk.send_result import SendResult as SendResult
    from mqmesh.sdk.tracks import TrackClient as TrackClient
    from mqmesh.sdk.transaction_producer import TransactionProducer as TransactionProducer
    from mqmesh.sdk.transactions import LocalTransactionState as LocalTransactionState
    from mqmesh.sdk.transactions import TransactionListener as TransactionListener

_MODULE_OF = {
    "ConsumeFromWhere": "mqmesh.protocol.membership",
    "ConsumeResult": "mqmesh.sdk.push_consumer",
    "GroupAdmin": "mqmesh.sdk.group_admin",
    "DeadLetterClient": "mqmesh.sdk.dead_letters",
    "DelayClient": "mqmesh.sdk.delays",
    "LocalTransactionState": "mqmesh.sdk.transactions",
    "MQMeshError": "mqmesh.errors",
    "Message": "mqmesh.message",
    "MessageModel": "mqmesh.protocol.membership",
    "MessageQueue": "mqmesh.message",
    "MessageSelector": "mqmesh.sdk.message_selector",
    "Producer": "mqmesh.sdk.producer",
    "PullConsumer": "mqmesh.sdk.pull_consumer",
    "PushConsumer": "mqmesh.sdk.push_consumer",
    "PythonFilter": "mqmesh.filtering.python_filter",
    "SendFuture": "mqmesh.sdk.send_result",
    "SendResult": "mqmesh.sdk.send_result",
    "SendStatus": "mqmesh.protocol.messaging",
    "StoredMessage": "mqmesh.message",
    "TrackClient": "mqmesh.sdk.tracks",
    "TransactionListener": "mqmesh.sdk.transactions",
    "TransactionProducer": "mqmesh.sdk.transaction_producer",
    "is_request": "mqmesh.sdk.requests",
}

__all__ = [
    "ConsumeFromWhere",
    "ConsumeResult",
    "DeadLetterClient",
    "DelayClient",
    "LocalTransactionState",
    "GroupAdmin",
    "MQMeshError",
    "Message",
    "MessageModel",
    "MessageQueue",
    "MessageSelector",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "PythonFilter",
    "SendFuture",
    "SendResult",
    "SendStatus",
    "StoredMessage",
    "TrackClient",
    "TransactionListener",
    "TransactionProducer",
    "__version__",
    "is_request",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'mqmesh' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
