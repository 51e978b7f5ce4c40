"""Members that make bills of orders and are killed, and the judgement: P15, each order once.

Two groups bill each order: in one members acknowledge each message, in the other they own queues.
"""

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from harness.checker import Report, Verdict
from harness.forks import Forks
from harness.patience import until
from mqmesh.errors import MQMeshError
from mqmesh.message import Message
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.groups import GroupConfig
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.sdk.consumer.pull_consumer import PullConsumer
from mqmesh.sdk.producer.producer import Producer
from mqmesh.testing.processes import ProcessCluster

ORDERS, BILLS = "orders", "bills"
EACH, OWNED = "each", "owned"
KINDS: Final = (EACH, OWNED)
MEMBERS: Final = 2
"""Members of each kind."""
QUEUES: Final = 4
BILLED_S: Final = 120.0
LOST_GRACE_MS: Final = 1_000
BROKER_SHARE: Final = 0.4
"""Share of the kills that hit the broker."""
ORDERS_A_ROUND: Final = 200
BILLED_A_ROUND: Final = 100


class Billing:
    """Members of both groups, each a process, and a reader of what they make.

    Args:
        namesrv_addr: Name server of a cluster with the topic of orders.
        orders: That topic.
        log: File for what members say.
        chance: Source of all choices.

    Attributes:
        found: How often a bill was read, by kind and number of its order.
    """

    def __init__(self, namesrv_addr: str, orders: str, log: Path, chance: random.Random) -> None:
        self.found: Counter[tuple[str, int]] = Counter()
        self._chance = chance
        self._counts: Counter[str] = Counter()
        with GroupAdmin(namesrv_addr) as admin:
            admin.create_topic(BILLS, queues=QUEUES)
            admin.put_group(
                GroupConfig(
                    EACH,
                    delivery=DeliveryMode.MESSAGE,
                    lost_grace_ms=LOST_GRACE_MS,
                    retry_delays="1s",
                    retry_max_times=1_000,
                )
            )
        self._forks = Forks("harness.processing_worker", namesrv_addr, orders, BILLS, log=log)
        self._members = {kind: [self._forks.start(kind) for _ in range(MEMBERS)] for kind in KINDS}
        self._reader = PullConsumer("audit", namesrv_addr=namesrv_addr, auto_commit=False)
        self._reader.start()
        self._reader.assign(self._reader.queues(BILLS))
        self._reader.seek_to_begin()

    def replace_one(self) -> None:
        """Kills a member, and starts another one."""
        kind = self._chance.choice(KINDS)
        os.kill(self._members[kind].pop(0), signal.SIGKILL)
        self._members[kind].append(self._forks.start(kind))

    def wait_billed(self, more: int) -> None:
        """Waits until each group has made so many more bills."""
        wanted = {kind: self._counts[kind] + more for kind in KINDS}
        self._until(lambda: all(self._counts[kind] >= count for kind, count in wanted.items()))

    def judge(self, sent: Iterable[int]) -> list[str]:
        """Waits until all orders are billed, and returns what is wrong."""
        wanted = {(kind, number) for kind in KINDS for number in sent}
        self._until(lambda: wanted <= self.found.keys())
        self._kill()
        left = sum(self._reader.lag().values())
        while left > 0:
            left -= self._read(5_000)
        return [
            f"{kind}: order {number} was billed {times} times"
            for (kind, number), times in self.found.items()
            if times > 1
        ]

    def close(self) -> None:
        """Ends all."""
        self._kill()
        self._forks.close()
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _kill(self) -> None:
        for members in self._members.values():
            while members:
                os.kill(members.pop(), signal.SIGKILL)

    def _until(self, condition: Callable[[], bool]) -> None:
        def look() -> bool:
            self._read(0)
            return condition()

        until(look, BILLED_S)

    def _read(self, wait_ms: int) -> int:
        some = self._reader.poll(wait_ms, 10_000)
        for message in some:
            kind, number = message.body.decode().split()
            self.found[kind, int(number)] += 1
            self._counts[kind] += 1
        return len(some)


def run_processing_rounds(
    cluster: ProcessCluster, log: Path, seed: int, rounds: int
) -> tuple[Report, Counter[str]]:
    """Kills the broker or a member in each round, while orders come; returns the kills, too."""
    chance, kills = random.Random(seed), Counter[str]()
    acked: list[int] = []
    with GroupAdmin(cluster.namesrv_addr) as admin:
        admin.create_topic(ORDERS, queues=QUEUES)
    with (
        Producer("shop", namesrv_addr=cluster.namesrv_addr, send_msg_timeout_ms=60_000) as producer,
        Billing(cluster.namesrv_addr, ORDERS, log, chance) as billing,
    ):
        for number in range(rounds):
            first = number * ORDERS_A_ROUND
            sends = {
                one: producer.send_async(Message(ORDERS, b"%d" % one))
                for one in range(first, first + ORDERS_A_ROUND)
            }
            billing.wait_billed(chance.randint(1, BILLED_A_ROUND))
            if chance.random() < BROKER_SHARE:
                kills["broker"] += 1
                cluster.brokers["broker-a"].kill()
                cluster.start_broker()
            else:
                kills["member"] += 1
                billing.replace_one()
            for one, future in sends.items():
                try:
                    future.result(60)
                    acked.append(one)
                except MQMeshError:
                    continue  # it is stored or not, and billed once or not
        wrong = billing.judge(acked)
        counts = {"acked": len(acked), "bills": billing.found.total()}
    return Report([Verdict("P15", wrong)], counts), kills
