"""The core of a broker: what every feature may use.

A feature keeps its own state and gets its neighbours by its constructor; what is here belongs to no
feature: the store and its commit point, the state log, the clock, the settings, the counters.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from mqmesh.clock import Clock
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import BrokerNotAvailable, MQMeshError, OffsetIllegal, StoreClosed
from mqmesh.protocol.codes import ResponseCode, error_of
from mqmesh.protocol.command import Answer
from mqmesh.protocol.messaging import BatchOutcome, SendStatus
from mqmesh.protocol.request import PendingReply, Request
from mqmesh.roles.broker.commit_point import CommitPoint
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.ha.leadership import Leadership
from mqmesh.roles.broker.helper_thread import RunAside
from mqmesh.roles.broker.replica_metrics import ReplicaCounts
from mqmesh.roles.broker.staging import OpenSend
from mqmesh.roles.broker.state_log import OnSaved, StateLog
from mqmesh.roles.broker.stats import BrokerStats
from mqmesh.roles.dispatch import Dispatch
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.security.quotas import Quotas
from mqmesh.storage.interface import MessageStore

_SUCCESS: Final = BatchOutcome(int(ResponseCode.SUCCESS), int(SendStatus.SEND_OK))


class Core:
    """The core of one broker in one role; it ends with the role.

    Args:
        settings: Settings, of which some change while the broker runs.
        clock: Source of time.
        store: Messages.
        commit_point: How far the log is safe, and sends that wait until it is.
        state: Log of changes of topics, groups and offsets.
        dispatch: Looks up rights that a handler asks for.
        note_refusal: Counts and logs a refusal that stands inside an answer: response code and
            remark.
        instance_id: Random number of this life of the process.
        random: Source of random numbers of the process.
        root: Directory of the broker.
        run_aside: Runs work in a helper thread.
        replication: Counters of replication, over all roles.
        quotas: Limits of users.
        leadership: Of a master that was elected; None for others.
        epoch: Of a master: numbers that it gives out begin with it.
        is_follower: The role only reads.
        has_past: The store held messages when the role began.
        memory_bytes: Memory of the machine; 0 if that is not known.
        lease_ttl_ms: For so long a lost master that asks nobody may go on.

    Attributes:
        stats: Counters of the broker.
        began_ms: When the role began, monotonic clock in ms.
    """

    def __init__(
        self,
        settings: LiveSettings[BrokerConfig],
        clock: Clock,
        store: MessageStore,
        commit_point: CommitPoint[OpenSend],
        state: StateLog,
        dispatch: Dispatch,
        note_refusal: Callable[[int, str], None],
        *,
        instance_id: int,
        random: Random,
        root: Path,
        run_aside: RunAside,
        replication: ReplicaCounts,
        quotas: Quotas | None = None,
        leadership: Leadership | None = None,
        epoch: int = 0,
        is_follower: bool = False,
        has_past: bool = False,
        memory_bytes: int = 0,
        lease_ttl_ms: int = 0,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.store = store
        self.commit_point = commit_point
        self.state = state
        self.dispatch = dispatch
        self.note_refusal = note_refusal
        self.instance_id = instance_id
        self.random = random
        self.root = root
        self.run_aside = run_aside
        self.replication = replication
        self.quotas = quotas or Quotas()
        self.leadership = leadership
        self.epoch = epoch
        self.is_follower = is_follower
        self.has_past = has_past
        self.memory_bytes = memory_bytes
        self.lease_ttl_ms = lease_ttl_ms
        self.stats = BrokerStats()
        self.began_ms = clock.monotonic_ms()

    @property
    def copies_confirm(self) -> bool:
        """Return whether no failover takes back what this master has answered."""
        leadership = self.leadership
        return leadership is not None and leadership.policy.mode is not AckReplicas.NONE

    @property
    def config(self) -> BrokerConfig:
        """Settings in force."""
        return self.settings.now

    def write_state(self) -> None:
        """Writes all changes of topics, groups and offsets.

        Callbacks that wait for that run once the log is safe so far.
        """
        written = self.state.write()
        waiters, error = written.waiters, written.error

        def on_safe(late: MQMeshError | None) -> None:
            for on_saved in waiters:
                on_saved(error or late)

        if not waiters:
            return
        if error is not None:
            on_safe(None)
        else:
            self.when_safe(written.end_offset, on_safe)

    def require_state(self) -> None:
        """Write all changes, since what the caller stores next depends on them.

        Raises:
            StorageError: Why the log does not take them.
        """
        self.write_state()
        if self.state.failure is not None:
            raise self.state.failure

    def when_safe(self, end_offset: int, on_safe: OnSaved) -> None:
        """Calls back once the log is safe to an offset.

        Args:
            end_offset: Commit-log offset.
            on_safe: Called with None, now or later, or with ``BrokerNotAvailable`` if it may be
                stored and is not known to be safe.
        """

        def on_stored(outcomes: list[BatchOutcome]) -> None:
            late: MQMeshError | None = None
            if outcomes[0].code != ResponseCode.SUCCESS:
                late = error_of(outcomes[0].code, outcomes[0].remark)
            elif outcomes[0].status != SendStatus.SEND_OK:
                name = SendStatus(outcomes[0].status).name
                late = BrokerNotAvailable(
                    f"it is in the log of this broker, but not safe yet: {name}; repeat it"
                )
            on_safe(late)

        if self.commit_point.is_safe(end_offset):
            on_safe(None)
        else:
            send = OpenSend(None, [_SUCCESS], end_offset, on_stored=on_stored, is_asked=True)
            self.commit_point.wait(send, end_offset, self.clock.monotonic_ms())

    def reply_when_saved(self, request: Request, answer: Answer) -> None:
        """Answers once all that has changed in this turn is in the log, and safe there.

        Args:
            request: To be answered.
            answer: If all goes well.
        """
        self.answer_when_saved(request.later(), answer)

    def answer_when_saved(self, pending: PendingReply, answer: Answer) -> None:
        """Do as ``reply_when_saved``, for an answer that is to come."""

        def on_saved(error: MQMeshError | None) -> None:
            if error is not None:
                pending.fail(error)
            else:
                pending.done(answer)

        self.state.save(on_saved)


def store_stopped(error: StoreClosed) -> BrokerNotAvailable:
    """Return the error for clients of a store that has stopped writing."""
    return BrokerNotAvailable(f"this broker does not write any more: {error}")


def no_message_at(offset: int) -> OffsetIllegal:
    """Return the error of an offset of the log where no message is, or one of another namespace."""
    return OffsetIllegal(
        f"no message begins at {offset} of the log, unless it is damaged there (`mqmesh store "
        "verify` finds them); offset ids come from messages, nobody can make them up"
    )


def only_commitlog(config: BrokerConfig, what: str) -> str:
    """Return the sentence for a command that the store in force cannot serve."""
    backend = config.storage.backend
    return f"{what} are of the backend commitlog, and this broker has {backend} (storage.backend)"
