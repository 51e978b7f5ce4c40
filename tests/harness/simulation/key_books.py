"""Judgement on the order of jobs by sharding key (D4), and on jobs that wait in vain."""

from collections.abc import Callable, Mapping
from typing import Final

from harness.simulation.books import RECEIVE, UNWANTED
from mqmesh.batch.iter_batches import iter_batches
from mqmesh.batch.record_batch import decode_messages
from mqmesh.message import StoredMessage
from mqmesh.protocol.delivery import SettleAction
from mqmesh.roles.broker.all_features import BrokerFeatures
from mqmesh.roles.broker.delivery_state.runs import NOBODY, Run, RunState
from mqmesh.roles.broker.delivery_state.window import DeliveryWindow
from mqmesh.roles.broker.delivery_state.windows import WindowKey
from mqmesh.storage.interface import GetStatus

JOBS: Final = "jobs"
KEYS: Final = 6
"""Sharding keys of jobs, some of which have none."""
MAX_UNSETTLED: Final = 10
FREE_MS: Final = 500
"""Longest wait of a message that may go out while a member waits for some."""
READ_BYTES: Final = 1 << 20

Place = tuple[str, str, int, int]
"""Broker, physical topic, queue id and queue offset."""


class KeyBooks:
    """Everything that was seen of the order of jobs.

    Args:
        in_order: The group goes by sharding keys.
        now_ms: The simulation's clock.
        on_wrong: Called with a sentence on what is not as it should be.
        given_up: Last leases under which members gave messages up.
    """

    def __init__(
        self,
        in_order: bool,
        now_ms: Callable[[], float],
        on_wrong: Callable[[str], None],
        given_up: Mapping[Place, int],
    ) -> None:
        self._in_order = in_order
        self._now_ms = now_ms
        self._wrong = on_wrong
        self._given_up = given_up
        self._delivered: dict[tuple[str, str, int, str], dict[Place, None]] = {}
        self._refused: dict[Place, int] = {}
        self._rejected: set[Place] = set()
        self._reported: dict[Place, set[int]] = {}
        self._late: dict[tuple[Place, int], BrokerFeatures] = {}
        self._keys: dict[Place, str] = {}
        self._read: dict[tuple[str, WindowKey], int] = {}
        self._free_ms: dict[Place, float] = {}

    def received(self, message: StoredMessage, place: Place) -> list[Place]:
        """Notes that a member got a message; returns those of its key that came before it."""
        if not self._in_order or not message.sharding_key or place[1] != JOBS:
            return []
        known = self._delivered.setdefault((*place[:3], message.sharding_key), {})
        known[place] = None
        before = [one for one in known if one[-1] < place[-1]]
        lease = message.info.fencing_token
        for one in before:
            if self._refused.get(one) == lease:
                self._wrong(f"{place} was delivered by lease {lease:x}, which refused {one}")
        return before

    def reports(
        self, place: Place, lease: int, action: SettleAction, broker: BrokerFeatures | None
    ) -> None:
        """Notes that a member is about to report on a message, at a broker."""
        self._reported.setdefault(place, set()).add(lease)
        if action == SettleAction.NACK:
            self._refused[place] = lease
        elif action == SettleAction.REJECT:
            self._rejected.add(place)
        elif action == SettleAction.ACK and self._in_order and broker is not None:
            window = broker.state.windows.find((RECEIVE, *place[1:3]))
            runs = [] if window is None else [run for run in window.runs if run.within(place[3], 1)]
            if runs and lease not in (runs[0].lease, runs[0].noted):
                self._late[place, lease] = broker

    def acknowledged(self, place: Place, lease: int, broker: BrokerFeatures | None) -> None:
        """Judges an answered acknowledgement: a lease that has a message no more settles nothing.

        Another member may have settled the message before: that is right.
        """
        late = self._late.get((place, lease))
        if late is not None and late is broker and self._reported[place] == {lease}:
            self._wrong(f"{place} was settled by lease {lease:x}, which had ended")

    def look(
        self,
        name: str,
        broker: BrokerFeatures,
        key: WindowKey,
        window: DeliveryWindow,
        open_: dict[Place, Run],
    ) -> list[Place]:
        """Judges who has messages of a key, and what is settled; returns what may go out.

        Args:
            name: Name of the broker.
            broker: It serves.
            key: Of the window.
            window: Of the group in a queue.
            open_: Messages that are not settled, with their runs.
        """
        self._read_keys(name, broker, key, window.next_offset)
        end = broker.core.store.queue_bounds(*key[1:])[1]
        is_full = self._in_order and window.unsettled - window.passed >= MAX_UNSETTLED
        all_ = range(window.floor, window.next_offset)
        # Of each key the lease that all messages so far have; NOBODY for none.
        lease_of: dict[str | None, int] = {}
        rejected: set[str | None] = set()
        free: list[Place] = []
        for offset in all_ if self._in_order else [place[-1] for place in open_]:
            place = (name, *key[1:], offset)
            sharding_key, run = self._keys.get(place), open_.get(place)
            before = lease_of.get(sharding_key)
            if run is None:
                if before is not None and sharding_key not in rejected:
                    self._wrong(f"{place} is settled, and one before it of its key is not")
                continue
            lease = run.lease or run.noted
            if before is not None and lease not in (NOBODY, before):
                self._wrong(f"{place} has the lease {lease:x}, one before it {before:x}")
            is_due = run.state is RunState.WAITING and run.until_ms == 0 and offset < end
            if before is None and is_due and (run.attempt or not is_full):
                free.append(place)
            if sharding_key is None:
                continue
            if place in self._rejected or run.state is RunState.LEAVING:
                # Its member goes on behind it, while it is made a dead letter.
                rejected.add(sharding_key)
                lease = lease or self._given_up.get(place, NOBODY)
            lease_of[sharding_key] = lease if before in (None, lease) else NOBODY
        return free

    def look_at_free(self, name: str, free: list[Place]) -> None:
        """Judges for how long messages wait that may go out, while a member waits for some."""
        now_ms = self._now_ms()
        for place in [one for one in self._free_ms if one[0] == name and one not in free]:
            del self._free_ms[place]
        for place in free:
            if now_ms - self._free_ms.setdefault(place, now_ms) >= FREE_MS:
                self._free_ms[place] = now_ms
                self._wrong(f"{place} may go out and does not, while a member waits")

    def _read_keys(self, name: str, broker: BrokerFeatures, key: WindowKey, end: int) -> None:
        """Reads the sharding keys of messages up to a queue offset."""
        offset = self._read.get((name, key), 0)
        while self._in_order and key[1] == JOBS and offset < end:
            found = broker.core.store.get(*key[1:], offset, max_bytes=READ_BYTES)
            if found.status is not GetStatus.FOUND:
                break
            for header, batch in iter_batches(b"".join(found.data)):
                for one in decode_messages(batch, header, broker_name=name):
                    if one.sharding_key and one.tag != UNWANTED:
                        self._keys[place_of(one)] = one.sharding_key
            offset = self._read[name, key] = found.next_queue_offset


def place_of(message: StoredMessage) -> Place:
    """Returns the place of a message, in a topic of its own or of retries."""
    info = message.info
    return info.broker_name, info.topic, info.queue_id, int(message.queue_offset)


def has_waiting(broker: BrokerFeatures) -> bool:
    """Returns whether a member waits for jobs, and takes answers."""
    return any(one.pending.peer.room() > 0 for one in broker.delivery.hold.of_topic(JOBS))
