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
    from mqmesh.protocol.groups import GroupConfig as GroupConfig
    from mqmesh.protocol.groups import ResetWhere as ResetWhere
    from mqmesh.protocol.membership import ConsumeFromWhere as ConsumeFromWhere
    from mqmesh.protocol.membership import MessageModel as MessageModel
    from mqmesh.protocol.messaging import SendStatus as SendStatus
    from mqmesh.protocol.retries import ResendTarget as ResendTarget
    from mqmesh.protocol.route import Perm as Perm
    from mqmesh.protocol.route import TopicConfig as TopicConfig
    from mqmesh.sdk.admin import AdminClient as AdminClient
    from mqmesh.sdk.consumer_options import PullConsumerKeywords as PullConsumerKeywords
    from mqmesh.sdk.consumer_options import PullConsumerOptions as PullConsumerOptions
    from mqmesh.sdk.consumer_options import PushConsumerKeywords as PushConsumerKeywords
    from mqmesh.sdk.consumer_options import PushConsumerOptions as PushConsumerOptions
    from mqmesh.sdk.dead_letters import DeadLetter as DeadLetter
    from mqmesh.sdk.dead_letters import DeadLetterClient as DeadLetterClient
    from mqmesh.sdk.dead_letters import DeadLetterFilter as DeadLetterFilter
    from mqmesh.sdk.delays import DelayClient as DelayClient
    from mqmesh.sdk.group_admin import GroupAdmin as GroupAdmin
    from mqmesh.sdk.message_selector import MessageSelector as MessageSelector
    from mqmesh.sdk.options import ClientOptions as ClientOptions
    from mqmesh.sdk.producer import Producer as Producer
    from mqmesh.sdk.producer_options import ProducerKeywords as ProducerKeywords
    from mqmesh.sdk.producer_options import ProducerOptions as ProducerOptions
    from mqmesh.sdk.producer_options import TransactionKeywords as TransactionKeywords
    from mqmesh.sdk.producer_options import TransactionOptions as TransactionOptions
    from mqmesh.sdk.pull_consumer import PullConsumer as PullConsumer
    from mqmesh.sdk.push_consumer import ConsumeResult as ConsumeResult
    from mqmesh.sdk.push_consumer import PushConsumer as PushConsumer
    from mqmesh.sdk.queries import QueryClient as QueryClient
    from mqmesh.sdk.requests import is_request as is_request
    from mqmesh.sdk.run import run as run
    from mqmesh.sdk.send_result import SendFuture as SendFuture
    from mqmesh.sdk.send_result import SendResult as SendResult
    from mqmesh.sdk.tracks import TrackClient as TrackClient
    from mqmesh.sdk.transaction_admin import TransactionAdmin as TransactionAdmin
    from mqmesh.sdk.transaction_producer import TransactionProducer as TransactionProducer
    from mqmesh.sdk.transactions import LocalTransactionState as LocalTransactionState
    from mqmesh.sdk.transactions import TransactionListener as TransactionListener

_MODULE_OF = {
    "AdminClient": "mqmesh.sdk.admin",
    "ClientOptions": "mqmesh.sdk.options",
    "ConsumeFromWhere": "mqmesh.protocol.membership",
    "ConsumeResult": "mqmesh.sdk.push_consumer",
    "DeadLetter": "mqmesh.sdk.dead_letters",
    "DeadLetterClient": "mqmesh.sdk.dead_letters",
    "DeadLetterFilter": "mqmesh.sdk.dead_letters",
    "DelayClient": "mqmesh.sdk.delays",
    "GroupAdmin": "mqmesh.sdk.group_admin",
    "GroupConfig": "mqmesh.protocol.groups",
    "LocalTransactionState": "mqmesh.sdk.transactions",
    "MQMeshError": "mqmesh.errors",
    "Message": "mqmesh.message",
    "MessageModel": "mqmesh.protocol.membership",
    "MessageQueue": "mqmesh.message",
    "MessageSelector": "mqmesh.sdk.message_selector",
    "Perm": "mqmesh.protocol.route",
    "Producer": "mqmesh.sdk.producer",
    "ProducerKeywords": "mqmesh.sdk.producer_options",
    "ProducerOptions": "mqmesh.sdk.producer_options",
    "PullConsumer": "mqmesh.sdk.pull_consumer",
    "PullConsumerKeywords": "mqmesh.sdk.consumer_options",
    "PullConsumerOptions": "mqmesh.sdk.consumer_options",
    "PushConsumer": "mqmesh.sdk.push_consumer",
    "PushConsumerKeywords": "mqmesh.sdk.consumer_options",
    "PushConsumerOptions": "mqmesh.sdk.consumer_options",
    "PythonFilter": "mqmesh.filtering.python_filter",
    "QueryClient": "mqmesh.sdk.queries",
    "ResendTarget": "mqmesh.protocol.retries",
    "ResetWhere": "mqmesh.protocol.groups",
    "SendFuture": "mqmesh.sdk.send_result",
    "SendResult": "mqmesh.sdk.send_result",
    "SendStatus": "mqmesh.protocol.messaging",
    "StoredMessage": "mqmesh.message",
    "TopicConfig": "mqmesh.protocol.route",
    "TrackClient": "mqmesh.sdk.tracks",
    "TransactionAdmin": "mqmesh.sdk.transaction_admin",
    "TransactionKeywords": "mqmesh.sdk.producer_options",
    "TransactionListener": "mqmesh.sdk.transactions",
    "TransactionOptions": "mqmesh.sdk.producer_options",
    "TransactionProducer": "mqmesh.sdk.transaction_producer",
    "is_request": "mqmesh.sdk.requests",
    "run": "mqmesh.sdk.run",
}

__all__ = [
    "AdminClient",
    "ClientOptions",
    "ConsumeFromWhere",
    "ConsumeResult",
    "DeadLetter",
    "DeadLetterClient",
    "DeadLetterFilter",
    "DelayClient",
    "GroupAdmin",
    "GroupConfig",
    "LocalTransactionState",
    "MQMeshError",
    "Message",
    "MessageModel",
    "MessageQueue",
    "MessageSelector",
    "Perm",
    "Producer",
    "ProducerKeywords",
    "ProducerOptions",
    "PullConsumer",
    "PullConsumerKeywords",
    "PullConsumerOptions",
    "PushConsumer",
    "PushConsumerKeywords",
    "PushConsumerOptions",
    "PythonFilter",
    "QueryClient",
    "ResendTarget",
    "ResetWhere",
    "SendFuture",
    "SendResult",
    "SendStatus",
    "StoredMessage",
    "TopicConfig",
    "TrackClient",
    "TransactionAdmin",
    "TransactionKeywords",
    "TransactionListener",
    "TransactionOptions",
    "TransactionProducer",
    "__version__",
    "is_request",
    "run",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'mqmesh' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
