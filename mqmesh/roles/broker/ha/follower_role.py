"""A follower: copies the log of its group's master, derives all from it, and serves reads.

It writes nothing of its own. An administrator may make it the master.
"""

from collections.abc import Callable
from functools import partial

from mqmesh.errors import InvalidArgument, NotMaster
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
from mqmesh.roles.broker.ha.replica_link import LogCopy, ReplicaLink
from mqmesh.roles.broker.role import BrokerRole
from mqmesh.storage.interface import LogBeginning, MessageStore, ReplicableLog, replicable
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.units import CommitLogOffset


class FollowerRole(BrokerRole):
    """A follower, from now on.

    Args:
        given: What the process gives.
        store: Messages, open.
        replace_store: Closes the store and opens another in its place, an empty copy of what is
            told.
        promote: Ends this role and begins that of the master, with an epoch of its own.

    Attributes:
        link: To the leader.

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
    ) -> None:
        super().__init__(given, given.config.broker_id)
        self._store = store
        self._replace_store = replace_store
        self._promote = promote
        self._read()
        config, leader = given.config, given.config.ha.master_addr
        self.link = ReplicaLink(
            config.broker_name,
            config.broker_id,
            given.instance_id,
            leader,
            LogCopy(self._log, self._durable, self._grown, self._truncate, self._become_copy),
            connect=lambda on_command, on_connection: given.transport.connect(
                endpoint_of(leader), on_command=on_command, on_connection=on_connection
            ),
            clock=given.clock,
        )

    def turn_ended(self, turn: BrokerTurn) -> bool:
        """See ``BrokerRole.turn_ended``."""
        self.link.turn_ended()
        return super().turn_ended(turn)

    def tick(self, now_ms: int) -> None:
        """See ``BrokerRole.tick``."""
        self.link.tick(now_ms)
        super().tick(now_ms)

    def close(self) -> None:
        """See ``BrokerRole.close``."""
        super().close()
        self.link.close()

    def _read(self) -> None:
        """Builds what is derived from the log as it is now, and serves it."""
        given, config = self._given, self._given.config
        tables = make_tables(given, self._store)
        tables.load_copy()
        who = f"broker {config.broker_id} of {config.broker_name}"
        given.shell.dispatch.refuse(f"{who} follows {config.ha.master_addr}", NotMaster)
        context = build_context(given, self._store, tables)
        self._serve(context, FOLLOWER_FEATURES if config.ha.slave_read_enable else ())
        given.shell.dispatch.open(
            {
                RequestCode.GET_HA_STATUS: self._get_ha_status,
                RequestCode.PROMOTE_REPLICA: self._on_promote,
                RequestCode.GET_BROKER_RUNTIME_INFO: given.shell.runtime_info,
            }
        )
        if given.shell.state == "running":
            self.announce()

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
        identity, config = self._log().identity(), self._given.config
        return reply_with(
            HaStatus(
                config.broker_name,
                config.broker_id,
                "FOLLOWING",
                self._store.epoch(),
                identity.log_start,
                identity.log_end,
                self._durable(),
                self.link.leader,
                self.link.streaming,
                self.link.leader_end,
            )
        )

    def _on_promote(self, request: Request, asked: PromoteReplicaRequest) -> Reply:
        """An administrator makes it the master."""
        newest = max(self._store.epoch(), self.link.leader_epoch)
        if asked.epoch not in (0, newest):
            raise InvalidArgument(f"the newest epoch is {newest} by now, not {asked.epoch}")
        if self.link.streaming:
            raise InvalidArgument(
                f"its master at {self.link.leader} is there, and both would take messages: stop it "
                "first"
            )
        if not self._log().identity().epochs:
            raise InvalidArgument("it never had anything of its master's log")
        offset = self._log().log_end()
        self._rest("this follower becomes the master")
        # In a turn of its own: it takes down what this handler belongs to.
        self._given.transport.loop.call_later(0, partial(self._promote, newest + 1))
        return reply_with(PromoteReplicaResponse(newest + 1, offset))
