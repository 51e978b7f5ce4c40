"""Bugs that are planted into a simulated cluster, each of which some seed must find.

As a program it looks for the first seed that finds each bug::

    PYTHONHASHSEED=0 PYTHONPATH=tests python -P -m simulation.planted NAME … --count 100

Elsewhere nothing is replaced while tests run. Here the replaced method is the bug.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

import msgspec
from harness.simulation.disk import LoggedStore, LogRecord
from harness.simulation.faults import MEMBERS, PROFILES
from harness.simulation.owners import OwnersRun
from harness.simulation.processing import ProcessingRun
from harness.simulation.real_disk import SteppedFlusher
from harness.simulation.receiving import ReceiveRun, is_in_order
from harness.simulation.run import Outcome, Run, run_seed
from harness.simulation.tables import TableRun

from mqmesh.batch.record_batch import read_header
from mqmesh.protocol.delivery import SettleResponse
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.key_order import KeyOrder
from mqmesh.roles.broker.delivery_state.runs import Run as LeaseRun
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.features.delivery.taking import Taking
from mqmesh.roles.broker.features.groups.locks import LocksFeature
from mqmesh.roles.broker.features.groups.resets import ResetsFeature
from mqmesh.roles.broker.features.processing.feature import ProcessingFeature
from mqmesh.roles.broker.features.tables.carry import Carry
from mqmesh.roles.broker.features.tables.tables import Tables
from mqmesh.roles.broker.features.transactions.transaction_table import Transactions
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.owner_records import OwnerRecords
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks
from mqmesh.roles.broker.group_state.queue_ownership import QueueOwnership
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.sdk.consumer import queue_leases
from mqmesh.sdk.consumer.fetching.process_queue import ProcessQueue
from mqmesh.sdk.consumer.listening.send_back_queue import SendBackQueue
from mqmesh.sdk.consumer.receive_engine import ReceiveEngine
from mqmesh.storage.commitlog import checkpointer
from mqmesh.storage.interface import BatchToPut, PutResult
from mqmesh.storage.memory import MemoryStore
from mqmesh.storage.queues.producer_states import ProducerStates

Bug = Callable[[Run], None]
Plant = Callable[[contextlib.ExitStack], Bug]
MOST_SEEDS = 2_000
LATE_MS = 200
RARE = {"a double owner", "a lock trusted longer than the broker keeps it"}
"""Found only where members come and go all the time: only seeds of that profile are tried."""


class LateWrites(LoggedStore):
    """Acknowledges what is written a moment later."""

    def _append(self, batch: BatchToPut, result: PutResult, *, goes_on: bool) -> None:
        def append() -> None:
            super(LateWrites, self)._append(batch, result, goes_on=goes_on)

        self._node.after(LATE_MS, append)


class TornTails(LoggedStore):
    """Takes what a loss of power left of a record for a record."""

    def takes(self, record: LogRecord) -> bool:
        """Everything."""
        return True

    def _restore(self, record: LogRecord) -> None:
        header = read_header(record.data)
        plain = BatchToPut(record.topic, record.queue_id, header, record.data, record.tag_hashes)
        MemoryStore.put(self, [plain], header.store_timestamp)


class FastClock:
    """A broker's clock that is ahead of everybody's."""

    def __init__(self, clock) -> None:
        self.monotonic_ms, self.monotonic_ns = clock.monotonic_ms, clock.monotonic_ns
        self._clock = clock

    def wall_ms(self):
        """3 s ahead."""
        return self._clock.wall_ms() + 3_000

    def wall_ns(self):
        """The same."""
        return self.wall_ms() * 1_000_000


def _store(kind: type[LoggedStore]) -> Plant:
    def bug(run: Run) -> None:
        add_broker = run.world.add_broker

        def add(name: str):
            process = add_broker(name)
            run.world.disks[name].opener = kind
            return process

        run.world.add_broker = add

    return lambda stack: bug


def _method(owner: object, name: str, make: Callable) -> Plant:
    def plant(stack: contextlib.ExitStack) -> Bug:
        replaced = make(getattr(owner, name))
        stack.enter_context(mock.patch.object(owner, name, replaced))
        return lambda run: None

    return plant


def _ahead_of_the_listener(was):
    return lambda self: self.next_offset


def _goes_back(was):
    def commit(self, group, topic, queue_id, queue_offset):
        known = self.query(group, topic, queue_id)
        was(self, group, topic, queue_id, max(queue_offset - 3 * (known % 5 == 0), 0))

    return commit


def _before_the_sync(stack):
    was = SteppedFlusher.written

    def written(self, end, fds, *, urgent=False):
        was(self, end, fds, urgent=urgent)
        self.durable_offset = end
        self._wake()

    stack.enter_context(mock.patch.object(SteppedFlusher, "written", written))

    def bug(run: Run) -> None:
        run.world.real_store = True

    return bug


def _never_synced(stack):
    stack.enter_context(mock.patch.object(checkpointer, "sync_paths", return_value=None))

    def bug(run: Run) -> None:
        run.world.real_store = True

    return bug


def _to_the_end(was):
    def change(self, wanted, queue_id):
        made = was(self, wanted, queue_id)
        return msgspec.structs.replace(made, new_offset=made.max_queue_offset)

    return change


def _lost_retry(was):
    def send(self, messages):
        if messages.first % 3:
            was(self, messages)
        else:
            self._outbox.post(lambda: messages.on_done(0))

    return send


def _double_owner(was):
    def lock(self, group, client_id, peer, queue, token, now_ms):
        known = self._groups.get(group, {}).get(queue)
        if known is not None and known.client_id != client_id:
            if token:
                return token  # who had it before has it as well
            self._remove(group, queue, known)
        return was(self, group, client_id, peer, queue, token, now_ms)

    return lock


def _early(stack):
    def bug(run: Run) -> None:
        def make(config, transport, *, opener):
            return BrokerServer(config, transport, FastClock(transport.clock), opener)

        run.world.make_broker = make

    return bug


def _nothing_is_stale(was):
    return lambda self, *claim, **how: None


def _nothing_is_known(was):
    return lambda self, *batch: None


def _never_asked(was):
    return lambda self, now_ms, members: []


def _before_the_put(stack):
    reply, write = Core.reply_when_saved, Core.write_state
    wrote_ms: dict[Core, int] = {}

    def reply_at_once(self, request, answer):
        if isinstance(answer, SettleResponse):
            request.later().done(answer)
        else:
            reply(self, request, answer)

    def write_late(self):
        now_ms = self.clock.monotonic_ms()
        if now_ms - wrote_ms.get(self, now_ms - LATE_MS) >= LATE_MS:
            wrote_ms[self] = now_ms
            write(self)

    stack.enter_context(mock.patch.object(Core, "reply_when_saved", reply_at_once))
    stack.enter_context(mock.patch.object(Core, "write_state", write_late))
    return lambda run: None


def _forgets_hand_outs(was):
    def apply(self, record):
        if record.floor is not None:
            floor = msgspec.structs.replace(record, next_offset=record.floor, runs=[])
            record = floor if record.adds else record
        was(self, record)

    return apply


def _ends_early(was):
    return lambda self, now_ms: was(self, now_ms + LATE_MS * 10)


def _takes_stale(was):
    def claim(self, lease, first, bits):
        for run in self.runs:
            if run.within(first, bits):
                lease = max(lease, run.lease)
        return was(self, lease, first, bits)

    return claim


def _never_full(was):
    return lambda self, *given: was(self, *given[:-3], 10 * given[-3], *given[-2:])


def _some_without_key(was):
    return lambda self, offset, key: was(self, offset, key if offset % 3 else None)


def _one_key(was):
    return lambda self, offset, key: was(self, offset, key and "one")


def _no_keys(was):
    return lambda self, keys: was(self, ())


def _frees_its_key(was):
    def nack(self, lease, first, bits, **how):
        run = was(self, lease, first, bits, **how)
        if self.order is not None and isinstance(run, LeaseRun):
            for offset in run.offsets():
                self.order.remove(offset)
        return run

    return nack


def _takes_the_rest(was):
    def nack(self, lease, first, bits, **how):
        made = was(self, lease, first, bits, **how)
        left = self.held(lease)
        if left is not None:
            self.give_back(lease, left.first, left.bits)
        return made

    return nack


def _does_nothing(was):
    return lambda self, *given: None


BUGS: dict[str, Plant] = {
    "an acknowledgement before the write": _store(LateWrites),
    "an acknowledgement before the sync": _before_the_sync,
    "queue files that are never synced": _never_synced,
    "a commit ahead of the listener": _method(
        ProcessQueue, "commit_offset", _ahead_of_the_listener
    ),
    "an offset that goes back": _method(CommittedOffsets, "commit", _goes_back),
    "a reset that skips": _method(ResetsFeature, "_change", _to_the_end),
    "a lost retry": _method(SendBackQueue, "send", _lost_retry),
    "a double owner": _method(QueueLocks, "lock", _double_owner),
    "a forgotten half message": _method(Transactions, "tick", _never_asked),
    "an early delay": _early,
    "a stale generation accepted": _method(QueueOwnership, "commit", _nothing_is_stale),
    "a duplicate after a retry": _method(ProducerStates, "known", _nothing_is_known),
    "a torn tail taken for good": _store(TornTails),
    "a lock trusted longer than the broker keeps it": _method(
        queue_leases, "TRUST_MS", lambda was: 30_000
    ),
}
RECEIVE_BUGS: dict[str, Plant] = {
    "an acknowledged message before the put": _before_the_put,
    "a hand-out that the log forgets": _method(DeliveryWindows, "apply", _forgets_hand_outs),
    "a lease that ends early": _method(DeliveryWindow, "tick", _ends_early),
    "a stale acknowledgement taken": _method(DeliveryWindow, "claim", _takes_stale),
    "a group that holds too much": _method(Taking, "__init__", _never_full),
}
"""Of members that acknowledge each message."""
KEY_BUGS: dict[str, Plant] = {
    "messages without their keys": _method(KeyOrder, "add", _some_without_key),
    "one key for all": _method(KeyOrder, "add", _one_key),
    "an order that a new master forgets": _method(DeliveryWindow, "begin_order", _no_keys),
    "a stale acknowledgement taken in order": _method(DeliveryWindow, "claim", _takes_stale),
    "a refusal that frees its key": _method(DeliveryWindow, "nack", _frees_its_key),
    "a refusal that takes back other keys": _method(DeliveryWindow, "nack", _takes_the_rest),
    "a member that keeps what is behind its refusal": _method(
        DeliveryWindow, "hold_back", _does_nothing
    ),
    "a caller that gets what is behind its refusal": _method(
        ReceiveEngine, "_return_behind", _does_nothing
    ),
}
"""The same of seeds with order by key."""


def _unconfirmed(was):
    def lock(self, request, wanted):
        core, self._core = self._core, mock.Mock(copies_confirm=False)
        leadership, self._leadership = self._leadership, None
        try:
            answer = was(self, request, wanted)
        finally:
            self._core, self._leadership = core, leadership
        return msgspec.structs.replace(answer, lease_ms=3_000)

    return lock


def _long_lease(was):
    def answer(self, pendings, error):
        for one in pendings:
            if one in self._waiting:
                self._waiting[one] = msgspec.structs.replace(self._waiting[one], lease_ms=60_000)
        was(self, pendings, error)

    return answer


def _no_grace(was):
    def restore(self, group, queue, client_id, token, ends_ms):
        was(self, group, queue, client_id, token, 0)

    return restore


def _only_locked_lately(was):
    def apply(self, record):
        was(self, msgspec.structs.replace(record, queues=[]))

    return apply


def _shown_token(was):
    def lock(self, group, client_id, peer, queue, token, now_ms):
        if token and self.find(group, queue) is None:
            self._enter(group, queue, client_id, peer, token, now_ms + self.lease_ms)
        return was(self, group, client_id, peer, queue, token, now_ms)

    return lock


def _forgets_settled(was):
    def record(self, key, settled):
        made = was(self, key, settled)
        return msgspec.structs.replace(made, cleared=[], floor=self.find(key).floor)

    return record


def _stays_refused(was):
    def end_of_known(self, request, wanted, refusal):
        raise refusal

    return end_of_known


PROCESSING_BUGS: dict[str, Plant] = {
    "outputs without the progress": _method(DeliveryWindows, "_settled", _forgets_settled),
    "a repeated commit refused": _method(ProcessingFeature, "_end_of_known", _stays_refused),
}
"""Of members that make messages of messages."""


def _where(fault, plant):
    """Plants a bug where nothing but one fault harms, which it rarely meets elsewhere."""

    def planted(stack):
        bug = plant(stack)

        def begin(run):
            bug(run)
            run.faults = {fault: 1}

        return begin

    return planted


CUT, PAUSE = "leader cut off with a member", "pause through a failover"
OWNERS_BUGS: dict[str, Plant] = {
    "a lock answered before it is confirmed": _method(LocksFeature, "lock_batch_mq", _unconfirmed),
    "a lock relied on longer than the next master keeps it": _method(
        LocksFeature, "_answer", _long_lease
    ),
    "a former owner that is not waited for": _where(CUT, _method(QueueLocks, "restore", _no_grace)),
    "owners that the log does not know": _where(
        CUT, _method(OwnerRecords, "apply", _only_locked_lately)
    ),
    "a token that is used again": _where(PAUSE, _method(QueueLocks, "lock", _shown_token)),
}
"""Bugs that only seeds of ``OwnersRun`` look for."""


def _only_rows(was):
    return lambda self, table, keys: [(row and row.newest, 0) for row in self.rows_of(table, keys)]


def _newest_first(was):
    def changes(self, table, key, row):
        return was(self, table, key, row)[::-1]

    return changes


TABLE_BUGS: dict[str, Plant] = {
    "a comparison with what is confirmed only": _method(Tables, "newest", _only_rows),
    "a row that is carried in the wrong order": _method(Carry, "_changes", _newest_first),
}
"""Bugs that only seeds of ``TableRun`` look for."""


KINDS: dict[type[Run], dict[str, Plant]] = {
    Run: BUGS,
    ReceiveRun: RECEIVE_BUGS | KEY_BUGS,
    OwnersRun: OWNERS_BUGS,
    ProcessingRun: PROCESSING_BUGS,
    TableRun: TABLE_BUGS,
}
ALL = {name: (kind, plant) for kind, bugs in KINDS.items() for name, plant in bugs.items()}
FIRST_SEED = {
    "an acknowledgement before the sync": 8,
    "queue files that are never synced": 2,
    "a reset that skips": 11,
    "a stale generation accepted": 9,
    "a duplicate after a retry": 2,
    "a torn tail taken for good": 8,
    "a lock trusted longer than the broker keeps it": 64,
    "a group that holds too much": 3,
    "an order that a new master forgets": 3,
    "a lock relied on longer than the next master keeps it": 2,
    "owners that the log does not know": 4,
    "a token that is used again": 3,
}
"""Seeds that find a bug, where those from 0 need longer. A change of the program moves them; then
seeds are tried from here on."""


def run_planted(name: str, seed: int) -> Outcome:
    """Runs a seed with a bug."""
    kind, plant = ALL[name]
    with contextlib.ExitStack() as stack:
        return run_seed(seed, plant(stack), kind)


def find(name: str, seeds: Iterable[int]) -> Iterator[Outcome]:
    """Runs seeds until one finds the bug."""
    for seed in seeds:
        outcome = run_planted(name, seed)
        yield outcome
        if outcome.violations:
            return


def hunt(name: str, first: int, count: int) -> bool:
    """Looks for a seed that finds a bug, and says which one does."""
    seeds: Iterable[int] = itertools.count(first)
    if name in RARE:
        seeds = (seed for seed in seeds if PROFILES[seed % len(PROFILES)] is MEMBERS)
    if name in KEY_BUGS:
        seeds = filter(is_in_order, seeds)
    for outcome in find(name, itertools.islice(seeds, count)):
        if outcome.violations:
            sys.stdout.write(f"seed {outcome.seed} finds {name}: {outcome.violations[0]}\n")
            return True
    sys.stdout.write(f"no seed finds {name}\n")
    return False


def main() -> int:
    """Looks for a seed for each bug that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+", choices=ALL, metavar="NAME")
    parser.add_argument("--seed", type=int, help="the first (default: one that found the bug)")
    parser.add_argument("--count", type=int, default=MOST_SEEDS)
    options = parser.parse_args()
    found = [
        hunt(name, FIRST_SEED.get(name, 0) if options.seed is None else options.seed, options.count)
        for name in options.names
    ]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
