"""Every error that mqmesh raises on purpose.

The tree, by what the reader should do::

    MQMeshError
    ├── ConfigError                  fix the configuration or the argument
    │   └── InvalidArgument          a name, body, property or option out of bounds
    ├── ProtocolError                bytes that break a format
    │   ├── LocalProtocolError       we were about to send them
    │   └── RemoteProtocolError      the peer sent them
    │       └── CorruptBatch         a record batch that fails its own checks
    │           └── UndecodableMessages  seek beyond them to go on
    ├── TransportError               the way to the peer
    │   ├── RequestTimeout           no answer in time; the outcome is unknown
    │   ├── EndpointUnreachable      no connection
    │   ├── AuthenticationFailed     the server or the client is not who the other one trusts
    │   ├── TooManyOpenFiles         the process or the system is out of descriptors
    │   └── QueueFull                a bounded queue of this process is full
    ├── StorageError                 the store on disk
    │   ├── CorruptRecord            damage below the synced mark
    │   ├── OffsetOutOfRange         before the first or behind the last offset
    │   ├── DiskFull                 no room, or past the mark that refuses writes
    │   ├── TooManyOpenFiles         the process or the system is out of descriptors
    │   ├── StoreLocked              another process has this store open
    │   └── StoreClosed              used after close, or stopped by a sync error
    ├── BrokerError                  a broker or name server refused; carries its code
    │   ├── TopicNotFound, NoPermission, MessageIllegal, SystemBusy, GroupNotFound,
    │   ├── UnsupportedCommand, OffsetIllegal, ClientNotOnline,
    │   ├── StaleGeneration, StaleReceipt, FilterFailed, FilterUnknown, CancelRefused,
    │   ├── SequenceConflict, RevisionConflict, StaleEpoch
    │   └── BrokerNotAvailable
    │       └── NotMaster            only the group's master does it
    └── ClientError                  the SDK itself
        ├── NoRoute                  no name server knows a writable queue of the topic
        ├── TransactionConflict      a transaction had ended the other way before
        ├── SendInDoubt              it is unknown for good whether a send is stored
        ├── ClientClosed             used after close
        └── Reject                   raised by a listener: no retry helps this message

A ``retriable`` error may go away when the same call is made again.
"""

from typing import ClassVar


class MQMeshError(Exception):
    """Base of every error that mqmesh raises on purpose.

    Attributes:
        retriable: True when the same call may succeed later.
    """

    retriable: ClassVar[bool] = False


class ConfigError(MQMeshError):
    """Raised when a configuration file, option or argument cannot be used."""


class InvalidArgument(ConfigError, ValueError):
    """Raised when a value given to the SDK is outside its documented bounds."""


class ProtocolError(MQMeshError):
    """Raised when bytes break a format."""


class LocalProtocolError(ProtocolError):
    """Raised when we were about to send something illegal."""


class RemoteProtocolError(ProtocolError):
    """Raised when a peer sent something illegal."""


class CorruptBatch(RemoteProtocolError):
    """Raised when bytes that should be a record batch fail a check."""


class UndecodableMessages(CorruptBatch):
    """Raised when a poll comes to stored messages that cannot be decoded.

    Attributes:
        topic: Where they stand.
        broker_name: And on which broker group.
        queue_id: And in which of its queues.
        queue_offset: First of them.
        next_offset: Behind the last: ``seek`` there to pass them over.
    """

    def __init__(
        self,
        message: str,
        *,
        topic: str = "",
        broker_name: str = "",
        queue_id: int = -1,
        queue_offset: int = -1,
        next_offset: int = -1,
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.broker_name = broker_name
        self.queue_id = queue_id
        self.queue_offset = queue_offset
        self.next_offset = next_offset


class TransportError(MQMeshError):
    """Raised when the way to a peer failed."""

    retriable = True


class RequestTimeout(TransportError):
    """Raised when no answer came in time; whether the request was carried out is unknown."""


class EndpointUnreachable(TransportError):
    """Raised when there is no connection to an endpoint, or it broke under a request.

    Attributes:
        is_known: The message has the reason.
    """

    is_known = False


class AuthenticationFailed(TransportError):
    """Raised when a server does not accept the client's key, or has not the key it should have.

    Also when one of both speaks CURVE and the other does not. The message says which.
    """

    retriable = False


class QueueFull(TransportError):
    """Raised when a bounded queue of this process is full; slow down and try again."""


class StorageError(MQMeshError):
    """Raised when the store cannot carry out an operation."""


class CorruptRecord(StorageError):
    """Raised when a record below the synced mark fails its checks."""


class OffsetOutOfRange(StorageError):
    """Raised when an offset lies before the first or behind the last stored one."""


class DiskFull(StorageError):
    """Raised when there is no room to write; reads, commits and deletes go on."""

    retriable = True


class TooManyOpenFiles(StorageError, TransportError):
    """Raised when a file or a socket cannot be opened for want of descriptors; nothing was changed.

    The limit of a process is ``ulimit -n``, and ``LimitNOFILE`` of systemd.
    """

    retriable = True


class StoreLocked(StorageError):
    """Raised when another process has the store open."""


class StoreClosed(StorageError):
    """Raised when a store is used after it was closed, or after a failed sync stopped it."""


class BrokerError(MQMeshError):
    """Raised when a broker or name server refused a request.

    Args:
        remark: The server's sentence.
        code: The response code, see ``mqmesh.protocol.codes.ResponseCode``.
        retry_after_ms: How long to wait before trying again, 0 when unsaid.
    """

    code: int = 1

    def __init__(self, remark: str, *, code: int | None = None, retry_after_ms: int = 0) -> None:
        super().__init__(remark)
        self.remark = remark
        self.retry_after_ms = retry_after_ms
        if code is not None:
            self.code = code


class TopicNotFound(BrokerError):
    """Raised when the topic does not exist and may not be created automatically."""


class GroupNotFound(BrokerError):
    """Raised when the consumer group is unknown to the broker."""


class NoPermission(BrokerError):
    """Raised when the topic, group or broker does not permit the operation."""


class MessageIllegal(BrokerError):
    """Raised when a topic name, message or batch is outside the broker's limits."""


class UnsupportedCommand(BrokerError):
    """Raised when the server does not know the command or its version."""


class OffsetIllegal(BrokerError):
    """Raised when an offset lies outside of the queue's bounds."""


class StaleGeneration(BrokerError):
    """Raised when a member of a group was replaced, or is not (any more) known as one."""


class StaleReceipt(BrokerError):
    """Raised when a consumer settles a message that another consumer has received meanwhile."""


class SystemBusy(BrokerError):
    """Raised when the broker refuses for flow control; honour ``retry_after_ms``."""

    retriable = True


class BrokerNotAvailable(BrokerError):
    """Raised when the broker is stopping, recovering, or out of disk space."""

    retriable = True


class NotMaster(BrokerNotAvailable):
    """Raised when a replica of a broker group got a request that only its master serves.

    A send that fails with it may be stored: a deposed master gives this answer to the sends that
    are still waiting.

    Args:
        remark: The server's sentence.
        code: The response code.
        retry_after_ms: How long to wait before trying again, 0 when unsaid.
        epoch: Newest epoch of the group that the replica knows, 0 for none.
        master: Address of the group's master, ``host:port``; "" if the replica does not know it.
    """

    def __init__(
        self,
        remark: str,
        *,
        code: int | None = None,
        retry_after_ms: int = 0,
        epoch: int = 0,
        master: str = "",
    ) -> None:
        super().__init__(remark, code=code, retry_after_ms=retry_after_ms)
        self.epoch = epoch
        self.master = master


class StaleEpoch(BrokerError):
    """Raised when a replica of a broker group speaks of an epoch that is over."""


class ClientNotOnline(BrokerError):
    """Raised when a client that should get a reply is not connected to the broker, now."""

    retriable = True


class FilterFailed(BrokerError):
    """Raised when a Python filter raised, or was ended; its subscription waits, nothing is lost."""

    retriable = True


class FilterUnknown(BrokerError):
    """Raised when a filter server does not have a filter (any more); upload it."""

    retriable = True


class CancelRefused(BrokerError):
    """Raised when a delayed message cannot be cancelled: it is unknown, delivered or cancelled."""


class SequenceConflict(BrokerError):
    """Raised when other messages are stored under the ids of the ones that were sent.

    The ones sent are not stored. Two processes that run as one producer do this to each other, for
    example after a virtual machine was cloned: make a new producer in one of them.
    """


class RevisionConflict(BrokerError):
    """Raised when a key of a table has another newest revision than a write expected.

    Nothing was stored. Read the value again, and decide anew.

    Args:
        remark: The server's sentence.
        code: The response code.
        retry_after_ms: How long to wait before trying again, 0 when unsaid.
        revision: The newest revision of the key; 0 for a key that was never there, or whose
            tombstone is gone. A key that was deleted has the revision of its tombstone.
    """

    def __init__(
        self,
        remark: str,
        *,
        code: int | None = None,
        retry_after_ms: int = 0,
        revision: int = 0,
    ) -> None:
        super().__init__(remark, code=code, retry_after_ms=retry_after_ms)
        self.revision = revision


class ClientError(MQMeshError):
    """Raised when the SDK cannot go on by itself."""


class NoRoute(ClientError):
    """Raised when no name server knows a usable queue of the topic."""

    retriable = True


class TransactionConflict(ClientError):
    """Raised when a transaction cannot end as it should, because it has ended otherwise before."""


class SendInDoubt(ClientError):
    """Raised when it can no longer be found out whether a send is stored.

    There are two causes. The send may be old: the broker has forgotten its producer, and the part
    of the log that may hold its messages was removed by retention, or may not be read. Or the send
    has outputs of processed messages, and no broker answered while the consumer held these
    messages: the outputs are stored if, and only if, the messages are not delivered again.
    """


class ClientClosed(ClientError):
    """Raised when a producer or consumer is used before start or after close."""


class Reject(ClientError):
    """Raised when a listener rejects a message, which becomes a dead letter at once.

    The text of the error travels with the message. In a call with several messages it counts as
    any other failure: the messages are redelivered one by one, so that the listener can reject the
    one that it means.
    """
