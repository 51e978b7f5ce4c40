"""Bugs that are planted into a simulated cluster, each of which some seed must find.

As a program it looks for the first seed that finds a bug::

    PYTHONHASHSEED=0 PYTHONPATH=tests python -P -m simulation.planted NAME --count 100

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
from harness.simulation.real_disk import SteppedFlusher
from harness.simulation.receiving import ReceiveRun
from harness.simulation.run import Outcome, Run, run_seed

from mqmesh.batch.record_batch import read_header
from mqmesh.protocol.delivery import SettleResponse
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import DeliveryWindows
from mqmesh.roles.broker.features.delivery.feature import _Taking
from mqmesh.roles.broker.features.groups import locks
from mqmesh.roles.broker.features.groups.locks import LocksFeature
from mqmesh.roles.broker.features.groups.resets import ResetsFeature
from mqmesh.roles.broker.features.transactions.transaction_table import Transactions
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.owner_records import OwnerRecords
from mqmesh.roles.broker.group_state.queue_locks import QueueLocks
from mqmesh.roles.broker.group_state.queue_ownership import QueueOwnership
from mqmesh.roles.broker.server import BrokerServer
from mqmesh.sdk.consumer import queue_leases
from mqmesh.sdk.consumer.fetching.process_queue import ProcessQueue
from mqmesh.sdk.consumer.listening.send_back_queue import SendBackQueue
from mqmesh.storage.commitlog import checkpointer
from mqmesh.storage.interface import BatchToPut, PutResult
from mqmesh.storage.memory import MemoryStore
from mqmesh.storage.queues.producer_states import ProducerStates

Bug = Callable[[Run], None]
MOST_SEEDS = 2_000
LATE_MS = 200
RARE = {"a double owner", "a lock trusted longer than the broker keeps it"}
"""Found only where members come and go all the time: only seeds of that profile are tried."""


class LateWrites(LoggedStore):
    """Acknowledges what is written a moment later."""

    def _append(self, batch: BatchToPut, result: PutResult) -> None:
        self._node.after(LATE_MS, lambda: LoggedStore._append(self, batch, result))


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


def _store(kind: type[LoggedStore]) -> Callable[[contextlib.ExitStack], Bug]:
    def bug(run: Run) -> None:
        add_broker = run.world.add_broker

        def add(name: str):
            process = add_broker(name)
            run.world.disks[name].opener = kind
            return process

        run.world.add_broker = add

    return lambda stack: bug


def _method(owner: object, name: str, make: Callable) -> Callable[[contextlib.ExitStack], Bug]:
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


BUGS: dict[str, Callable[[contextlib.ExitStack], Bug]] = {
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
RECEIVE_BUGS: dict[str, Callable[[contextlib.ExitStack], Bug]] = {
    "an acknowledged message before the put": _before_the_put,
    "a hand-out that the log forgets": _method(DeliveryWindows, "apply", _forgets_hand_outs),
    "a lease that ends early": _method(DeliveryWindow, "tick", _ends_early),
    "a stale acknowledgement taken": _method(DeliveryWindow, "_claim", _takes_stale),
    "a group that holds too much": _method(_Taking, "__init__", _never_full),
}
"""Of members that acknowledge each message."""


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
    def answer(renewals, error):
        was(
            [(one, msgspec.structs.replace(told, lease_ms=60_000)) for one, told in renewals], error
        )

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
OWNERS_BUGS: dict[str, Callable[[contextlib.ExitStack], Bug]] = {
    "a lock answered before it is confirmed": _method(LocksFeature, "lock_batch_mq", _unconfirmed),
    "a lock relied on longer than the next master keeps it": _method(locks, "_answer", _long_lease),
    "a former owner that is not waited for": _where(CUT, _method(QueueLocks, "restore", _no_grace)),
    "owners that the log does not know": _method(OwnerRecords, "apply", _only_locked_lately),
    "a token that is used again": _where(PAUSE, _method(QueueLocks, "lock", _shown_token)),
}
"""Bugs that only seeds of ``OwnersRun`` look for."""


def run_planted(name: str, seed: int) -> Outcome:
    """Runs a seed with a bug."""
    with contextlib.ExitStack() as stack:
        if name in RECEIVE_BUGS:
            return run_seed(seed, RECEIVE_BUGS[name](stack), ReceiveRun)
        if name in OWNERS_BUGS:
            return run_seed(seed, OWNERS_BUGS[name](stack), OwnersRun)
        return run_seed(seed, BUGS[name](stack))


def find(name: str, seeds: Iterable[int]) -> Iterator[Outcome]:
    """Runs seeds until one finds the bug."""
    for seed in seeds:
        outcome = run_planted(name, seed)
        yield outcome
        if outcome.violations:
            return


def main() -> int:
    """Looks for a seed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*BUGS, *RECEIVE_BUGS, *OWNERS_BUGS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=MOST_SEEDS)
    options = parser.parse_args()
    seeds = itertools.count(options.seed)
    if options.name in RARE:
        seeds = (seed for seed in seeds if PROFILES[seed % len(PROFILES)] is MEMBERS)
    for outcome in find(options.name, itertools.islice(seeds, options.count)):
        if outcome.violations:
            sys.stdout.write(f"seed {outcome.seed} finds {options.name}: {outcome.violations[0]}\n")
            return 0
    sys.stdout.write(f"no seed finds {options.name}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
