"""Producer of messages that go out only if a local transaction succeeds."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack, cast

from mqmesh.errors import (
    BrokerNotAvailable,
    ClientClosed,
    InvalidArgument,
    MQMeshError,
    QueueFull,
)
from mqmesh.failure_text import error_to_log
from mqmesh.message import (
    TRANS_HALF_TOPIC,
    Message,
    MessageQueue,
    StoredMessage,
)
from mqmesh.message_checks import check_messages
from mqmesh.producer_key import new_key
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.transactions import Decision, EndOutcome
from mqmesh.sdk.client.lock_order import LockRank, ranked_lock
from mqmesh.sdk.client.options import ClientOptions, NamesrvAddr
from mqmesh.sdk.hooks import Hooks
from mqmesh.sdk.producer.lanes import GRACE_MS
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.producer_options import (
    ProducerKeywords,
    TransactionKeywords,
    TransactionOptions,
)
from mqmesh.sdk.producer.queue_selector import QueueSelector
from mqmesh.sdk.producer.send_result import SendFuture, SendResult
from mqmesh.sdk.transactions.half_sender import HalfCodec, HalfSender
from mqmesh.sdk.transactions.listener_pool import ListenerPool
from mqmesh.sdk.transactions.transaction_checks import CheckService, PlaceKey
from mqmesh.sdk.transactions.transaction_ends import (
    EndSender,
    HalfPlace,
    OnEnded,
    hooked_end,
    no_hooks,
)
from mqmesh.sdk.transactions.transactions import (
    DECISION_OF,
    LocalTransactionState,
    TransactionFuture,
    TransactionListener,
    TransactionSendResult,
    is_safe,
    judge_end,
    local_message,
)
from mqmesh.security.keys import Credentials
from mqmesh.transport.interface import Transport

_log = logging.getLogger(__name__)


class TransactionProducer(Producer):
    """Producer of messages that consumers see exactly if a local transaction succeeds.

    First the message is stored where no consumer sees it (a *half message*), then the local
    transaction runs, then the message is committed or rolled back. When the producer dies in
    between, or the decision is lost, the broker asks any living member of the producer group
    how the transaction ended, so all members need a listener that can answer. Plain messages
    may be sent, too.

    Args:
        group: Producer group; its members share the transactions.
        listener: Runs and checks local transactions.
        namesrv_addr, credentials, namespace, client, transport, hooks: As for ``Producer``.
        options: Fields of ``TransactionOptions``, by name.

    Raises:
        InvalidArgument: A name or an option is out of bounds.
    """

    _options_type = TransactionOptions

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
        if not callable(getattr(listener, "check_local_transaction", None)) or not callable(
            getattr(listener, "execute_local_transaction", None)
        ):
            raise InvalidArgument("listener must be a TransactionListener")
        self._listener = listener
        common = cast("ProducerKeywords", options)  # the others are of _options_type
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

    def _make_parts(self) -> None:
        super()._make_parts()
        one = self.options
        assert isinstance(one, TransactionOptions)
        codec = HalfCodec(
            new_key(self._engine.transport.random),
            one.compress_msg_body_over_how_much,
            self._hooks,
            self._tracing.message_trace,
            self.group,
            self._engine.namespace,
        )
        self._halves = HalfSender(self._engine, one, codec)
        self._ends = EndSender(self._engine, self.group)
        self._executors = self._make_pool("mqmesh-transaction", one.execute_thread_count)
        self._checkers = self._make_pool("mqmesh-check-back", one.check_thread_pool_max_size)
        self._checks = CheckService(
            self.group,
            self._listener.check_local_transaction,
            self._ends,
            self._checkers,
            self._engine.loop.clock,
            self._hooks,
            self._engine.namespace,
        )
        self._commands[RequestCode.CHECK_TRANSACTION_STATE] = self._checks.on_question
        transport = self._engine.transport
        self._lock = ranked_lock(LockRank.TRANSACTIONS)
        self._open: dict[TransactionFuture, None] = {}
        self._most_open = one.max_transactions_in_flight
        self._room = transport.condition(self._lock)

    def _make_pool(self, name: str, most: int) -> ListenerPool:
        return ListenerPool(name, most, self._engine.loop)

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> None:
        """Connects, also to every broker that holds half messages: it may want to ask.

        Raises:
            ClientClosed, TooManyOpenFiles: As for ``Producer.start``.
        """
        is_new = self._state != "running"
        super().start()
        if is_new:
            self._engine.post(self._begin)

    def _begin(self) -> None:
        self._engine.finder.find(TRANS_HALF_TOPIC, self._meet)

    def close(self) -> None:
        """Waits up to ``close_timeout_ms`` for transactions under way, then closes; idempotent.

        The broker sends checks for transactions that are not decided by then.
        """
        if self._state == "running" and not self._engine.loop.in_loop_thread:
            with self._room:
                timeout_s = self.options.close_timeout_ms / 1_000
                self._room.wait_for(lambda: not self._open, timeout_s)
        self._executors.close()
        self._checkers.close()
        super().close()

    # ---- Sending ---------------------------------------------------------------------

    def send_message_in_transaction(
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
        """Stores a half message, runs the local transaction in this thread, and ends both.

        Args:
            message: Message to send; it cannot be delayed.
            arg: For ``execute_local_transaction``.
            queue, selector, selector_arg, priority: As ``queue``, ``selector``, ``arg`` and
                ``priority`` of ``send``.
            timeout_ms: For the half message, and again for the decision; in place of
                ``send_msg_timeout_ms``.

        Returns:
            How it ended; a decision that did not reach the broker is no error, because the
            broker asks back.

        Raises:
            TransactionConflict: The transaction had ended the other way before.
            MQMeshError: As for ``send``: the half message was not stored, and the local
                transaction was not run.
        """
        transaction = self.transaction(
            message,
            queue=queue,
            selector=selector,
            selector_arg=selector_arg,
            priority=priority,
            timeout_ms=timeout_ms,
        )
        state = LocalTransactionState.ROLLBACK
        if transaction.is_safe:
            with transaction.running():
                state = self._execute(transaction.message, arg)
        decision = DECISION_OF.get(state)
        if decision is not None:
            transaction.end(decision)
        return TransactionSendResult(transaction.send_result, state, transaction.is_ended)

    def transaction(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        selector_arg: Any = None,
        priority: int | None = None,
        timeout_ms: int | None = None,
    ) -> "Transaction":
        """Stores a half message; ``with`` it the local transaction is run.

        ::

            with producer.transaction(Message("orders", body, keys=[order_id])) as tx:
                with database:  # commits
                    database.execute(…, tx.message_id)

        At the end of the block the message is committed, or rolled back when the block raised
        an ``Exception``. After an interrupt (Ctrl-C, SystemExit) it is left to the check-back,
        because it is not known how far the block came.

        Args, Raises: As for ``send_message_in_transaction``.
        """
        self._check_blocking()
        checked = self._check(message)
        wait_ms = self.options.send_msg_timeout_ms if timeout_ms is None else timeout_ms
        deadline_ms = self._deadline(timeout_ms)
        future = self._halves.append(
            checked,
            deadline_ms,
            None,
            queue=queue,
            selector=selector,
            arg=selector_arg,
            priority=priority,
        )
        left_ms = max(deadline_ms - self._now_ms(), 0) + GRACE_MS
        result = future.result(left_ms / 1_000)
        return Transaction(
            self, checked, result, place_of(future, self._halves.key), future.index, wait_ms
        )

    def send_message_in_transaction_async(
        self,
        message: Message,
        arg: Any = None,
        on_done: Callable[[TransactionFuture], None] | None = None,
        *,
        queue: MessageQueue | None = None,
        selector: QueueSelector | None = None,
        selector_arg: Any = None,
        priority: int | None = None,
        timeout_ms: int | None = None,
    ) -> TransactionFuture:
        """Does the same as ``send_message_in_transaction`` in a thread of the producer.

        Half messages and decisions of transactions that are in flight together share requests.

        Args:
            message: Message to send; must not be changed afterwards.
            arg, queue, selector, selector_arg, priority, timeout_ms: As for
                ``send_message_in_transaction``.
            on_done: Called with the future when it is done; must not block.

        Raises:
            InvalidArgument, NoRoute, ClientClosed: As for ``send_async``.
            QueueFull: Too many are in flight, for longer than the timeout; at once in a callback.
        """
        if self._state != "running":
            self._refuse()
        message = self._check(message)
        deadline_ms = self._deadline(timeout_ms)
        future = TransactionFuture(self._lock, self._engine.transport.flag, message, arg)
        if on_done is not None:
            future.add_done_callback(on_done)
        self._enter(future, deadline_ms)
        try:
            self._halves.append(
                message,
                deadline_ms,
                partial(self._half_sent, future),
                queue=queue,
                selector=selector,
                arg=selector_arg,
                priority=priority,
            )
        except BaseException:
            self._leave(future)
            raise
        return future

    # ---- Inner part ------------------------------------------------------------------

    def end(
        self,
        message: StoredMessage,
        place: HalfPlace,
        ordinal: int,
        decision: Decision,
        timeout_ms: int,
    ) -> EndOutcome | MQMeshError:
        """Sends a decision and waits for its outcome; for ``Transaction``."""
        run_hooks = hooked_end(self._hooks, message, decision, self._engine.loop.clock)
        outcome = self._end_and_wait(place, ordinal, decision, timeout_ms)
        run_hooks(outcome)
        return outcome

    def _end_and_wait(
        self, place: HalfPlace, ordinal: int, decision: Decision, timeout_ms: int
    ) -> EndOutcome | MQMeshError:
        done = self._engine.transport.flag()
        outcomes: list[EndOutcome | MQMeshError] = []

        def on_ended(outcome: EndOutcome | MQMeshError) -> None:
            outcomes.append(outcome)
            done.set()

        try:
            self._ends.add(place, ordinal, decision, self._now_ms() + timeout_ms, on_ended)
        except ClientClosed as error:
            return error
        if not done.wait((timeout_ms + GRACE_MS) / 1_000):
            return QueueFull("no outcome of the decision in time")
        return outcomes[0]

    @contextmanager
    def running(self, place: HalfPlace, ordinal: int) -> Iterator[None]:
        """Mark a local transaction as running here: no check asks its listener meanwhile."""
        key = _key_of(place, ordinal)
        self._checks.running.add(key)
        try:
            yield
        finally:
            self._checks.running.discard(key)

    def _check(self, message: Message) -> Message:
        (checked,) = check_messages((message,), max_message_size=self._max_message_size)
        if checked.delay_level or checked.deliver_at_ms:
            raise InvalidArgument("a message in a transaction cannot be delayed")
        return checked

    def _enter(self, future: TransactionFuture, deadline_ms: int) -> None:
        with self._room:
            if not self._has_room():
                left_ms = max(deadline_ms - self._now_ms(), 0)
                if self._engine.loop.in_loop_thread or not self._room.wait_for(
                    self._has_room, left_ms / 1_000
                ):
                    raise QueueFull(
                        f"{self._most_open} transactions are in flight, no more may be "
                        "(max_transactions_in_flight)"
                    )
            self._open[future] = None

    def _has_room(self) -> bool:
        return len(self._open) < self._most_open

    def _leave(self, future: TransactionFuture) -> None:
        with self._room:
            self._open.pop(future, None)
            self._room.notify_all()

    def _half_sent(self, future: TransactionFuture, sent: SendFuture) -> None:
        error = sent.exception()
        if error is not None:
            self._finish(future, None, error)
            return
        future.sent = result = sent.result()
        if is_safe(result):
            # It may wait for a thread for long: already now the listener could only guess.
            self._checks.running.add(_key_of(place_of(sent, self._halves.key), sent.index))
            self._executors.submit(partial(self._run, future, sent))
        else:
            future.state = LocalTransactionState.ROLLBACK
            self._end(future, sent, Decision.ROLLBACK)

    def _run(self, future: TransactionFuture, sent: SendFuture) -> None:
        assert future.sent is not None
        message = local_message(future.message, future.sent, self.group)
        try:
            with self.running(place_of(sent, self._halves.key), sent.index):
                future.state = self._execute(message, future.arg)
        except BaseException:
            # SystemExit, too, ends no more than this thread's call: callers need an outcome.
            self._finish(future, TransactionSendResult(future.sent, future.state, False), None)
            raise
        decision = DECISION_OF.get(future.state)
        if decision is None:
            self._finish(future, TransactionSendResult(future.sent, future.state, False), None)
        else:
            self._end(future, sent, decision)

    def _end(self, future: TransactionFuture, sent: SendFuture, decision: Decision) -> None:
        run_hooks: OnEnded = no_hooks
        if self._hooks is not None:
            assert future.sent is not None
            message = local_message(future.message, future.sent, self.group)
            run_hooks = hooked_end(self._hooks, message, decision, self._engine.loop.clock)
        ended = partial(self._ended_async, future, decision, run_hooks)
        try:
            self._ends.add(
                place_of(sent, self._halves.key),
                sent.index,
                decision,
                self._now_ms() + self._timeout_ms,
                ended,
            )
        except ClientClosed as error:
            ended(error)

    def _ended_async(
        self,
        future: TransactionFuture,
        decision: Decision,
        run_hooks: OnEnded,
        outcome: EndOutcome | MQMeshError,
    ) -> None:
        run_hooks(outcome)
        result = future.sent
        assert result is not None
        if outcome is EndOutcome.ENDED:
            self._finish(future, TransactionSendResult(result, future.state, True), None)
            return
        try:
            is_ended = judge_end(outcome, decision, result.message_id)
        except MQMeshError as error:
            self._finish(future, None, error)
        else:
            self._finish(future, TransactionSendResult(result, future.state, is_ended), None)

    def _finish(
        self,
        future: TransactionFuture,
        result: TransactionSendResult | None,
        error: MQMeshError | None,
    ) -> None:
        if future.finish(result, error):
            self._leave(future)

    def _execute(self, message: StoredMessage, arg: Any) -> LocalTransactionState:
        try:
            state = self._listener.execute_local_transaction(message, arg)
        except Exception:
            _log.error(
                "the local transaction of message %s failed",
                message.message_id,
                exc_info=error_to_log(),
            )
            return LocalTransactionState.UNKNOWN
        return state if isinstance(state, LocalTransactionState) else LocalTransactionState.UNKNOWN

    # ---- Events of the engine ------------------------------------------------------------

    def _meet(self, _outcome: object = None) -> None:
        # Brokers ask only clients that they know, and they know those that are connected.
        for broker_name in self._engine.routes.brokers_of(TRANS_HALF_TOPIC):
            try:
                self._engine.brokers.connection(broker_name)
            except MQMeshError as error:
                _log.debug("broker %s cannot be met yet: %s", broker_name, error)

    def _routes_changed(self, topics: set[str]) -> None:
        super()._routes_changed(topics)
        self._halves.routes.on_routes(topics)
        self._halves.sender.schedule()
        if TRANS_HALF_TOPIC in topics:
            self._meet()

    def _broker_changed(self, broker_name: str, up: bool) -> None:
        super()._broker_changed(broker_name, up)
        self._halves.sender.schedule()

    def _ended(self) -> None:
        super()._ended()
        closed = ClientClosed("the producer was closed before the transaction had ended")
        self._halves.sender.end_all(closed, f"half messages of group {self.group}")
        self._ends.end_all(closed)
        for future in list(self._open):
            self._finish(future, None, closed)


class Transaction:
    """Transaction of a ``TransactionProducer``; a context manager.

    Attributes:
        message: The message, with its id.
        send_result: Of the half message.
        is_ended: The broker has the decision.
    """

    def __init__(
        self,
        producer: TransactionProducer,
        message: Message,
        result: SendResult,
        place: HalfPlace,
        ordinal: int,
        timeout_ms: int,
    ) -> None:
        self._producer = producer
        self._place = place
        self._ordinal = ordinal
        self._timeout_ms = timeout_ms
        self._decision: Decision | None = None
        self.message = local_message(message, result, producer.group)
        self.send_result = result
        self.is_ended = False
        self._block = ExitStack()

    def running(self) -> AbstractContextManager[None]:
        """Mark the local transaction as running here: no check asks its listener meanwhile."""
        return self._producer.running(self._place, self._ordinal)

    @property
    def message_id(self) -> str:
        """Id of the message, before and after its commit."""
        return self.send_result.message_id

    @property
    def is_safe(self) -> bool:
        """The half message is as safe as the broker's mode promises."""
        return is_safe(self.send_result)

    def commit(self) -> None:
        """Commits the transaction: consumers get the message.

        Raises:
            TransactionConflict: It had ended otherwise before.
            InvalidArgument: It was ended otherwise here.
        """
        self.end(Decision.COMMIT)

    def rollback(self) -> None:
        """Rolls the transaction back: no consumer sees the message; errors as of ``commit``."""
        self.end(Decision.ROLLBACK)

    def end(self, decision: Decision) -> None:
        """Ends the transaction; see ``commit``. Doing it again does nothing."""
        if self._decision is not None:
            if self._decision is not decision:
                raise InvalidArgument(f"the transaction was ended by {self._decision.name} before")
            return
        self._decision = decision
        outcome = self._producer.end(
            self.message, self._place, self._ordinal, decision, self._timeout_ms
        )
        self.is_ended = judge_end(outcome, decision, self.message_id)

    def __enter__(self) -> Self:
        if not self.is_safe:
            self.rollback()
            raise BrokerNotAvailable(
                f"the half message is not safe yet ({self.send_result.status.name}); it was "
                "rolled back"
            )
        self._block.enter_context(self.running())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._block:
            if self._decision is not None:
                return
            if error is None:
                self.commit()
            elif isinstance(error, Exception):
                self.rollback()
            else:
                _log.warning("message %s is left to the check-back: %r", self.message_id, error)


def place_of(future: SendFuture, key: bytes) -> HalfPlace:
    """Return the place of a sent half batch; the key is its producer's."""
    batch = future.batch
    outcome = batch.outcome
    assert outcome is not None
    return HalfPlace(
        batch.queue.broker_name,
        outcome.base_queue_offset,
        batch.producer_id,
        batch.first_sequence,
        key,
    )


def _key_of(place: HalfPlace, ordinal: int) -> PlaceKey:
    return (place.broker_name, place.base_queue_offset, ordinal)
