"""One seed from beginning to end: a cluster, its clients, faults, and the judgement."""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from unittest import mock

import msgspec

from harness.history import Commit, Delivery
from harness.simulation.books import Books, delivery_of
from harness.simulation.faults import PROFILES, Faults
from harness.simulation.load import Client, SimulatedAdministrator, make_clients
from harness.simulation.secured import STRANGERS
from harness.simulation.strangers import Stranger
from harness.simulation.world import World
from mqmesh.errors import CorruptBatch, CorruptRecord
from mqmesh.host import ProcessMark
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.ha.member import group_member
from mqmesh.sdk.admin.admin import AdminClient
from mqmesh.sdk.client import options
from mqmesh.sdk.producer import batch_codec
from mqmesh.storage.commitlog import recovery

CALM_MS: Final = 3_000
HARM_MS: Final = 45_000
PATIENCE_MS: Final = 180_000
"""Time after all harm within which everything is served and delivered."""
REAL_EVERY: Final = 11
"""One seed of so many has real stores in place of light ones, whatever its faults."""
ADMINISTERED_EVERY: Final = 4
"""One seed of so many has an administrator who changes topics, groups and offsets."""
LEAST_MS: Final = 60_000
"""No seed is shorter."""
LOOK_MS: Final = 1_000
LEFT_LOOKS: Final = 20
LEFT_LOOK_MS: Final = 470
"""Number of checks, and time between them, that brokers hold nothing any more; not in step with
members that renew their locks each second."""
QUEUES: Final = 2
BROKERS: Final = ("broker-a", "broker-b")

Plant = Callable[["Run"], None]
"""Plants a bug, before anything is started."""


class Outcome(msgspec.Struct, frozen=True):
    """Result of a seed.

    Attributes:
        seed: Number of the seed.
        violations: Sentences, each beginning with its invariant; empty when all is well.
        simulated_ms: Simulated time that it took, in ms.
        events: Number of events.
        counts: Number of occurrences, by name.
        option: Option of ``scripts/simulate``, for seeds of another kind.
    """

    seed: int
    violations: list[str]
    simulated_ms: int
    events: int
    counts: dict[str, int]
    option: str = ""

    @property
    def replay(self) -> str:
        """Command that runs the seed again."""
        return f"scripts/simulate --seed {self.seed}{self.option}"


class Complaints(logging.Handler):
    """Errors that a recovery logs. A simulated disk keeps synced data: each is a bug of a store.

    Damaged data is made anew, so no other check would notice that it was not synced.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: dict[str, None] = {}
        self._log = logging.getLogger(recovery.__name__)
        self._before = self._log.level, self._log.propagate
        self._log.propagate = self._log.isEnabledFor(logging.ERROR)
        self._log.setLevel(logging.ERROR)
        self._log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Notes an error, whether somebody reads the log or not."""
        self.told[record.getMessage()] = None

    def close(self) -> None:
        """Removes the handler."""
        self._log.removeHandler(self)
        level, self._log.propagate = self._before
        self._log.setLevel(level)
        super().close()


class Run:
    """A seed's world while it runs.

    Args:
        seed: Decides everything.
        folder: For files of roles.
        secure: Clients without a key are refused, and strangers try.
    """

    option = ""

    def __init__(self, seed: int, folder: Path, *, secure: bool = False) -> None:
        self.seed = seed
        real_store = seed % REAL_EVERY == REAL_EVERY // 2
        self.world = World(
            seed, folder, sync_flush=seed // 3 % 2 == 0, real_store=real_store, secure=secure
        )
        self.strangers: list[Stranger] = []
        self.books = self._make_books()
        self.clients: list[Client] = []
        self._begun_ms = self.world.now_ms
        self._complaints = Complaints()

    @property
    def profile(self) -> dict[str, int] | None:
        """Frequency of each fault; None if all are alike."""
        return PROFILES[self.seed % len(PROFILES)]

    def go(self) -> Outcome:
        """Runs it."""
        world, books = self.world, self.books
        self._start()
        if world.access is not None:
            self.strangers = [Stranger(world, books, name) for name in STRANGERS]
        for stranger in self.strangers:
            stranger.start()
        faults = Faults(world, books, self.clients, HARM_MS, self.profile)
        world.simulation.run(CALM_MS)
        self._plan(faults)
        self._look()
        world.simulation.run(HARM_MS)
        faults.end()
        for client in self.clients:
            client.sending = False
        missing = self._drain()
        left = self._left()
        stored = self._stored()
        reports = books.judge(stored)
        found = [
            f"{verdict.invariant}: {sentence}"
            for report in reports
            for verdict in report.verdicts
            for sentence in verdict.violations
        ]
        found += [f"C11: not delivered after {PATIENCE_MS} ms: {what}" for what in missing]
        found += [f"C10: {what} while nothing is under way" for what in left]
        found += self._judged() + self._let_in()
        found += [f"C12: a store was not as it was synced: {it}" for it in self._complaints.told]
        if world.failures:
            found.append(f"bug: {world.failures} callbacks raised, see the log")
        counts = {
            **faults.counts,
            "messages": sum(len(one) for one in books.attempts.values()),
            "deliveries": sum(len(one) for one in books.deliveries.values()),
            **{f"refusals of {one.name}": one.refused for one in self.strangers},
        }
        return Outcome(
            self.seed,
            found,
            world.now_ms - self._begun_ms,
            world.simulation.event_count,
            counts,
            self.option + (" --secure" if world.access is not None else ""),
        )

    def close(self) -> None:
        """Releases what the roles hold."""
        self._complaints.close()
        for client in self.clients:
            client.transport.node.kill()
            client.abandon()
        for process in self.world.processes():
            process.release()
        for disk in self.world.disks.values():
            disk.release()

    def _make_books(self) -> Books:
        return Books(lambda: float(self.world.now_ms))

    def _make_clients(self) -> list[Client]:
        made = make_clients(self.world, self.books)
        if self.seed % ADMINISTERED_EVERY == ADMINISTERED_EVERY - 1:
            made.append(SimulatedAdministrator(self.world, self.books, "administrator"))
        return made

    def _plan(self, faults: Faults) -> None:
        faults.plan()

    def _let_in(self) -> list[str]:
        """Returns what strangers got in, and strangers that were never refused."""
        found = [what for stranger in self.strangers for what in stranger.wrong]
        for stranger in self.strangers:
            stranger.stop()
            if not stranger.refused:
                found.append(f"S1: {stranger.name} was never refused")
        return found

    def _judged(self) -> list[str]:
        """Returns faults that the histories do not show."""
        return []

    def _start(self) -> None:
        world = self.world
        world.add_namesrvs(2)
        for name in BROKERS:
            world.add_broker(name)
            world.add_schedule(name)
        for process in world.processes():
            process.start()
        world.simulation.run(1_000)
        with AdminClient(world.namesrv_addr, transport=world.transport("admin")) as admin:
            for topic in self.books.topics:
                admin.create_topic(topic, queues=QUEUES)
        self._start_clients()

    def _start_clients(self) -> None:
        world = self.world
        self.clients = self._make_clients()
        for client in self.clients:
            world.simulation.after(world.simulation.random.randrange(1_000), client.start)

    def _drain(self) -> list[str]:
        end_ms = self.world.now_ms + PATIENCE_MS
        # First of all, since what comes meanwhile may fail, and has to come again.
        self.world.simulation.run(max(self._begun_ms + LEAST_MS - self.world.now_ms, 0))
        while (missing := self.books.missing()) and self.world.now_ms < end_ms:
            self.world.simulation.run(2_000)
        return missing

    def _features(self) -> Iterator[tuple[str, BrokerFeatures]]:
        for name, process in self.world.brokers.items():
            role = process.server._role if process.up else None
            if role is not None and role.features is not None:
                yield name, role.features

    def _left(self) -> list[str]:
        """Returns what brokers still hold for clients, after the time that it needs to end."""
        for _ in range(LEFT_LOOKS):
            left = [
                f"{name} holds {count} {what}"
                for name, broker in self._features()
                for what, count in (
                    ("sends that wait", broker.core.commit_point.waiting_count),
                    ("sends that are not written", len(broker.writes.stage.sends)),
                    ("deliveries that are not safe", broker.state.schedule.storing),
                    ("pulls that wait for their turn", len(broker.pulling.turns)),
                    ("replies on their way", broker.request_reply.open_count),
                )
                if count
            ]
            if not left:
                break
            self.world.simulation.run(LEFT_LOOK_MS)
        return left

    def _look(self) -> None:
        world = self.world
        for name, broker in self._features():
            for group, topics in self.books.readers.items():
                for topic in topics:
                    for queue_id, offset in (
                        broker.state.committed.topics(group).get(topic, {}).items()
                    ):
                        _, end = broker.core.store.queue_bounds(topic, queue_id)
                        queue = f"{topic}@{name}/{queue_id}"
                        look = Commit(group, queue, offset, end, float(world.now_ms))
                        self.books.commits.append(look)
        world.simulation.after(LOOK_MS, self._look)

    def _stored(self) -> dict[str, list[Delivery]]:
        found: dict[str, list[Delivery]] = {}
        for topic in self.books.topics:
            all_ = []
            for name, disk in self.world.disks.items():
                try:
                    all_ += [delivery_of(message) for message in disk.messages(topic, name)]
                except (CorruptBatch, CorruptRecord) as error:
                    self.books.wrong["C2"].append(f"{topic} of {name} is damaged: {error}")
            found[topic] = sorted(all_, key=lambda one: one.place)
        return found


def run_seed(
    seed: int, plant: Plant | None = None, kind: type[Run] = Run, *, secure: bool = False
) -> Outcome:
    """Runs a seed.

    Args:
        seed: Number of the seed.
        plant: Plants a bug before.
        kind: Kind of run.
        secure: Clients without a key are refused.
    """
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="mqmesh-", dir=memory if memory.is_dir() else None))
    run = kind(seed, folder, secure=secure)
    try:
        if plant is not None:
            plant(run)
        with _one_name():
            return run.go()
    finally:
        run.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _one_name() -> Iterator[None]:
    """Use one name for all processes that run a seed: longer names make frames that take longer."""
    mark = ProcessMark("0123456789abcdef-4026531836", 10_000, 1_000_000)
    with (
        mock.patch.object(options, "born_host", return_value="vm:10000"),
        mock.patch.object(batch_codec, "born_host", return_value="vm:10000"),
        mock.patch.object(group_member, "own_process", return_value=mark),
    ):
        yield
