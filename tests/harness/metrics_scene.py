"""A cluster in which everything happens that there is a metric for, and its exporter."""

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from harness.failovers import GROUP, ElectedGroup
from harness.patience import until
from mqmesh import (
    ClientOptions,
    ConsumeResult,
    LocalTransactionState,
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    TransactionListener,
    TransactionProducer,
)
from mqmesh.message import StoredMessage
from mqmesh.protocol.membership import MessageModel
from mqmesh.testing.processes import RoleProcess

TOPIC: Final = "orders"
STEPS: Final = "steps"
KINDS: Final = (
    "plain",
    "weak",  # its listener fails the first time
    "dead",  # its listener always fails
    "late",  # delayed
    "step",  # goes to another topic, to be consumed in order
    "commit",
    "rollback",
    "asked-commit",  # its producer knows only when it is asked
    "asked-rollback",
)
"""Kinds of messages."""
CONSUMED: Final = ("plain", "weak", "late", "commit", "asked-commit")
"""Kinds of messages of ``TOPIC`` that a listener finishes."""
PAUSE_S: Final = 0.02
DELAY_MS: Final = 200


class MetricsScene:
    """A group of two replicas, a schedule service, a coordinator, a name server, an exporter.

    Args:
        folder: For their data and logs.

    Attributes:
        group: The replicas; they elected their master.
        target: ``host:port`` of the exporter.
    """

    def __init__(self, folder: Path) -> None:
        self._closing = ExitStack()
        try:
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        self.group = ElectedGroup(
            folder,
            count=2,
            ha__min_in_sync_replicas="1",
            message_delay_level="1s 1s 1s",
            transaction_timeout_ms="100",
            transaction_check_interval_ms="100",
        )
        self._closing.callback(self.group.close)
        namesrv = f'["{self.group.namesrv.endpoint}"]'
        settings = {
            "namesrv_addr": namesrv,
            "store_path_root_dir": str(folder / "schedule"),
        }
        schedule = self._run("schedule", settings, folder)
        settings = {
            "listen_port": "0",
            "namesrv_addr": namesrv,
            "other_addr": f'["{schedule.endpoint}", "{self.group.coordinator.endpoint}"]',
            "min_interval_ms": "0",
        }
        exporter = self._run("exporter", settings, folder)
        self._page = exporter.endpoint
        self.target = exporter.endpoint.removeprefix("http://").removesuffix("/metrics")

    def _run(self, role: str, settings: dict[str, str], folder: Path) -> RoleProcess:
        process = RoleProcess(role, settings, folder / f"{role}.log")
        self._closing.callback(process.stop)
        return process

    @property
    def namesrv_addr(self) -> str:
        """Address of the name server, as clients take it."""
        return self.group.namesrv.endpoint

    @property
    def master(self) -> str:
        """Name of the leading replica in the exporter."""
        return f"{GROUP}-r{self.group.master()}"

    def kill_follower(self) -> None:
        """Kills the replica that does not lead."""
        (follower,) = self.group.replicas.keys() - {self.group.master()}
        self.group.replicas[follower].kill()

    def page(self) -> str:
        """Returns the exporter's page."""
        with urlopen(self._page) as answer:
            text: bytes = answer.read()
        return text.decode()

    def close(self) -> None:
        """Ends all."""
        self._closing.close()


class MetricsTraffic(TransactionListener):
    """Clients of all kinds, that go on until ``finish``.

    Args:
        namesrv_addr: Name server.
        folder: For offsets that clients keep.
    """

    def __init__(self, namesrv_addr: str, folder: Path) -> None:
        self._events: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go_on, name="traffic")
        self._closing = ExitStack()
        client = ClientOptions(namesrv_addr=namesrv_addr, heartbeat_broker_interval_ms=1_000)
        first: dict[str, Any] = {"client": client, "consume_from_where": "FIRST_OFFSET"}
        enter = self._closing.enter_context
        self._producer = enter(Producer("shop", client=client))
        self._payer = enter(TransactionProducer("pay", self, client=client))
        billing = PushConsumer("billing", max_reconsume_times=1, **first)
        billing.subscribe(TOPIC, listener=self._bill)
        audit = PushConsumer(
            "audit", message_model=MessageModel.BROADCASTING, offsets_dir=str(folder), **first
        )
        audit.subscribe(TOPIC, listener=self._note_all)
        packing = PushConsumer("packing", consume_orderly=True, **first)
        packing.subscribe(STEPS, listener=self._note_all)
        for consumer in billing, audit, packing:
            enter(consumer)
        self._slow = enter(PullConsumer("slow", auto_commit=False, **first))
        self._slow.subscribe(TOPIC)
        self._thread.start()

    def counts(self) -> Counter[str]:
        """Counts events that clients saw: ``sent`` or ``done``, and the kind."""
        return Counter(self._events)

    def finish(self) -> Counter[str]:
        """Sends no more, and waits until all is done that will be.

        Returns:
            The events.
        """
        self._stop.set()
        self._thread.join()
        until(self._is_done)
        return self.counts()

    def close(self) -> None:
        """Closes all clients; idempotent."""
        self._stop.set()
        self._thread.join()
        self._closing.close()

    def execute_local_transaction(self, message: Message, argument: Any) -> LocalTransactionState:
        """Implement ``TransactionListener``."""
        known = {
            "commit": LocalTransactionState.COMMIT,
            "rollback": LocalTransactionState.ROLLBACK,
        }
        return known.get(message.body.decode(), LocalTransactionState.UNKNOWN)

    def check_local_transaction(self, message: StoredMessage) -> LocalTransactionState:
        """Implement ``TransactionListener``."""
        kind = message.body.decode()
        self._events.append(f"checked {kind}")
        # A busy broker also asks about one whose decision is on its way: the same one again.
        is_done = kind.endswith("commit")
        return LocalTransactionState.COMMIT if is_done else LocalTransactionState.ROLLBACK

    def _go_on(self) -> None:
        for kind in itertools.cycle(KINDS):
            if self._stop.wait(PAUSE_S):
                return
            message = Message(STEPS if kind == "step" else TOPIC, kind.encode())
            if kind.endswith(("commit", "rollback")):
                self._payer.send_message_in_transaction(message)
            else:
                self._producer.send(message.delayed_by(DELAY_MS) if kind == "late" else message)
            self._events.append(f"sent {kind}")
            self._slow.poll(timeout_ms=0)

    def _bill(self, messages: Sequence[StoredMessage]) -> ConsumeResult | None:
        (message,) = messages
        kind = message.body.decode()
        if kind == "dead" or (kind == "weak" and not message.reconsume_times):
            self._events.append(f"failed {kind}")
            return ConsumeResult.RECONSUME_LATER
        self._events.append(f"done {kind}")
        return None

    def _note_all(self, messages: Sequence[StoredMessage]) -> None:
        for message in messages:
            self._events.append(f"noted {message.body.decode()}")

    def _is_done(self) -> bool:
        seen = self.counts()
        return (
            all(seen[f"done {kind}"] >= seen[f"sent {kind}"] for kind in CONSUMED)
            and seen["failed dead"] >= 2 * seen["sent dead"]
            and seen["noted step"] >= seen["sent step"]
            and seen["checked asked-rollback"] >= seen["sent asked-rollback"]
        )
