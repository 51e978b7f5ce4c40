"""Replication, on the side of the master: who gets which part of the log."""

import logging
from collections.abc import Sequence
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
from mqmesh.protocol.codes import RequestCode
from mqmesh.protocol.command import MAX_FRAME_BYTES, Reply, Request, encode_header, reply_with
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
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import BrokerTurn
from mqmesh.roles.broker.features.replicas.follower_table import TURN_BYTES, Follower
from mqmesh.roles.broker.features.storing.storing import answer_confirmed, refuse_waiting
from mqmesh.roles.broker.ha.ha_config import HaMode
from mqmesh.roles.broker.ha.leadership import ISOLATED, Leadership
from mqmesh.storage.commitlog.log_copy import encode_beginning
from mqmesh.storage.interface import FlushDiskType, replicable
from mqmesh.units import CommitLogOffset

SIGN_OF_LIFE_MS: Final = 500
"""A follower that gets nothing else is told so often where the log ends; what is confirmed, as soon
as time is looked at, for it shows readers no more than that."""
HOLDER: Final = "replica {}"
"""The name under which the log is kept from retention for a follower."""

_DOES: Final = {
    ReplicationMode.TRUNCATE: "cuts its log to",
    ReplicationMode.COPY: "copies the log from",
    ReplicationMode.RENEW: "becomes another member, since it lost what it had up to",
}

_log = logging.getLogger(__name__)


def open_replication(
    context: BrokerContext, request: Request, asked: OpenReplicationRequest
) -> Reply:
    """A follower says what it has, and is told how to go on."""
    if context.config.ha.mode is HaMode.OFF:
        raise InvalidArgument(
            f'{context.config.broker_name!r} has no replicas (ha.mode = "off"), so that nobody '
            "gets its log"
        )
    if asked.broker_name != context.config.broker_name:
        raise InvalidArgument(
            f"this is a replica of {context.config.broker_name!r}, not of {asked.broker_name!r}"
        )
    if asked.replica_id == context.config.broker_id:
        raise InvalidArgument(f"replica {asked.replica_id} is this one itself (broker_id)")
    version = agreed_version(asked.version)
    store, log, leadership = context.store, replicable(context.store), context.leadership
    if leadership is not None:
        leadership.check_voter(asked.broker_name, asked.replica_id)
        try:
            leadership.check_promise(asked.replica_id, asked.promised_epoch)
        except StaleEpoch as error:
            context.followers.counts.stale_epochs += 1
            _log.warning("replica %d does not follow: %s", asked.replica_id, error)
            raise
    ours = log.identity()
    mode, offset = how_to_go_on(ours, asked.log)
    member = MemberIncarnation(asked.replica_id, asked.incarnation)
    if mode is ReplicationMode.STREAM and leadership is not None:
        if had := leadership.lost_by(member, offset):
            mode, offset = ReplicationMode.RENEW, had
    if mode is ReplicationMode.STREAM:
        now_ms = context.clock.monotonic_ms()
        if leadership is not None:
            leadership.on_opened(member, offset, asked.synced, now_ms)
        context.followers.open(
            request.peer,
            asked.replica_id,
            log_end=ours.log_end,
            offset=offset,
            now_ms=now_ms,
            zone=asked.zone,
            serves_reads=asked.serves_reads,
        )
        _log.info("replica %d follows from %d", asked.replica_id, offset)
    else:
        context.followers.counts.nacks += 1
        _log.warning("replica %d %s %d, before it follows", asked.replica_id, _DOES[mode], offset)
    body: Sequence[bytes] = ()
    if mode in (ReplicationMode.STREAM, ReplicationMode.COPY):
        store.keep_from(HOLDER.format(asked.replica_id), CommitLogOffset(offset))
    if mode is ReplicationMode.COPY:
        beginning = encode_beginning(log.beginning())
        if len(beginning) > MAX_FRAME_BYTES // 2:
            raise InvalidArgument(
                f"too many queues without messages for a copy: {len(beginning)} bytes tell of "
                f"them, {MAX_FRAME_BYTES // 2} may; delete topics that nobody needs"
            )
        body = (beginning,)
    # A log whose write failed has begun an epoch of its own, that nobody was elected for.
    epoch = store.epoch() if leadership is None else leadership.epoch
    answer = OpenReplicationResponse(int(mode), offset, epoch, version)
    return Reply(encode_header(answer), body)


def how_to_go_on(ours: LogIdentity, theirs: LogIdentity) -> tuple[ReplicationMode, int]:
    """What a follower does first, and the commit-log offset at which. Pure.

    Args:
        ours: What the leader has.
        theirs: What the follower has.
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


def ack_replication(context: BrokerContext, request: Request, ack: AckReplication) -> None:
    """A follower says how far it is: sends that waited for it are answered."""
    now_ms = context.clock.monotonic_ms()
    more = context.followers.acknowledged(request.peer, ack.written, ack.synced, now_ms)
    leadership = context.leadership
    if leadership is not None:
        one = context.followers.of(request.peer)
        before = leadership.confirmed()
        leadership.on_ack(one.replica_id, ack.epoch, ack.written, ack.synced, one.sent, now_ms)
        more = leadership.confirmed() > before
    if more:
        answer_confirmed(context)


def read_log(context: BrokerContext, request: Request, asked: ReadLogRequest) -> Reply:
    """A replica gets records again that its disk has damaged; no more than is confirmed."""
    config, log = context.config, replicable(context.store)
    if config.ha.mode is HaMode.OFF:
        raise InvalidArgument(f'{config.broker_name!r} has no replicas (ha.mode = "off")')
    if (asked.broker_name, asked.store_id) != (config.broker_name, log.identity().store_id):
        raise InvalidArgument(
            f"this is {config.broker_name!r}, log {log.identity().store_id:#010x}, and not "
            f"{asked.broker_name!r}, log {asked.store_id:#010x}"
        )
    end, (epoch, confirmed) = log.log_end(), _terms(context)
    stop = end if context.leadership is None else min(CommitLogOffset(confirmed), end)
    chunk = log.read_raw(CommitLogOffset(asked.start), max_bytes=asked.size, stop=stop)
    header = ReplicateLog(
        chunk.start, chunk.end, chunk.segment_end, chunk.epoch, end, epoch, confirmed
    )
    return Reply(encode_header(header), (bytes(chunk.data),))


def feed(context: BrokerContext, turn: BrokerTurn) -> bool:
    """Sends followers what is new in the log; True if there is more that they may have."""
    if context.leadership is not None:
        _note_own(context, context.leadership)
    more = [_feed(context, one) for one in context.followers]
    return any(more)


def note_durable(context: BrokerContext) -> None:
    """The log was synced further."""
    if context.leadership is not None:
        _note_own(context, context.leadership)


def _note_own(context: BrokerContext, leadership: Leadership) -> None:
    is_synced = context.config.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH
    store = context.store
    if leadership.on_own(store.durable_offset() if is_synced else replicable(store).log_end()):
        answer_confirmed(context)


def _feed(context: BrokerContext, one: Follower) -> bool:
    log, table = replicable(context.store), context.followers
    left, now_ms = TURN_BYTES, context.clock.monotonic_ms()
    while left > 0 and (room := table.room(one, log.log_end(), now_ms)) > 0:
        try:
            chunk = log.read_raw(
                CommitLogOffset(one.sent), max_bytes=min(room, left, MAX_CHUNK_BYTES)
            )
        except (CorruptRecord, OffsetOutOfRange) as error:
            _log.error("replica %d gets no more of the log: %s", one.replica_id, error)
            table.forget(one.peer)
            _forget(context, one)
            return False
        if not chunk.data:
            return False
        epoch, confirmed = _terms(context)
        header = ReplicateLog(
            chunk.start,
            chunk.end,
            chunk.segment_end,
            chunk.epoch,
            log.log_end(),
            epoch,
            confirmed,
        )
        code = RequestCode.REPLICATE_LOG
        context.wire.notify(one.peer, code, encode_header(header), chunk.data)
        table.sent(one, chunk.end, confirmed, now_ms)
        left -= len(chunk.data)
    return left <= 0


def _terms(context: BrokerContext) -> tuple[int, int]:
    """The leader's epoch, and how far its log is confirmed; zeros where nobody elects."""
    leadership = context.leadership
    return (0, 0) if leadership is None else (leadership.epoch, leadership.confirmed())


def forget_follower(context: BrokerContext, peer: bytes, now_ms: int) -> None:
    """A connection broke; who waited for this follower waits for another, or for nobody."""
    one = context.followers.forget(peer)
    if one is not None:
        _log.warning("replica %d is gone, it had written to %d", one.replica_id, one.written)
        _forget(context, one)
        answer_confirmed(context)


def _forget(context: BrokerContext, one: Follower) -> None:
    if context.leadership is not None:
        context.leadership.on_gone(one.replica_id)


def tick(context: BrokerContext, now_ms: int) -> None:
    """Tells idle followers that the master lives; keeps the log for those heard lately."""
    if context.leadership is not None and context.leadership.is_isolated:
        refuse_waiting(context, NotMaster(ISOLATED))
    if not context.followers.was_used:
        return
    log = replicable(context.store)
    for one in context.followers.silent(now_ms):
        _log.warning("replica %d hangs, it had written to %d", one.replica_id, one.written)
        _forget(context, one)
    if context.leadership is not None:
        state = context.leadership.in_sync.state
        for one in [one for one in context.followers if not state.is_voter(one.replica_id)]:
            _log.warning("replica %d does not belong to the group any more", one.replica_id)
            context.followers.forget(one.peer)
            _forget(context, one)
    if context.commit_point.waiting_count:
        answer_confirmed(context)
    for replica_id, offset in context.followers.needed(now_ms):
        context.store.keep_from(HOLDER.format(replica_id), CommitLogOffset(offset))
    end, (epoch, confirmed) = log.log_end(), _terms(context)
    header = encode_header(ReplicateLog(end, end, end, 0, end, epoch, confirmed))
    for one in context.followers.idle(now_ms, SIGN_OF_LIFE_MS, confirmed):
        context.wire.notify(one.peer, RequestCode.REPLICATE_LOG, header)


def get_ha_status(context: BrokerContext, request: Request, asked: HaStatusRequest) -> Reply:
    """How a master and its replicas are, but for what only its membership knows."""
    return reply_with(ha_status(context))


def ha_status(context: BrokerContext) -> HaStatus:
    """How a master and its replicas are."""
    identity, leadership = replicable(context.store).identity(), context.leadership
    return HaStatus(
        context.config.broker_name,
        context.config.broker_id,
        _role(leadership),
        context.store.epoch(),
        identity.log_start,
        identity.log_end,
        int(context.store.durable_offset()),
        replicas=context.followers.status(context.clock.monotonic_ms()),
        in_sync=[] if leadership is None else leadership.members,
        confirmed=0 if leadership is None else leadership.confirmed(),
    )


def _role(leadership: Leadership | None) -> str:
    if leadership is None or not (leadership.is_isolated or leadership.closing):
        return "MASTER" if leadership is None or leadership.is_confirmed else "STARTING_MASTER"
    return "ISOLATED" if leadership.is_isolated else "HANDING_OVER"


def refuse_promotion(
    context: BrokerContext, request: Request, asked: PromoteReplicaRequest
) -> Reply:
    """It is the master."""
    raise InvalidArgument(f"this replica is the master of {context.config.broker_name!r} already")


def refuse_election(context: BrokerContext, request: Request, asked: object) -> Reply:
    """Nobody is elected here."""
    raise InvalidArgument(
        f"the replicas of {context.config.broker_name!r} elect no master (ha.mode = "
        f"{context.config.ha.mode.value!r})"
    )
