"""Records of a simulation's clients, and how they are judged.

The invariants are those of ``harness.checker``: one history for each group and topic. Beside them:

* C4 for ordered consumers: once a newer owner of a queue has begun a call, no older one begins any.
* C7 needs the local database of the transactions, which no crash harms: ``decisions``.
* Nothing that failed is forgotten: it succeeds later or becomes a dead letter.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from harness.checker import Report, Verdict, check
from harness.history import (
    ACKED,
    COMMITTED,
    REFUSED,
    RETURNED,
    ROLLED_BACK,
    UNKNOWN,
    Attempt,
    Commit,
    DelayedMessage,
    Delivery,
    HalfMessage,
    History,
    Look,
    MessageKey,
)
from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError, NotMaster, RequestTimeout
from mqmesh.message import StoredMessage
from mqmesh.protocol.messaging import SendStatus
from mqmesh.sdk.producer.send_result import SendFuture

PLAIN, ORDERED, TRANSACTED, DELAYED = "plain", "ordered", "transacted", "delayed"
LOST: Final = "lost"
"""Outcome of a transaction whose messages went with a master."""
TOPICS: Final = (PLAIN, ORDERED, TRANSACTED, DELAYED)
PUSH, ORDER, PULL, RECEIVE = "push", "order", "pull", "receive"
READERS: Final = {
    PUSH: (PLAIN, TRANSACTED, DELAYED),
    ORDER: (ORDERED,),
    PULL: (PLAIN,),
}
"""Groups, and the topics that they read."""
UNORDERED: Final = (PUSH, RECEIVE)
UNWANTED: Final = "unwanted"
UNWANTED_EVERY: Final = 7
"""One message of so many has the tag that the group ``RECEIVE`` does not take."""


def body_of(producer: str, number: int) -> bytes:
    """Returns the body of a producer's message."""
    return f"{producer}:{number}".encode()


def tag_of(number: int) -> str:
    """Returns the tag of a producer's message."""
    return UNWANTED if number % UNWANTED_EVERY == 0 else "wanted"


def key_of(body: bytes) -> MessageKey:
    """Returns the key of the message that has a body."""
    producer, _, number = bytes(body).decode().partition(":")
    return producer, int(number)


class Books:
    """Everything that was seen.

    Args:
        now_ms: The simulation's clock.
        topics: Topics that are sent to.
        readers: Groups, and the topics that they read.

    Attributes:
        topics, readers: See above.
        attempts: Attempts of sends, by topic and message.
        deliveries: First tries, by group and topic.
        decisions: Local transactions that ended, with the time.
        undecided: Transactions that were left to a check-back.
        failed: Messages that a listener refused last, by group.
        done: Messages that a listener took, by group.
        due_ms: Due times of delayed messages, by the simulation's clock.
        commits: Looks at committed offsets.
        looks: Looks at ends of queues, by topic, at the leader of the newest epoch.
        kills_ms: Times at which brokers were killed.
        early_ms: Time by which wall clocks were stepped.
        resets: Groups and topics whose offsets an administrator set back.
        statuses_hold: No status but SEND_OK says that the message may be lost.
    """

    def __init__(
        self,
        now_ms: Callable[[], float],
        topics: Sequence[str] = TOPICS,
        readers: Mapping[str, Sequence[str]] = READERS,
    ) -> None:
        self._now_ms = now_ms
        self.topics = topics
        self.readers = readers
        self.attempts: dict[str, dict[MessageKey, Attempt]] = {topic: {} for topic in topics}
        self.deliveries: dict[tuple[str, str], list[Delivery]] = defaultdict(list)
        self.decisions: dict[MessageKey, tuple[str, float]] = {}
        self.undecided: dict[MessageKey, None] = {}
        self.failed: dict[str, dict[MessageKey, None]] = defaultdict(dict)
        self.done: dict[str, set[MessageKey]] = defaultdict(set)
        self.due_ms: dict[MessageKey, float] = {}
        self.commits: list[Commit] = []
        self.looks: dict[str, list[Look]] = defaultdict(list)
        self.kills_ms: list[float] = []
        self.resets: set[tuple[str, str]] = set()
        self.early_ms = 0
        self.statuses_hold = False
        self.wrong: dict[str, list[str]] = defaultdict(list)
        self._tenures: dict[str, list[object]] = defaultdict(list)

    # ---- While it runs -----------------------------------------------------------------

    def sent(self, topic: str, producer: str, number: int) -> None:
        """Notes that a message is on its way."""
        attempt = Attempt(producer, number, f"{producer}:{number}", called_ms=self._now_ms())
        self.attempts[topic][producer, number] = attempt

    def outcome(self, topic: str, key: MessageKey, future: SendFuture) -> None:
        """Notes the outcome of a send."""
        error = future.exception()
        if error is not None:
            self.failed_send(topic, key, error)
            return
        result = future.result(0)
        is_acked = result.status is SendStatus.SEND_OK
        if not is_acked and not self.statuses_hold:
            return  # it says that it may be lost
        queue = result.message_queue
        self._came_to(
            topic,
            key,
            outcome=ACKED if is_acked else RETURNED,
            mode="async",
            queue=f"{queue.topic}@{queue.broker_name}/{queue.queue_id}",
            queue_offset=result.queue_offset,
            message_id=result.message_id,
            answered_ms=self._now_ms(),
        )

    def failed_send(self, topic: str, key: MessageKey, error: MQMeshError) -> None:
        """Notes that a send was not acknowledged."""
        # A producer that is closed does not report what became of what it had sent.
        in_doubt = RequestTimeout | EndpointUnreachable | NotMaster | ClientClosed
        outcome = UNKNOWN if isinstance(error, in_doubt) else REFUSED
        self._came_to(topic, key, outcome=outcome)

    def _came_to(self, topic: str, key: MessageKey, **known: Any) -> None:
        self.attempts[topic][key] = replace(self.attempts[topic][key], **known)

    def delivered(self, group: str, message: StoredMessage, consumer: str) -> None:
        """Notes a message that a listener, or a poll, got for the first time of its own queue."""
        one = delivery_of(message, self._now_ms(), consumer)
        self.deliveries[group, message.topic].append(one)

    def begin(self, queue: str, tenure: object) -> None:
        """Notes that an ordered consumer begins a call of a queue."""
        before = self._tenures[queue]
        if tenure not in before:
            before.append(tenure)
        elif before[-1] is not tenure:
            self.wrong["C4"].append(f"{queue} was consumed by one who had lost it to another")

    # ---- In the end --------------------------------------------------------------------

    def forget(self, topic: str, stored: set[MessageKey]) -> set[MessageKey]:
        """Drops acknowledged messages that are not stored from the expected ones; returns them."""
        attempts = self.attempts[topic]
        lost = {
            key
            for key, one in attempts.items()
            if key not in stored and (one.outcome == ACKED or key in self.decisions)
        }
        for key in lost:
            called_ms = attempts[key].called_ms
            attempts[key] = Attempt(*key, f"{key[0]}:{key[1]}", called_ms=called_ms)
            self.undecided.pop(key, None)
            if self.decisions.get(key, (ROLLED_BACK, 0.0))[0] == COMMITTED:
                self.decisions[key] = (LOST, 0.0)
        return lost

    def forget_later(self, halves: set[MessageKey]) -> None:
        """Forgets half messages that are not there, and messages that were to come again."""
        for key in [key for key in self.undecided if key not in halves]:
            del self.undecided[key]
        for group in self.readers:
            self.failed[group].clear()

    def missing(self) -> list[str]:
        """Returns what must still be delivered, in words; empty when all is there."""
        found = []
        unasked = [key for key in self.undecided if key not in self.decisions]
        if unasked:
            found.append(f"{len(unasked)} half messages that nobody asks about, as {unasked[0]}")
        for group, topics in self.readers.items():
            for topic in topics:
                seen = {one.key for one in self.deliveries[group, topic]} | self.done[group]
                lost = [key for key in self._expected(topic) if key not in seen]
                if lost:
                    found.append(f"{len(lost)} of {topic} for {group}, as {lost[0]}")
            open_ = [key for key in self.failed[group] if key not in self.done[group]]
            if open_:
                found.append(f"{len(open_)} that failed for {group}, as {open_[0]}")
        return found

    def _expected(self, topic: str) -> Iterable[MessageKey]:
        if topic == TRANSACTED:
            return [key for key, (made, _) in self.decisions.items() if made == COMMITTED]
        attempts = self.attempts[topic].items()
        return [key for key, attempt in attempts if attempt.outcome == ACKED]

    def judge(self, stored: dict[str, list[Delivery]]) -> list[Report]:
        """Returns one report for each group and topic, and one for violations beside them."""
        reports = []
        for group, topics in self.readers.items():
            for topic in topics:
                history = self._history(group, topic, stored[topic])
                report = check(history)
                if group in UNORDERED:
                    # Calls of a concurrent consumer overtake each other.
                    report = Report(
                        [one for one in report.verdicts if one.invariant != "C4"], report.counts
                    )
                reports.append(report)
        lost = [
            f"{key} failed for {group} and was never seen again"
            for group in self.readers
            for key in self.failed[group]
            if key not in self.done[group]
        ]
        self.wrong["C1"] += lost
        beside = [Verdict(name, told) for name, told in self.wrong.items()]
        reports.append(Report(beside, Counter()))
        # Where offsets were set back, going back is no mistake.
        looks = [
            one
            for one in self.commits
            if (one.group, one.queue.partition("@")[0]) not in self.resets
        ]
        reports.append(
            check(History(commits=looks, kills_ms=self.kills_ms, offset_window_ms=OFFSET_MS))
        )
        return reports

    def _history(self, group: str, topic: str, stored: list[Delivery]) -> History:
        history = History(
            deliveries=self.deliveries[group, topic], stored=stored, looks=self.looks[topic]
        )
        attempts = list(self.attempts[topic].values())
        if topic == TRANSACTED:
            for one in attempts:
                made, at_ms = self.decisions.get((one.producer, one.number), (ROLLED_BACK, 0.0))
                half = HalfMessage(one.producer, one.number, one.body_hash, made, at_ms)
                history.halves.append(half)
        elif topic == DELAYED:
            history.early_ms = float(self.early_ms)
            history.delayed_repeats = len(attempts)
            for one in attempts:
                key = one.producer, one.number
                delayed = DelayedMessage(*key, one.body_hash, one.outcome, self.due_ms[key])
                history.delayed.append(delayed)
        else:
            history.attempts = attempts
        return history


OFFSET_MS: Final = 7_000.0
"""Brokers save offsets each 5 s; writing takes a moment."""


def delivery_of(message: StoredMessage, now_ms: float = 0.0, consumer: str = "") -> Delivery:
    """Returns a message as the checker sees it."""
    producer, number = key_of(message.body)
    return Delivery(
        producer,
        number,
        bytes(message.body).decode(),
        f"{message.topic}@{message.broker_name}/{message.queue_id}",
        message.queue_offset,
        message.message_id,
        now_ms,
        consumer,
    )
