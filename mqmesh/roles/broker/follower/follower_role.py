"""A follower: copies the log of its group's master, derives all from it, and serves reads.

It writes nothing of its own. An administrator may make it the master, or its group elects it.
"""

from collections.abc import Callable
from functools import partial

from mqmesh.errors import (
    InvalidArgument,
    NotMaster,
    RemoteProtocolError,
    StorageError,
    StoreClosed,
)
from mqmesh.log_identity import EPOCHS_APART
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    HaStatus,
    PromoteReplicaRequest,
    PromoteReplicaResponse,
    ReplicateLog,
)
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.environment import Environment, build_features
from mqmesh.roles.broker.feature import BrokerTurn
from mqmesh.roles.broker.follower.acting_master import ActingMaster
from mqmesh.roles.broker.follower.damage_repair import DamageRepair
from mqmesh.roles.broker.follower.follower_reads import FollowerReads
from mqmesh.roles.broker.follower.replica_link import LinkTerms, ReplicaLink
from mqmesh.roles.broker.ha.vote_state import VoteState
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.broker.index.indexer_link import LogExtent
from mqmesh.roles.broker.role import BrokerRole
from mqmesh.storage.interface import LogStart, MessageStore, ReplicableLog, replicable
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.units import CommitLogOffset


class FollowerRole(BrokerRole):
    """A follower, from now on.

    Args:
        given: The process.
        store: Messages, open.
        replace_store: Closes the store and opens another in its place, an empty copy that begins
            at the log start given.
        promote: Ends this role and begins that of the master, with an epoch of its own.
        promises: Promises of the replica, which say which leaders it may follow.

    Attributes:
        link: To the leader, None while it follows nobody.

    Raises:
        CorruptRecord: State of topics, groups or offsets in the log is damaged.
    """

    def __init__(
        self,
        given: Environment,
        store: MessageStore,
        *,
        replace_store: Callable[[LogStart], MessageStore],
        promote: Callable[[int], None],
        promises: VoteState,
    ) -> None:
        super().__init__(given, given.config.broker_id)
        self._store, self._log = store, replicable(store)
        self._replace_store = replace_store
        self._promote = promote
        self._promises = promises
        self.link: ReplicaLink | None = None
        self._alone_ms = given.clock.monotonic_ms()
        self._epoch = self._unclean_since = self._confirmed_epoch = 0
        self._outside = ""
        self._stand_in = ActingMaster(given)
        self._is_alone = False
        self._repair = DamageRepair(
            self.log, given.replication, on_repaired=self._on_repaired, clock=given.clock
        )
        self._read()

    def follow(self, leader: str, epoch: int = 0, unclean_since: int = 0) -> None:
        """Follows a leader from now on, or nobody.

        Args:
            leader: Where it listens, ``host:port``; "" for nobody.
            epoch: That it leads; 0 if only the leader knows.
            unclean_since: Of the group's record: from that epoch on what was confirmed before may
                be lost.
        """
        self._unclean_since = unclean_since
        self._epoch, self._outside = max(self._epoch, epoch), ""
        given, config = self._given, self._given.config
        if self.link is not None:
            self.link.close()
            self.link = None
        self._alone_ms = given.clock.monotonic_ms()
        self._reads.begin_leader(self._alone_ms)
        if leader:
            self.link = ReplicaLink(
                config.broker_name,
                config.broker_id,
                given.instance_id,
                leader,
                self,
                LinkTerms(
                    self._promises,
                    given.replication,
                    config.ha.zone,
                    config.ha.slave_read_enable,
                    epoch,
                ),
                connect=lambda on_command, on_connection: given.transport.connect(
                    endpoint_of(leader),
                    on_command=on_command,
                    on_connection=on_connection,
                    by_loop=True,
                ),
                clock=given.clock,
                call_later=given.transport.loop.call_later,
            )
        self._serve_reads()

    def stay_outside(self, reason: str) -> None:
        """Follow nobody and serve nothing, since this replica does not belong to the group."""
        self.follow("")
        self._outside = reason
        self._serve_reads()

    def silent_ms(self, now_ms: int) -> int:
        """Since the last sign of life of the leader, or since nobody is followed."""
        return now_ms - (self._alone_ms if self.link is None else self.link.last_seen_ms)

    def turn_ended(self, turn: BrokerTurn) -> bool:
        """Implement ``BrokerRole.turn_ended``."""
        if self.link is not None:
            self.link.turn_ended()
        return super().turn_ended(turn)

    def tick(self, now_ms: int) -> None:
        """Implement ``BrokerRole.tick``."""
        if self.link is not None:
            self.link.tick(now_ms)
            if self.link.streaming:
                self._repair.tick(now_ms, self.link.read_log, self._reads.shown_to())
        self._follow_tables()
        self._stand_in.tick(self.link, now_ms)
        self._reads.lag_max_ms = self._given.ha().replica_lag_max_ms
        self._look_at_reads()
        super().tick(now_ms)

    def close(self) -> None:
        """Implement ``BrokerRole.close``."""
        super().close()
        self._repair.close()
        self._stand_in.close()
        if self.link is not None:
            self.link.close()

    def _read(self) -> None:
        """Builds what is derived from the log as it is now, and serves it."""
        given, ha = self._given, self._given.config.ha
        self._store.show_to(None)
        self.features = features = build_features(given, self._store, is_follower=True)
        features.load()
        self._stand_in.begin_log(self.log().identity().store_id, features.state.committed)
        self._shown = int(self.log().log_end())
        self._reads = FollowerReads(
            self._shown,
            given.clock.monotonic_ms(),
            enabled=ha.slave_read_enable,
            elects=ha.mode is HaMode.AUTO,
            lag_max_ms=ha.replica_lag_max_ms,
        )
        self._store.show_to(self._reads.shown_to)
        self._serve_reads()
        if given.shell.state == "running":
            self.announce()

    def _look_at_reads(self) -> None:
        """Begins to answer reads, or ends it."""
        is_other = self._may_read() is not self._is_read or self._stands_in() is not self._is_alone
        if self.features is not None and is_other:
            self._serve_reads()

    def _may_read(self) -> bool:
        if self._outside:
            return False
        streaming = self.link is not None and self.link.streaming
        return self._reads.answers(
            self._given.clock.monotonic_ms(),
            streaming=streaming,
            is_damaged=bool(self.log().repair.damaged()),
        )

    def _stands_in(self) -> bool:
        """Consumers go on here without a master."""
        return (
            self._given.config.ha.mode is HaMode.MANUAL
            and self.link is not None
            and not self.link.streaming
            and bool(self.log().identity().epochs)
            and self._may_read()
        )

    def _serve_reads(self) -> None:
        """Refuses what only the master does, and serves reads if it may."""
        given, features = self._given, self.features
        assert features is not None
        self._is_read, self._is_alone = self._may_read(), self._stands_in()
        given.shell.dispatch.refuse(self._description(), self._not_master)
        if not self._is_read:
            features.pulling.fail_all(self._not_master(self._description()))
        self._serve(features, features.commands() if self._is_read else {})
        if self._is_alone:
            given.shell.dispatch.open(self._stand_in.begin(features))
        given.shell.dispatch.open(
            {
                RequestCode.PROMOTE_REPLICA: self._on_promote,
                **features.log_checks.commands(),
            }
        )

    def _description(self) -> str:
        if self._outside:
            return self._outside
        config, leader = self._given.config, "nobody yet"
        if self.link is not None:
            leader = self.link.leader
        return f"broker {config.broker_id} of {config.broker_name} follows {leader}"

    def _not_master(self, reason: str) -> NotMaster:
        link = self.link
        if link is None:
            return NotMaster(reason, epoch=self._epoch)
        return NotMaster(reason, epoch=max(self._epoch, link.leader_epoch), master=link.leader)

    # ---- The log ---------------------------------------------------------------------

    def log(self) -> ReplicableLog:
        """Implement ``CopiedLog.log``."""
        return self._log

    def durable_offset(self) -> int:
        """Implement ``CopiedLog.durable_offset``."""
        return int(self._store.durable_offset())

    def retention_wish(self) -> int:
        """Implement ``CopiedLog.retention_wish``."""
        return int(self._store.retention_wish())

    def on_chunk(self, chunk: ReplicateLog) -> None:
        """Implement ``CopiedLog.on_chunk``."""
        features, reads, end = self.features, self._reads, self.log().log_end()
        if features is None:
            return
        # The leader reports what is not here yet again when it comes.
        reads.note_leader(
            chunk.leader_end, min(chunk.confirmed, end), self._given.clock.monotonic_ms()
        )
        self._confirmed_epoch = chunk.leader_epoch
        reads.has(end)
        shown = min(reads.shown_to(), end)
        if shown > self._shown:
            self._shown = shown
            features.core.state.follow()
            self._follow_tables()
            for key in list(features.pulling.waited_for):
                features.pulling.wake(*key)
        if not self._is_read or self._is_alone:
            self._look_at_reads()  # to begin at once; the next tick ends it

    def _follow_tables(self) -> None:
        """Have the rows of tables get what no cut takes back."""
        kept = self._reads.kept_to(self.log().log_end())
        if kept is not None and self.features is not None:
            self.features.state.tables.follow(kept)

    def log_extent(self) -> LogExtent | None:
        """Implement ``BrokerRole.log_extent``: where masters are elected no cut reaches into it."""
        if self.features is None:
            return None
        stats, end = self._store.stats(), self.log().log_end()
        visible = self._reads.kept_to(end)
        if visible is None:
            return None
        return LogExtent(stats.store_id, stats.min_commitlog_offset, visible)

    def truncate(self, end_offset: CommitLogOffset) -> None:
        """Implement ``CopiedLog.truncate``."""
        self._check_confirmed(end_offset)
        self.log().read_raw(end_offset, max_bytes=0)  # or no record begins there
        self._rest("the end of this follower's log is cut")
        try:
            self.log().truncate(end_offset)
        except StoreClosed as error:
            # At once, before anybody asks the closed store for anything.
            self._given.transport.loop.fail(error)
            raise
        except StorageError:
            self._read()  # nothing was cut
            raise
        self._read()

    def _check_confirmed(self, kept: int) -> None:
        """Refuse a cut of confirmed records, unless the group's record says that they were lost."""
        if kept < self._reads.confirmed and self._unclean_since <= self._confirmed_epoch:
            raise RemoteProtocolError(
                f"the leader would have this replica go back to {kept}, though its log is "
                f"confirmed to {self._reads.confirmed}"
            )

    def _on_repaired(self) -> None:
        """Read again: tables and state get what they lacked of the log."""
        if self.features is not None:
            # Their rows went on without it.
            self.features.state.tables.begin_anew("the log of this follower was repaired")
        self._rest("the log of this follower was repaired")
        self._read()

    def become_copy(self, beginning: LogStart) -> None:
        """Implement ``CopiedLog.become_copy``."""
        if beginning.log_start <= self.log().log_end():
            # A leader whose log begins behind ours has had all confirmed records, and removed them.
            self._check_confirmed(beginning.log_start)
        self._rest("this follower begins a copy of its master's log")
        self.features = None
        self._store = self._replace_store(beginning)
        self._log = replicable(self._store)
        self._read()

    # ---- Commands --------------------------------------------------------------------

    def ha_status(self) -> HaStatus:
        """Return the status of this replica."""
        identity, config, link = self.log().identity(), self._given.config, self.link
        return HaStatus(
            config.broker_name,
            config.broker_id,
            self._given.state(),
            self._store.epoch(),
            identity.log_start,
            identity.log_end,
            self.durable_offset(),
            "" if link is None else link.leader,
            link is not None and link.streaming,
            0 if link is None else link.leader_end,
            confirmed=self._reads.confirmed,
            lag_ms=self._reads.lag_ms(self._given.clock.monotonic_ms()),
            problem=self._outside or ("" if link is None else link.failure or ""),
        )

    def _on_promote(
        self, request: Request, header: PromoteReplicaRequest
    ) -> PromoteReplicaResponse:
        """An administrator makes it the master."""
        config, link = self._given.config, self.link
        if config.ha.mode is HaMode.AUTO:
            raise InvalidArgument(
                f"the replicas of {config.broker_name!r} elect their master (ha.mode); nobody "
                "promotes one"
            )
        newest = max(self._store.epoch(), 0 if link is None else link.leader_epoch)
        if header.epoch not in (0, newest):
            raise InvalidArgument(f"the newest epoch is {newest} by now, not {header.epoch}")
        if link is not None and link.streaming:
            raise InvalidArgument(
                f"its master at {link.leader} is there, and both would take messages: stop it first"
            )
        if not self.log().identity().epochs:
            raise InvalidArgument("it never had anything of its master's log")
        offset = self.log().log_end()
        self._rest("this follower becomes the master")
        # Above those of a former master that is started again and does not know of this one.
        epoch = newest + EPOCHS_APART
        # In a turn of its own: it takes down what this handler belongs to.
        self._given.transport.loop.call_later(0, partial(self._promote, epoch))
        return PromoteReplicaResponse(epoch, offset)
