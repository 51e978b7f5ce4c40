"""Replication, on the side of the master: who gets which part of the log."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from mqmesh.coordination.interface import MemberIncarnation
from mqmesh.errors import (
    CorruptRecord,
    InvalidArgument,
    NotMaster,
    OffsetOutOfRange,
    StaleEpoch,
)
from mqmesh.log_identity import LogIdentity, common_end
from mqmesh.metrics import counter, gauge, histogram
from mqmesh.protocol.command import MAX_FRAME_BYTES, Answer, Reply, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import (
    MAX_CHUNK_BYTES,
    AckReplication,
    HaStatus,
    HaStatusRequest,
    OpenReplicationRequest,
    OpenReplicationResponse,
    PromoteReplicaRequest,
    ReadLogRequest,
    ReplicateLog,
    ReplicationMode,
    agreed_version,
)
from mqmesh.protocol.request import Peer, Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.followers.follower_table import (
    TURN_BYTES,
    Follower,
    FollowerTable,
)
from mqmesh.roles.broker.ha.leadership import ISOLATED, Leadership
from mqmesh.roles.broker.ha_config import HaMode
from mqmesh.roles.broker.writing.writes import Writes
from mqmesh.roles.dispatch import Handler
from mqmesh.storage.commitlog.log_copy import encode_log_start
from mqmesh.storage.interface import FlushDiskType, replicable
from mqmesh.token_bucket import TokenBucket
from mqmesh.units import CommitLogOffset

SIGN_OF_LIFE_MS: Final = 500
"""Interval at which an idle follower is sent the end of the log. The confirmed offset is sent as
soon as time is looked at, for a follower shows readers no more than that."""
HOLDER: Final = "replica {}"
"""The name under which the log is kept from retention for a follower."""

_OF_ELECTIONS: Final = (
    RequestCode.FENCE,
    RequestCode.STAND_FOR_ELECTION,
    RequestCode.SWITCH_OVER,
    RequestCode.ELECT_REPLICA,
    RequestCode.INIT_GROUP,
    RequestCode.CHANGE_VOTERS,
    RequestCode.PAUSE_FAILOVER,
    RequestCode.GET_HA_SETTINGS,
    RequestCode.PUT_HA_SETTINGS,
    RequestCode.HOLD_STILL,
)
"""Commands of groups that elect their master."""

_DOES: Final = {
    ReplicationMode.TRUNCATE: "cuts its log to",
    ReplicationMode.COPY: "copies the log from",
    ReplicationMode.RENEW: "becomes another member, since it lost what it had up to",
}

_log = logging.getLogger(__name__)


class ReplicationFeature(Feature):
    """Replication on the side of the master: followers get its log, and sends may wait for them.

    Args:
        core: The core of the broker.
        followers: Followers that are connected.
        writes: Answers sends that waited for followers.

    Attributes:
        followers: Followers that are connected.
    """

    def __init__(self, core: Core, followers: FollowerTable, writes: Writes) -> None:
        self._settings = core.settings
        self._clock = core.clock
        self._store = core.store
        self._state = core.state
        self._commit_point = core.commit_point
        self._leadership = core.leadership
        self._writes = writes
        self.followers = followers
        self.configured()

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {
            RequestCode.OPEN_REPLICATION: self.open_replication,
            RequestCode.ACK_REPLICATION: self.ack_replication,
            RequestCode.READ_LOG: self.read_log,
            RequestCode.GET_HA_STATUS: self.get_ha_status,
            RequestCode.PROMOTE_REPLICA: self.refuse_promotion,
            **dict.fromkeys(_OF_ELECTIONS, self.refuse_election),
        }

    def configured(self) -> None:
        """Take over how fast followers may catch up."""
        rate = self._settings.now.ha.max_ha_transfer_byte_in_second
        self.followers.catch_up_rate = TokenBucket(rate) if rate else None

    def client_gone(self, peer: Peer, now_ms: int) -> None:
        """Forget a follower; sends that waited for it wait for another, or for nobody."""
        one = self.followers.forget(peer)
        if one is not None:
            _log.warning("replica %d is gone, it had written to %d", one.replica_id, one.written)
            self._forget(one)
            self._writes.answer_confirmed()

    def open_replication(self, request: Request, header: OpenReplicationRequest) -> Reply:
        """Answer a follower, which says what it has, with how to go on."""
        if self._settings.now.ha.mode is HaMode.OFF:
            raise InvalidArgument(
                f'{self._settings.now.broker_name!r} has no replicas (ha.mode = "off"), so that '
                "nobody gets its log"
            )
        if header.broker_name != self._settings.now.broker_name:
            raise InvalidArgument(
                f"this is a replica of {self._settings.now.broker_name!r}, not of "
                f"{header.broker_name!r}"
            )
        if header.replica_id == self._settings.now.broker_id:
            raise InvalidArgument(f"replica {header.replica_id} is this one itself (broker_id)")
        version = agreed_version(header.version)
        store, log, leadership = self._store, replicable(self._store), self._leadership
        if leadership is not None:
            leadership.check_voter(header.broker_name, header.replica_id)
            try:
                leadership.check_promise(header.replica_id, header.promised_epoch)
            except StaleEpoch as error:
                self.followers.counts.stale_epochs += 1
                _log.warning("replica %d does not follow: %s", header.replica_id, error)
                raise
        ours = log.identity()
        mode, offset = how_to_go_on(ours, header.log)
        member = MemberIncarnation(header.replica_id, header.incarnation)
        if mode is ReplicationMode.STREAM and leadership is not None:
            if had := leadership.lost_by(member, offset):
                mode, offset = ReplicationMode.RENEW, had
        if mode is ReplicationMode.STREAM:
            now_ms = self._clock.monotonic_ms()
            if leadership is not None:
                leadership.on_opened(member, offset, header.synced, now_ms)
            self.followers.open(
                request.peer,
                header.replica_id,
                log_end=ours.log_end,
                offset=offset,
                now_ms=now_ms,
                zone=header.zone,
                serves_reads=header.serves_reads,
            )
            _log.info("replica %d follows from %d", header.replica_id, offset)
        else:
            self.followers.counts.nacks += 1
            _log.warning(
                "replica %d %s %d, before it follows", header.replica_id, _DOES[mode], offset
            )
        body: Sequence[bytes] = ()
        if mode in (ReplicationMode.STREAM, ReplicationMode.COPY):
            store.keep_from(HOLDER.format(header.replica_id), CommitLogOffset(offset))
        if mode is ReplicationMode.COPY:
            beginning = encode_log_start(log.beginning())
            if len(beginning) > MAX_FRAME_BYTES // 2:
                raise InvalidArgument(
                    f"too many queues without messages for a copy: {len(beginning)} bytes list "
                    f"them, {MAX_FRAME_BYTES // 2} may; delete topics that nobody needs"
                )
            body = (beginning,)
        # A log whose write failed has begun an epoch of its own, that nobody was elected for.
        epoch = store.epoch() if leadership is None else leadership.epoch
        answer = OpenReplicationResponse(int(mode), offset, epoch, version)
        return Reply(encode_header(answer), body)

    def ack_replication(self, request: Request, ack: AckReplication) -> None:
        """A follower says how far it is: sends that waited for it are answered."""
        now_ms = self._clock.monotonic_ms()
        more = self.followers.acknowledged(request.peer, ack.written, ack.synced, now_ms)
        one, leadership = self.followers.of(request.peer), self._leadership
        one.wish = ack.wish
        if leadership is not None:
            before = leadership.confirmed()
            leadership.on_ack(one.replica_id, ack.epoch, ack.written, ack.synced, one.sent, now_ms)
            more = leadership.confirmed() > before
        if more:
            self._writes.answer_confirmed()

    def read_log(self, request: Request, wanted: ReadLogRequest) -> Reply:
        """A replica gets records again that its disk has damaged; no more than is confirmed."""
        config, log = self._settings.now, replicable(self._store)
        if config.ha.mode is HaMode.OFF:
            raise InvalidArgument(f'{config.broker_name!r} has no replicas (ha.mode = "off")')
        if (wanted.broker_name, wanted.store_id) != (config.broker_name, log.identity().store_id):
            raise InvalidArgument(
                f"this is {config.broker_name!r}, log {log.identity().store_id:#010x}, and not "
                f"{wanted.broker_name!r}, log {wanted.store_id:#010x}"
            )
        end, (epoch, confirmed) = log.log_end(), self._terms()
        stop = end if self._leadership is None else min(CommitLogOffset(confirmed), end)
        chunk = log.read_raw(
            CommitLogOffset(wanted.start), max_bytes=wanted.size, stop=stop, whole_groups=False
        )
        header = ReplicateLog(
            chunk.start, chunk.end, chunk.segment_end, chunk.epoch, end, epoch, confirmed
        )
        return Reply(encode_header(header), (bytes(chunk.data),))

    def feed(self) -> bool:
        """Sends followers what is new in the log; True if there is more that they may have."""
        if self._leadership is not None:
            self._note_own(self._leadership)
        more = False
        for one in list(self.followers.by_peer.values()):
            more = self._feed(one) or more
        return more

    def note_durable(self) -> None:
        """The log was synced further."""
        if self._leadership is not None:
            self._note_own(self._leadership)

    def _note_own(self, leadership: Leadership) -> None:
        is_synced = self._settings.now.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH
        store = self._store
        if leadership.on_own(store.durable_offset() if is_synced else replicable(store).log_end()):
            self._writes.answer_confirmed()

    def _feed(self, one: Follower) -> bool:
        log, table = replicable(self._store), self.followers
        end = log.log_end()
        if one.sent == end:
            return False  # nearly always: this is asked at the end of each turn of the loop
        left, now_ms = TURN_BYTES, self._clock.monotonic_ms()
        while left > 0 and one.sent != end and (room := table.room(one, end, now_ms)) > 0:
            try:
                chunk = log.read_raw(
                    CommitLogOffset(one.sent), max_bytes=min(room, left, MAX_CHUNK_BYTES)
                )
            except (CorruptRecord, OffsetOutOfRange) as error:
                _log.error("replica %d gets no more of the log: %s", one.replica_id, error)
                table.forget(one.peer)
                self._forget(one)
                return False
            if not chunk.data:
                return False
            epoch, confirmed = self._terms()
            header = ReplicateLog(
                chunk.start,
                chunk.end,
                chunk.segment_end,
                chunk.epoch,
                end,
                epoch,
                confirmed,
            )
            code = RequestCode.REPLICATE_LOG
            one.peer.notify(code, encode_header(header), memoryview(chunk.data))
            table.sent(one, chunk.end, confirmed, now_ms)
            left -= len(chunk.data)
        return left <= 0

    def _terms(self) -> tuple[int, int]:
        """The leader's epoch, and how far its log is confirmed; zeros where nobody elects."""
        leadership = self._leadership
        return (0, 0) if leadership is None else (leadership.epoch, leadership.confirmed())

    def _forget(self, one: Follower) -> None:
        if self._leadership is not None:
            self._leadership.on_gone(one.replica_id)

    def tick(self, now_ms: int) -> None:
        """Send idle followers a sign of life; keep the log for those that were there lately."""
        if self._leadership is not None and self._leadership.is_isolated:
            self._writes.refuse_waiting(NotMaster(ISOLATED))
        if not self.followers.was_used:
            return
        log = replicable(self._store)
        for one in self.followers.silent(now_ms):
            _log.warning("replica %d hangs, it had written to %d", one.replica_id, one.written)
            self._forget(one)
        if self._leadership is not None:
            state = self._leadership.in_sync.state
            for one in [one for one in self.followers if not state.is_voter(one.replica_id)]:
                _log.warning("replica %d does not belong to the group any more", one.replica_id)
                self.followers.forget(one.peer)
                self._forget(one)
        if self._commit_point.waiting_count:
            self._writes.answer_confirmed()
        for replica_id, offset in self.followers.needed(now_ms):
            self._store.keep_from(HOLDER.format(replica_id), CommitLogOffset(offset))
        end, (epoch, confirmed) = log.log_end(), self._terms()
        header = encode_header(ReplicateLog(end, end, end, 0, end, epoch, confirmed))
        for one in self.followers.idle(now_ms, SIGN_OF_LIFE_MS, confirmed):
            one.peer.notify(RequestCode.REPLICATE_LOG, header)

    def get_ha_status(self, request: Request, header: HaStatusRequest) -> Answer:
        """Return the status of a master and its replicas, without the part of its membership."""
        return self.ha_status()

    def ha_status(self) -> HaStatus:
        """Return the status of a master and its replicas."""
        identity, leadership = replicable(self._store).identity(), self._leadership
        return HaStatus(
            self._settings.now.broker_name,
            self._settings.now.broker_id,
            _role(leadership),
            self._store.epoch(),
            identity.log_start,
            identity.log_end,
            int(self._store.durable_offset()),
            replicas=self.followers.status(self._clock.monotonic_ms()),
            in_sync=[] if leadership is None else leadership.members,
            confirmed=0 if leadership is None else leadership.confirmed(),
        )

    def refuse_promotion(self, request: Request, header: PromoteReplicaRequest) -> Reply:
        """Refuse: this replica is the master already."""
        raise InvalidArgument(
            f"this replica is the master of {self._settings.now.broker_name!r} already"
        )

    def refuse_election(self, request: Request, header: object) -> Reply:
        """Refuse an election: these replicas elect no master."""
        raise InvalidArgument(
            f"the replicas of {self._settings.now.broker_name!r} elect no master (ha.mode = "
            f"{self._settings.now.ha.mode.value!r})"
        )

    # ---- Metrics ---------------------------------------------------------------------------

    def _last_seen(self) -> dict[int, tuple[int, int]]:
        """Return the last report of each replica, also of hung and lost ones, and its time, by id.

        Of an elected master's group all replicas are; of another, one that was not heard for as
        long as the log is kept for it counts as taken away.
        """
        table, leadership = self.followers, self._leadership
        voters = () if leadership is None else leadership.in_sync.state.voters
        if not voters:
            retain_ms = self._settings.now.ha.ha_retain_for_slaves_ms
            return table.last_seen(since_ms=self._clock.monotonic_ms() - retain_ms)
        last_seen, never = table.last_seen(), (0, table.began_ms)
        return {
            one: last_seen.get(one, never) for one in voters if one != self._settings.now.broker_id
        }

    def _lag_bytes(self) -> dict[tuple[str, ...], int]:
        last_seen = self._last_seen()
        end = self._store.stats().max_commitlog_offset if last_seen else 0
        return {(str(one),): max(end - written, 0) for one, (written, _) in last_seen.items()}

    def _silent_ms(self) -> dict[tuple[str, ...], int]:
        now_ms = self._clock.monotonic_ms()
        last_seen = self._last_seen()
        return {(str(one),): max(now_ms - seen_ms, 0) for one, (_, seen_ms) in last_seen.items()}

    def _lag_ms(self) -> dict[tuple[str, ...], int]:
        """Since when followers of an elected master lack something, by replica."""
        leadership, now_ms = self._leadership, self._clock.monotonic_ms()
        if leadership is None:
            return {}
        lags = leadership.in_sync.lags_ms(self._store.stats().max_commitlog_offset, now_ms)
        return {(str(replica_id),): lag_ms for replica_id, lag_ms in lags.items()}

    def _unconfirmed(self) -> int:
        if self._leadership is None:
            return 0
        return max(self._store.stats().max_commitlog_offset - self._leadership.confirmed(), 0)

    metrics = (
        gauge(
            "ha_followers", "followers that are connected", lambda feature: len(feature.followers)
        ),
        gauge(
            "ha_replica_lag_bytes",
            "what a follower has not written yet, one that is gone too",
            lambda feature: feature._lag_bytes(),
            labels=("replica",),
        ),
        gauge(
            "ha_replica_lag_ms",
            "since when a follower of an elected master lacks something",
            lambda feature: feature._lag_ms(),
            labels=("replica",),
        ),
        gauge(
            "ha_replica_silent_ms",
            "since a follower was heard, one that is gone too",
            lambda feature: feature._silent_ms(),
            labels=("replica",),
        ),
        gauge(
            "ha_epoch",
            "of a master that was elected",
            lambda feature: 0 if feature._leadership is None else feature._leadership.epoch,
        ),
        gauge(
            "ha_in_sync",
            "replicas in sync, of a master that was elected",
            lambda feature: 0 if feature._leadership is None else len(feature._leadership.members),
        ),
        gauge(
            "ha_confirmed_lag_bytes",
            "of the log that may still be taken back, of a master that was elected",
            lambda feature: feature._unconfirmed(),
        ),
        histogram(
            "ha_ack_wait_ms",
            "how long sends waited for followers, or for the disk",
            lambda feature: feature._commit_point.waits_ms.read(),
        ),
        counter(
            "ha_state_records_total",
            "records of topics, groups and offsets that were put into the log",
            lambda feature: feature._state.records_written,
        ),
    )


def how_to_go_on(ours: LogIdentity, theirs: LogIdentity) -> tuple[ReplicationMode, int]:
    """Return the first step of a follower, and the commit-log offset at which it is taken. Pure.

    Args:
        ours: Log of the leader.
        theirs: Log of the follower.
    """
    is_same = (ours.store_id, ours.key_proof) == (theirs.store_id, theirs.key_proof)
    found = common_end(ours.epochs, ours.log_end, theirs.epochs, theirs.log_end)
    if is_same and theirs.log_start == theirs.log_end == ours.log_start:
        return ReplicationMode.STREAM, ours.log_start  # a copy that has no record yet
    if not is_same or found is None:
        return ReplicationMode.COPY, ours.log_start
    if found.end_offset < ours.log_start or found.end_offset < theirs.log_start:
        return ReplicationMode.COPY, ours.log_start
    if found.end_offset < theirs.log_end:
        return ReplicationMode.TRUNCATE, found.end_offset
    return ReplicationMode.STREAM, found.end_offset


def _role(leadership: Leadership | None) -> str:
    if leadership is None or not (leadership.is_isolated or leadership.closing):
        return "MASTER" if leadership is None or leadership.is_confirmed else "STARTING_MASTER"
    return "ISOLATED" if leadership.is_isolated else "HANDING_OVER"
