"""Transactions for asyncio programs."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Unpack, cast

from mqmesh.errors import ClientClosed, InvalidArgument
from mqmesh.message import Message, MessageQueue, StoredMessage
from mqmesh.sdk.aio.producer import Producer
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr
from mqmesh.sdk.hooks import Hooks
from mqmesh.sdk.producer.producer import Producer as BlockingProducer
from mqmesh.sdk.producer.producer_options import ProducerKeywords, TransactionKeywords
from mqmesh.sdk.producer.queue_selector import QueueSelector
from mqmesh.sdk.producer.send_result import SendResult
from mqmesh.sdk.transactions.transaction_producer import Transaction as BlockingTransaction
from mqmesh.sdk.transactions.transaction_producer import (
    TransactionProducer as BlockingTransactionProducer,
)
from mqmesh.sdk.transactions.transactions import (
    LocalTransactionState,
    TransactionSendResult,
)
from mqmesh.sdk.transactions.transactions import TransactionListener as BlockingTransactionListener
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport

METHODS: Final = ("execute_local_transaction", "check_local_transaction")


class TransactionListener(ABC):
    """The local side of transactions, as coroutines; as ``mqmesh.TransactionListener``."""

    @abstractmethod
    async def execute_local_transaction(
        self, message: StoredMessage, arg: Any
    ) -> LocalTransactionState:
        """Runs the local transaction; the half message is stored."""

    @abstractmethod
    async def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        """Returns how the local transaction of a message ended, when the broker asks."""


class _TransactionBridge(BlockingTransactionListener):
    """Bridge to a coroutine listener: it runs in its event loop, the producer's threads wait."""

    def __init__(self, listener: TransactionListener) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self._listener = listener

    def execute_local_transaction(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        return self._wait(self._listener.execute_local_transaction(message, arg))

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        return self._wait(self._listener.check_local_transaction(message))

    def _wait(self, work: Coroutine[Any, Any, LocalTransactionState]) -> LocalTransactionState:
        if self.loop is None or self.loop.is_closed():
            work.close()
            raise ClientClosed("the event loop of the listener is closed")
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


class Transaction:
    """One transaction, within ``async with producer.transaction(message)``.

    Attributes:
        message: The message, with its id.
        send_result: Of the half message.
    """

    def __init__(self, inner: BlockingTransaction) -> None:
        self._inner = inner
        self.message: StoredMessage = inner.message
        self.send_result: SendResult = inner.send_result

    @property
    def message_id(self) -> str:
        """Id of the message, before and after its commit."""
        return self._inner.message_id

    @property
    def is_ended(self) -> bool:
        """The broker has the decision."""
        return self._inner.is_ended

    async def commit(self) -> None:
        """Commits the transaction; errors as of ``mqmesh``'s."""
        await asyncio.to_thread(self._inner.commit)

    async def rollback(self) -> None:
        """Rolls the transaction back: no consumer sees the message; errors as of ``commit``."""
        await asyncio.to_thread(self._inner.rollback)


class TransactionProducer(Producer):
    """Transaction producer for coroutines; as ``mqmesh.TransactionProducer``.

    The listener's coroutines run in the event loop that ``start`` was awaited in. While that
    loop does something else for long, or has ended, check-backs have no answer, and the broker
    asks another member of the group, or again later.

    Args:
        group, namesrv_addr, credentials, namespace, client, transport, hooks, options: As for
            ``mqmesh.TransactionProducer``.
        listener: Has coroutine methods ``execute_local_transaction`` and
            ``check_local_transaction``.

    Raises:
        InvalidArgument: As there, or the listener's methods are no coroutine functions.
    """

    def __init__(
        self,
        group: str,
        listener: TransactionListener,
        *,
        namesrv_addr: NamesrvAddr | None = None,
        credentials: str | Credentials | None = None,
        namespace: str | None = None,
        client: ClientOptions | None = None,
        transport: Transport | None = None,
        hooks: Sequence[Hooks] = (),
        **options: Unpack[TransactionKeywords],
    ) -> None:
        if not all(asyncio.iscoroutinefunction(getattr(listener, name, None)) for name in METHODS):
            raise InvalidArgument(f"listener needs coroutine methods {' and '.join(METHODS)}")
        self._bridge = _TransactionBridge(listener)
        common = cast("ProducerKeywords", options)  # _make takes the others, too
        super().__init__(
            group,
            namesrv_addr=namesrv_addr,
            credentials=credentials,
            namespace=namespace,
            client=client,
            transport=transport,
            hooks=hooks,
            **common,
        )

    def _make(self, group: str, **options: Any) -> BlockingProducer:
        self._transactions = BlockingTransactionProducer(group, self._bridge, **options)
        return self._transactions

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._bridge.loop = loop  # before the start, because check-backs come from then on

    async def send_message_in_transaction(
        self,
        message: Message,
        arg: Any = None,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        selector_arg: Any = None,
        priority: int | None = None,
        timeout_ms: int | None = None,
    ) -> TransactionSendResult:
        """Stores a half message, runs the local transaction, and ends both; as ``mqmesh``'s."""
        completions = self._here()
        waiting = completions.new_future()
        future = await asyncio.to_thread(
            self._transactions.send_message_in_transaction_async,
            message,
            arg,
            queue=queue,
            selector=selector,
            selector_arg=selector_arg,
            priority=priority,
            timeout_ms=timeout_ms,
        )
        future.add_done_callback(lambda _: completions.add(waiting))
        await waiting
        return future.result()

    @asynccontextmanager
    async def transaction(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        selector_arg: Any = None,
        priority: int | None = None,
        timeout_ms: int | None = None,
    ) -> AsyncIterator[Transaction]:
        """Run a local transaction in a block: commit at its end, roll back when it raises.

        ::

            async with producer.transaction(Message("orders", body)) as tx:
                await database.execute(…, tx.message_id)

        When the task is cancelled in the block, the message is left to the check-back. Arguments
        and errors are those of ``mqmesh.TransactionProducer.transaction``.
        """
        inner = await asyncio.to_thread(
            self._transactions.transaction,
            message,
            queue=queue,
            selector=selector,
            selector_arg=selector_arg,
            priority=priority,
            timeout_ms=timeout_ms,
        )
        await asyncio.to_thread(inner.__enter__)
        try:
            yield Transaction(inner)
        except GeneratorExit:
            raise  # nothing can be awaited any more; the check-back decides
        except BaseException as error:
            await asyncio.to_thread(inner.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(inner.__exit__, None, None, None)
