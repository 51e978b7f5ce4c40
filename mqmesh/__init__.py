"""mqmesh: a message queue for Python teams, on ZeroMQ.

The public names that users import. Each is loaded on first use, so that a
process that needs only the storage or the record batch loads no ZeroMQ.
Nothing inside the project imports from here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mqmesh.version import VERSION as __version__

if TYPE_CHECKING:
    from mqmesh.errors import MQMeshError as MQMeshError
    from mqmesh.errors import Reject as Reject
    from mqmesh.errors import RevisionConflict as RevisionConflict
    from mqmesh.errors import StaleReceipt as StaleReceipt
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
    from mqmesh.sdk.admin.access import AccessClient as AccessClient
    from mqmesh.sdk.admin.admin import AdminClient as AdminClient
    from mqmesh.sdk.admin.broker_admin import BrokerAdmin as BrokerAdmin
    from mqmesh.sdk.admin.cluster_admin import ClusterAdmin as ClusterAdmin
    from mqmesh.sdk.admin.dead_letters import DeadLetter as DeadLetter
    from mqmesh.sdk.admin.dead_letters import DeadLetterClient as DeadLetterClient
    from mqmesh.sdk.admin.dead_letters import DeadLetterFilter as DeadLetterFilter
    from mqmesh.sdk.admin.delays import DelayClient as DelayClient
    from mqmesh.sdk.admin.group_admin import GroupAdmin as GroupAdmin
    from mqmesh.sdk.admin.ha_admin import HaAdmin as HaAdmin
    from mqmesh.sdk.admin.members import MemberClient as MemberClient
    from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin as NamesrvAdmin
    from mqmesh.sdk.admin.queries import QueryClient as QueryClient
    from mqmesh.sdk.admin.replays import ReplayClient as ReplayClient
    from mqmesh.sdk.admin.searches import MessageFilter as MessageFilter
    from mqmesh.sdk.admin.searches import SearchClient as SearchClient
    from mqmesh.sdk.admin.traces import TraceClient as TraceClient
    from mqmesh.sdk.admin.tracks import TrackClient as TrackClient
    from mqmesh.sdk.admin.transaction_admin import TransactionAdmin as TransactionAdmin
    from mqmesh.sdk.app.app import App as App
    from mqmesh.sdk.app.bodies import JSON_CODEC as JSON_CODEC
    from mqmesh.sdk.app.bodies import MSGPACK_CODEC as MSGPACK_CODEC
    from mqmesh.sdk.app.bodies import Codec as Codec
    from mqmesh.sdk.client.options import ClientOptions as ClientOptions
    from mqmesh.sdk.client.run import run as run
    from mqmesh.sdk.consumer.consumer_options import PullConsumerKeywords as PullConsumerKeywords
    from mqmesh.sdk.consumer.consumer_options import PullConsumerOptions as PullConsumerOptions
    from mqmesh.sdk.consumer.consumer_options import PushConsumerKeywords as PushConsumerKeywords
    from mqmesh.sdk.consumer.consumer_options import PushConsumerOptions as PushConsumerOptions
    from mqmesh.sdk.consumer.consumer_options import (
        SimpleConsumerKeywords as SimpleConsumerKeywords,
    )
    from mqmesh.sdk.consumer.consumer_options import SimpleConsumerOptions as SimpleConsumerOptions
    from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector as MessageSelector
    from mqmesh.sdk.consumer.pull_consumer import PullConsumer as PullConsumer
    from mqmesh.sdk.consumer.push_consumer import ConsumeResult as ConsumeResult
    from mqmesh.sdk.consumer.push_consumer import PushConsumer as PushConsumer
    from mqmesh.sdk.consumer.simple_consumer import SimpleConsumer as SimpleConsumer
    from mqmesh.sdk.hooks import ConsumeContext as ConsumeContext
    from mqmesh.sdk.hooks import Hooks as Hooks
    from mqmesh.sdk.hooks import SendContext as SendContext
    from mqmesh.sdk.hooks import TransactionContext as TransactionContext
    from mqmesh.sdk.probes import ProbeClient as ProbeClient
    from mqmesh.sdk.producer.producer import Producer as Producer
    from mqmesh.sdk.producer.producer_options import ProducerKeywords as ProducerKeywords
    from mqmesh.sdk.producer.producer_options import ProducerOptions as ProducerOptions
    from mqmesh.sdk.producer.producer_options import TransactionKeywords as TransactionKeywords
    from mqmesh.sdk.producer.producer_options import TransactionOptions as TransactionOptions
    from mqmesh.sdk.producer.replies import is_request as is_request
    from mqmesh.sdk.producer.send_result import SendFuture as SendFuture
    from mqmesh.sdk.producer.send_result import SendResult as SendResult
    from mqmesh.sdk.tables.entries import KvEntry as KvEntry
    from mqmesh.sdk.tables.key_value import KeyValue as KeyValue
    from mqmesh.sdk.tables.table_admin import TableAdmin as TableAdmin
    from mqmesh.sdk.transactions.transaction_producer import (
        TransactionProducer as TransactionProducer,
    )
    from mqmesh.sdk.transactions.transactions import LocalTransactionState as LocalTransactionState
    from mqmesh.sdk.transactions.transactions import TransactionListener as TransactionListener

_MODULE_OF = {
    "AccessClient": "mqmesh.sdk.admin.access",
    "AdminClient": "mqmesh.sdk.admin.admin",
    "App": "mqmesh.sdk.app.app",
    "JSON_CODEC": "mqmesh.sdk.app.bodies",
    "MSGPACK_CODEC": "mqmesh.sdk.app.bodies",
    "Codec": "mqmesh.sdk.app.bodies",
    "BrokerAdmin": "mqmesh.sdk.admin.broker_admin",
    "ClusterAdmin": "mqmesh.sdk.admin.cluster_admin",
    "ClientOptions": "mqmesh.sdk.client.options",
    "ConsumeContext": "mqmesh.sdk.hooks",
    "ConsumeFromWhere": "mqmesh.protocol.membership",
    "ConsumeResult": "mqmesh.sdk.consumer.push_consumer",
    "DeadLetter": "mqmesh.sdk.admin.dead_letters",
    "DeadLetterClient": "mqmesh.sdk.admin.dead_letters",
    "DeadLetterFilter": "mqmesh.sdk.admin.dead_letters",
    "DelayClient": "mqmesh.sdk.admin.delays",
    "GroupAdmin": "mqmesh.sdk.admin.group_admin",
    "GroupConfig": "mqmesh.protocol.groups",
    "HaAdmin": "mqmesh.sdk.admin.ha_admin",
    "KeyValue": "mqmesh.sdk.tables.key_value",
    "KvEntry": "mqmesh.sdk.tables.entries",
    "MemberClient": "mqmesh.sdk.admin.members",
    "NamesrvAdmin": "mqmesh.sdk.admin.namesrv_admin",
    "ProbeClient": "mqmesh.sdk.probes",
    "Hooks": "mqmesh.sdk.hooks",
    "LocalTransactionState": "mqmesh.sdk.transactions.transactions",
    "MQMeshError": "mqmesh.errors",
    "Message": "mqmesh.message",
    "MessageModel": "mqmesh.protocol.membership",
    "MessageQueue": "mqmesh.message",
    "MessageFilter": "mqmesh.sdk.admin.searches",
    "MessageSelector": "mqmesh.sdk.consumer.fetching.message_selector",
    "Perm": "mqmesh.protocol.route",
    "Producer": "mqmesh.sdk.producer.producer",
    "ProducerKeywords": "mqmesh.sdk.producer.producer_options",
    "ProducerOptions": "mqmesh.sdk.producer.producer_options",
    "PullConsumer": "mqmesh.sdk.consumer.pull_consumer",
    "PullConsumerKeywords": "mqmesh.sdk.consumer.consumer_options",
    "PullConsumerOptions": "mqmesh.sdk.consumer.consumer_options",
    "PushConsumer": "mqmesh.sdk.consumer.push_consumer",
    "PushConsumerKeywords": "mqmesh.sdk.consumer.consumer_options",
    "PushConsumerOptions": "mqmesh.sdk.consumer.consumer_options",
    "PythonFilter": "mqmesh.filtering.python_filter",
    "QueryClient": "mqmesh.sdk.admin.queries",
    "Reject": "mqmesh.errors",
    "RevisionConflict": "mqmesh.errors",
    "ResendTarget": "mqmesh.protocol.retries",
    "ResetWhere": "mqmesh.protocol.groups",
    "ReplayClient": "mqmesh.sdk.admin.replays",
    "SearchClient": "mqmesh.sdk.admin.searches",
    "SendContext": "mqmesh.sdk.hooks",
    "SendFuture": "mqmesh.sdk.producer.send_result",
    "SendResult": "mqmesh.sdk.producer.send_result",
    "SendStatus": "mqmesh.protocol.messaging",
    "SimpleConsumer": "mqmesh.sdk.consumer.simple_consumer",
    "SimpleConsumerKeywords": "mqmesh.sdk.consumer.consumer_options",
    "SimpleConsumerOptions": "mqmesh.sdk.consumer.consumer_options",
    "StaleReceipt": "mqmesh.errors",
    "StoredMessage": "mqmesh.message",
    "TopicConfig": "mqmesh.protocol.route",
    "TableAdmin": "mqmesh.sdk.tables.table_admin",
    "TraceClient": "mqmesh.sdk.admin.traces",
    "TrackClient": "mqmesh.sdk.admin.tracks",
    "TransactionContext": "mqmesh.sdk.hooks",
    "TransactionAdmin": "mqmesh.sdk.admin.transaction_admin",
    "TransactionKeywords": "mqmesh.sdk.producer.producer_options",
    "TransactionListener": "mqmesh.sdk.transactions.transactions",
    "TransactionOptions": "mqmesh.sdk.producer.producer_options",
    "TransactionProducer": "mqmesh.sdk.transactions.transaction_producer",
    "is_request": "mqmesh.sdk.producer.replies",
    "run": "mqmesh.sdk.client.run",
}

__all__ = [
    "AccessClient",
    "AdminClient",
    "App",
    "BrokerAdmin",
    "ClusterAdmin",
    "JSON_CODEC",
    "MSGPACK_CODEC",
    "Codec",
    "ClientOptions",
    "ConsumeContext",
    "ConsumeFromWhere",
    "ConsumeResult",
    "DeadLetter",
    "DeadLetterClient",
    "DeadLetterFilter",
    "DelayClient",
    "GroupAdmin",
    "GroupConfig",
    "HaAdmin",
    "KeyValue",
    "KvEntry",
    "MemberClient",
    "NamesrvAdmin",
    "ProbeClient",
    "Hooks",
    "LocalTransactionState",
    "MQMeshError",
    "Message",
    "MessageModel",
    "MessageQueue",
    "MessageFilter",
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
    "Reject",
    "RevisionConflict",
    "ResendTarget",
    "ResetWhere",
    "ReplayClient",
    "SearchClient",
    "SendContext",
    "SendFuture",
    "SendResult",
    "SendStatus",
    "SimpleConsumer",
    "SimpleConsumerKeywords",
    "SimpleConsumerOptions",
    "StaleReceipt",
    "StoredMessage",
    "TopicConfig",
    "TableAdmin",
    "TraceClient",
    "TrackClient",
    "TransactionContext",
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
