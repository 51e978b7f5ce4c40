"""A follower: copies the log of its group's master, derives all from it, and serves reads.

It writes nothing of its own. An administrator may make it the master, or its group elects it.
"""

from collections.abc import Callable
from functools import partial

from mqmesh.errors import InvalidArgument, NotMaster
from mqmesh.log_identity import EPOCHS_APART
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import Reply, Request, reply_with
from mqmesh.protocol.replication import (
    HaStatus,
    HaStatusRequest,
    PromoteReplicaRequest,
    PromoteReplicaResponse,
)
from mqmesh.roles.broker.all_features import FOLLOWER_FEATURES
from mqmesh.roles.broker.context_building import BrokerResources, build_context, make_tables
from mqmesh.roles.broker.feature import BrokerTurn
from mqmesh.roles.broker.features.pulls.pull import wake_pulls
from mqmesh.roles.broker.ha.ha_config import HaMode
from mqmesh.roles.broker.ha.promises import Promises
from mqmesh.roles.broker.ha.replica_link import LogCopy, ReplicaLink
from mqmesh.roles.broker.role import BrokerRole
from mqmesh.storage.interface import LogBeginning, MessageStore, ReplicableLog, replicable
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.units import MAX_OFFSET, CommitLogOffset


def _everything() -> int:
    return MAX_OFFSET


class FollowerRole(BrokerRole):
    """A follower, from now on.

    Args:
        given: What the process gives.
        store: Messages, open.
        replace_store: Closes the store and opens another in its place, an empty copy of what is
            told.
        promote: Ends this role and begins that of the master, with an epoch of its own.
        promises: Whom it may follow.

    Attributes:
        link: To the leader, None while it follows nobody.

    Raises:
        CorruptRecord: What the log tells of topics, groups or offsets is damaged.
    """

    def __init__(
        self,
        given: BrokerResources,
        store: MessageStore,
        *,
        replace_store: Callable[[LogBeginning], MessageStore],
        promote: Callable[[int], None],
        promises: Promises,
    ) -> None:
        super().__init__(given, given.config.broker_id)
        self._store = store
        self._replace_store = replace_store
        self._promote = promote
        self._promises = promises
        self.link: ReplicaLink | None = None
        self._alone_ms = given.clock.monotonic_ms()
        self._read()

    def follow(self, leader: str) -> None:
        """Follows a leader from now on, or nobody.

        Args:
            leader: Where it listens, ``host:port``; "" for nobody.
        """
        given, config = self._given, self._given.config
        if self.link is not None:
            self.link.close()
            self.link = None
        self._alone_ms = given.clock.monotonic_ms()
        if leader:
            self.link = ReplicaLink(
                config.broker_name,
                config.broker_id,
                given.instance_id,
                leader,
                LogCopy(
                    self._log,
                    self._durable,
                    self._grown,
                    self._truncate,
                    self._become_copy,
                    self._promises,
                    given.link_counts,
                ),
                connect=lambda on_command, on_connection: given.transport.connect(
                    endpoint_of(leader), on_command=on_command, on_connection=on_connection
                ),
                clock=given.clock,
                call_later=given.transport.loop.call_later,
            )
        self._refuse()

    def silent_ms(self, now_ms: int) -> int:
        """Since the leader was heard, or since nobody is followed."""
        return now_ms - (self._alone_ms if self.link is None else self.link.heard_ms)

    def turn_ended(self, turn: BrokerTurn) -> bool:
        """See ``BrokerRole.turn_ended``."""
        if self.link is not None:
            self.link.turn_ended()
        return super().turn_ended(turn)

    def tick(self, now_ms: int) -> None:
        """See ``BrokerRole.tick``."""
        if self.link is not None:
            self.link.tick(now_ms)
        super().tick(now_ms)

    def close(self) -> None:
        """See ``BrokerRole.close``."""
        super().close()
        if self.link is not None:
            self.link.close()

    def _read(self) -> None:
        """Builds what is derived from the log as it is now, and serves it."""
        given = self._given
        self._store.show_to(_everything)
        tables = make_tables(given, self._store)
        tables.load_copy()
        self.context = build_context(given, self._store, tables)
        self._refuse()
        if given.shell.state == "running":
            self.announce()

    def _refuse(self) -> None:
        """Refuses what only the master does, and serves the rest."""
        given, config, context = self._given, self._given.config, self.context
        assert context is not None
        leader = "nobody yet" if self.link is None else self.link.leader
        who = f"broker {config.broker_id} of {config.broker_name}"
        given.shell.dispatch.refuse(f"{who} follows {leader}", NotMaster)
        # Where masters are elected what a follower has may be taken back: it is not shown.
        reads = config.ha.slave_read_enable and config.ha.mode is not HaMode.AUTO
        self._serve(context, FOLLOWER_FEATURES if reads else ())
        given.shell.dispatch.open(
            {
                RequestCode.GET_HA_STATUS: self._get_ha_status,
                RequestCode.PROMOTE_REPLICA: self._on_promote,
                RequestCode.GET_BROKER_RUNTIME_INFO: given.shell.runtime_info,
            }
        )

    # ---- The log ---------------------------------------------------------------------

    def _log(self) -> ReplicableLog:
        return replicable(self._store)

    def _durable(self) -> int:
        return int(self._store.durable_offset())

    def _grown(self) -> None:
        context = self.context
        if context is None:
            return
        context.state.follow()
        for key in list(context.holds.queues):
            wake_pulls(context, *key)

    def _truncate(self, end_offset: CommitLogOffset) -> None:
        self._rest("the end of this follower's log is cut")
        self._log().truncate(end_offset)
        self._read()

    def _become_copy(self, beginning: LogBeginning) -> None:
        self._rest("this follower begins a copy of its master's log")
        self.context = None
        self._store = self._replace_store(beginning)
        self._read()

    # ---- Commands --------------------------------------------------------------------

    def _get_ha_status(self, request: Request, asked: HaStatusRequest) -> Reply:
        return reply_with(self.ha_status())

    def ha_status(self) -> HaStatus:
        """How this replica is."""
        identity, config, link = self._log().identity(), self._given.config, self.link
        return HaStatus(
            config.broker_name,
            config.broker_id,
            self._given.state(),
            self._store.epoch(),
            identity.log_start,
            identity.log_end,
            self._durable(),
            "" if link is None else link.leader,
            link is not None and link.streaming,
            0 if link is None else link.leader_end,
            confirmed=0 if link is None else link.confirmed,
        )

    def _on_promote(self, request: Request, asked: PromoteReplicaRequest) -> Reply:
        """An administrator makes it the master."""
        config, link = self._given.config, self.link
        if config.ha.mode is HaMode.AUTO:
            raise InvalidArgument(
                f"the replicas of {config.broker_name!r} elect their master (ha.mode); nobody "
                "promotes one"
            )
        newest = max(self._store.epoch(), 0 if link is None else link.leader_epoch)
        if asked.epoch not in (0, newest):
            raise InvalidArgument(f"the newest epoch is {newest} by now, not {asked.epoch}")
        if link is not None and link.streaming:
            raise InvalidArgument(
                f"its master at {link.leader} is there, and both would take messages: stop it first"
            )
        if not self._log().identity().epochs:
            raise InvalidArgument("it never had anything of its master's log")
        offset = self._log().log_end()
        self._rest("this follower becomes the master")
        # Above those of a former master that is started again and has not heard of this one.
        epoch = newest + EPOCHS_APART
        # In a turn of its own: it takes down what this handler belongs to.
        self._given.transport.loop.call_later(0, partial(self._promote, epoch))
        return reply_with(PromoteReplicaResponse(epoch, offset))
