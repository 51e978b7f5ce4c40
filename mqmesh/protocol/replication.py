"""Words between the replicas of a broker group: how a follower gets its leader's log.

A follower opens the replication and reports the state of its log. The leader answers how to go on,
and from then on sends chunks of its log on its own: never more than ``ha_window_bytes`` beyond the
follower's last acknowledgement.
"""

import enum
from typing import Annotated, Final

import msgspec

from mqmesh.errors import InvalidArgument
from mqmesh.log_identity import EpochStart, LogIdentity
from mqmesh.protocol.names import GroupName, TopicName
from mqmesh.protocol.pulling import Zone
from mqmesh.protocol.route import Epoch, Name
from mqmesh.units import MAX_OFFSET

REPLICATION_VERSION: Final = 2
"""The newest that this program speaks. Two replicas speak the smaller one of theirs, so that those
of a group are upgraded one after the other, followers first."""
OLDEST_REPLICATION_VERSION: Final = 2
"""The oldest that it still speaks: that of the release before. Replicas of version 1 know no groups
in the log."""
MAX_REPLICA_ID: Final = 64
MAX_HOLD_MS: Final = 600_000
MAX_CHUNK_BYTES: Final = 1024 * 1024
"""Most bytes of a chunk of several records; one record alone is sent, of any size."""

MOST_HELD_COMMITS: Final = 10_000
"""Most commits handed over by one request."""

Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]


class ReplicationMode(enum.IntEnum):
    """Ways in which a follower goes on."""

    STREAM = 0
    """The follower's log is the beginning of the leader's: chunks will come."""
    TRUNCATE = 1
    """The follower has records that the leader has not: it cuts its log, and opens again."""
    COPY = 2
    """The follower has nothing in common with the leader, or ends before the leader's log begins:
    it makes its store an empty copy, and opens again."""
    RENEW = 3
    """The follower lacks records that it had acknowledged to this leader: it draws another
    incarnation, so that no replica relies on its earlier one, and opens again."""


def agreed_version(theirs: int) -> int:
    """Return the version that two replicas speak: the smaller of the newest versions of both.

    Args:
        theirs: The newest of the other one.

    Raises:
        InvalidArgument: This program does not speak it any more.
    """
    version = min(theirs, REPLICATION_VERSION)
    if version < OLDEST_REPLICATION_VERSION:
        raise InvalidArgument(
            f"the other replica speaks version {theirs} of the replication at most, this one "
            f"{OLDEST_REPLICATION_VERSION} to {REPLICATION_VERSION}: upgrade the other one, by way "
            "of a release between if there is one"
        )
    return version


class OpenReplicationRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """OPEN_REPLICATION: a follower wants its master's log.

    ``log`` and, with the mode COPY, the body of the answer are structs of the store; see
    docs/storage-format.md.

    Attributes:
        broker_name: Broker group.
        replica_id: Of the follower, 1 to 64.
        instance_id: Random number of this life of its process.
        version: Newest version of the replication that the follower speaks, 2.
        log: Identity of the follower's log.
        synced: Commit-log offset to which the log is on its disk.
        incarnation: Incarnation of its store, see ``coordination.interface.MemberIncarnation``; 0
            where no master is elected.
        promised_epoch: The follower accepts no leader of an earlier epoch.
        zone: Location of the follower.
        serves_reads: Consumers may be directed to read from it.

    Errors:
        MESSAGE_ILLEGAL: Of another group, or ahead of its master.
        NOT_MASTER: The broker leads no more.
        STALE_EPOCH: The follower has promised a later epoch than the master's.
    """

    broker_name: Name
    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]
    instance_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    version: int
    log: LogIdentity
    synced: Offset = 0
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)] = 0
    promised_epoch: Epoch = 0
    zone: Zone = ""
    serves_reads: bool = True


class OpenReplicationResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to OPEN_REPLICATION; with ``COPY`` the body is an encoded ``LogStart``.

    Attributes:
        mode: ``ReplicationMode``.
        offset: Commit-log offset from which chunks come, or at which the follower cuts its log, or
            that it had acknowledged.
        epoch: Of the leader.
        version: Common version: the smaller one.
    """

    mode: int
    offset: Offset
    epoch: Epoch
    version: int = REPLICATION_VERSION


class ReplicateLog(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """REPLICATE_LOG: from the leader to a follower, oneway: a chunk of the log as the body, whole
    records of one segment and one epoch. Without a body it is a sign of life. A follower that finds
    an error in it opens the replication again.

    Attributes:
        start: Commit-log offset of the first record.
        end: Of the record behind the last one.
        segment_end: Where their segment ends.
        epoch: Of all of them.
        leader_end: Where the leader's log ends; without records this is a sign of life.
        leader_epoch: Of the leader.
        confirmed: Commit-log offset before which no failover takes anything back, as far as the
            leader knows.
    """

    start: Offset
    end: Offset
    segment_end: Offset
    epoch: Epoch
    leader_end: Offset
    leader_epoch: Epoch = 0
    confirmed: Offset = 0


class AckReplication(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ACK_REPLICATION: position of a follower, oneway: after each turn of its loop in which it got
    more, and each 200 ms. A follower that reports an impossible one is sent nothing until it opens
    the replication again.

    Attributes:
        written: Commit-log offset to which the log is written.
        synced: Commit-log offset to which it is on the disk.
        epoch: Epoch of the leader, as it answered.
        wish: Commit-log offset up to which the follower's retention would remove the log, if no
            other process kept it; 0 if it would remove nothing more.
    """

    written: Offset
    synced: Offset
    epoch: Epoch = 0
    wish: Offset = 0


class ReadLogRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """READ_LOG: records again that the disk of a replica has damaged; the answer's body is their
    bytes, as in a chunk.

    Where masters are elected only confirmed records are given. The replica checks every record
    before it writes the bytes in the place of the damaged ones.

    Attributes:
        broker_name: Broker group.
        store_id: Of the log.
        start: Commit-log offset of the first record.
        size: Bytes; one record is given, of any size.

    Errors:
        MESSAGE_ILLEGAL: Of another group or log, or ``ha.mode`` is off.
        OFFSET_ILLEGAL: Not confirmed yet, or removed.
        SYSTEM_ERROR: Damaged there, too.
    """

    broker_name: Name
    store_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    start: Offset
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]


class EpochsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_EPOCHS: identity of a replica's log, and where each epoch begins: where two logs part."""


class LogEpochs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_EPOCHS: the log of a replica, and the epochs of its parts.

    Attributes:
        broker_id: Broker id of the replica.
        store_id: Store id of the log.
        log_start: Commit-log offset of its oldest record.
        log_end: Commit-log offset of the next record.
        confirmed: End of the log's part that no failover takes back, as far as the replica knows;
            0 where no master is elected.
        epochs: Epochs in ascending order, each with the commit-log offset where it begins.
    """

    broker_id: int
    store_id: int
    log_start: Offset
    log_end: Offset
    confirmed: Offset
    epochs: list[EpochStart]


class ChecksumLogRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CHECKSUM_LOG: checksums of a stretch of a replica's log on its disk: whole records of one
    segment and one epoch, 1 MiB at most. ``mqmesh ha verify`` compares them.

    Attributes:
        store_id: Of the log.
        start: Commit-log offset of the first record.
        stop: No record that ends behind it counts.
        size: Bytes; one record counts, of any size.

    Errors:
        MESSAGE_ILLEGAL: Another store's log.
        OFFSET_ILLEGAL: The log is gone there, or does not reach as far.
    """

    store_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    start: Offset
    stop: Offset
    size: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)]


class ChecksumLogResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to CHECKSUM_LOG: whole records of one segment and one epoch, or none.

    Attributes:
        broker_id: Of the replica.
        end: Commit-log offset behind them; ``start`` if there are none.
        digest: BLAKE2b of their bytes, 16 bytes; none if there are no records.
        problem: Why the records there cannot be read; "" if they can.
    """

    broker_id: int
    end: Offset
    digest: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    problem: str = ""


class HeldCommit(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An offset that a group committed at a follower while its master was gone. Also on disk.

    Attributes:
        group: Consumer group.
        topic: Physical topic.
        queue_id: Message queue.
        known_offset: Offset of the group in the follower's log before; -1 for none.
        queue_offset: Where the group goes on.
        epoch: Of the log that the offset is of.
    """

    group: GroupName
    topic: TopicName
    queue_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    known_offset: Annotated[int, msgspec.Meta(ge=-1, le=MAX_OFFSET)]
    queue_offset: Offset
    epoch: Epoch = 0


class HandOverCommitsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """HAND_OVER_COMMITS: a follower gives its master what groups committed there while the master
    was gone; answered with an empty header once that is in the log.

    Sent once the log streams again, and until it is answered. The larger offset counts, within the
    queue, and not behind where the log lost its end since that epoch. A group that was moved back
    since stays there.

    Attributes:
        broker_name: Broker group.
        store_id: Of the log.
        commits: Some; the others come with the next request.

    Errors:
        MESSAGE_ILLEGAL: Of another group or log.
        SYSTEM_BUSY: ``max_consumer_offsets`` is reached.
    """

    broker_name: Name
    store_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    commits: Annotated[list[HeldCommit], msgspec.Meta(max_length=MOST_HELD_COMMITS)]


class FenceRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """FENCE: a candidate asks a replica to refuse all epochs below this one, for ever.

    A leader of an earlier epoch gives up before it answers. A promise is no vote: the group's
    record decides who leads.

    Attributes:
        broker_name: Broker group.
        epoch: Epoch that the candidate wants to lead.
        replica_id: Of the candidate.

    Errors:
        MESSAGE_ILLEGAL: Of another group, or no master is elected here.
        DISK_FULL: The promise could not be saved.
    """

    broker_name: Name
    epoch: Epoch
    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]


class FenceResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to FENCE, read after the promise was durable.

    Attributes:
        replica_id: Id of the replica that answers.
        promised_epoch: The replica refuses all epochs below this one. If it is higher than the
            requested epoch, the replica has promised nothing to the candidate.
        incarnation: Incarnation of its store.
        last_epoch: Epoch of the last record of its log.
        log_end: Commit-log offset behind that record.
        can_lead: Its disk takes writes.
        preferred: The replica leads where others could as well.
    """

    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]
    promised_epoch: Epoch
    incarnation: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
    last_epoch: Epoch
    log_end: Offset
    can_lead: bool = True
    preferred: bool = False


class StandRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """STAND_FOR_ELECTION: a candidate asks the replica with more of the log to stand. That replica
    reads the group's record first, so a needless request is harmless.

    Attributes:
        broker_name: Broker group.
        replica_id: Of the candidate.

    Errors:
        MESSAGE_ILLEGAL: Of another group, or no master is elected here.
    """

    broker_name: Name
    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]


class HoldStillRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """HOLD_STILL: a leader with ``ack_replicas = "none"`` that does not reach the coordinator asks
    each replica in sync not to stand for election, and not to lead, for a while. An answer is a
    promise; the leader counts its time from the moment of the request.

    Attributes:
        broker_name: Broker group.
        epoch: Of the leader.
        replica_id: Of the leader.
        ttl_ms: For so long.

    Errors:
        MESSAGE_ILLEGAL: Of another group, or the replica leads or stands.
        STALE_EPOCH: The replica knows of a later epoch.
    """

    broker_name: Name
    epoch: Epoch
    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_HOLD_MS)]


class PromoteReplicaRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PROMOTE_REPLICA: an administrator makes a follower the master, with an epoch of its own.

    Attributes:
        epoch: Newest epoch that the administrator saw; the request fails if another one is the
            newest. 0: without this check.

    Errors:
        MESSAGE_ILLEGAL: Its master is there, or another epoch is the newest.
    """

    epoch: Epoch = 0


class PromoteReplicaResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to PROMOTE_REPLICA.

    Attributes:
        epoch: New epoch.
        offset: Commit-log offset where it began.
    """

    epoch: Epoch
    offset: Offset


class SwitchOverRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """SWITCH_OVER: an administrator has the master hand the lead over.

    It takes no more sends, waits until its successor has the whole log, confirms nothing more, and
    names it in the group's record. The answer comes then.

    Attributes:
        replica_id: Next leader; 0 for the replica that has most of the log.
        epoch: Newest epoch that the administrator saw; the request fails if another one is the
            newest. 0: without this check.

    Errors:
        MESSAGE_ILLEGAL: Another epoch is the newest, no replica can take over, or not in time: the
            master goes on.
        NOT_MASTER: The broker is a follower.
    """

    replica_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_REPLICA_ID)] = 0
    epoch: Epoch = 0


class SwitchOverResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to SWITCH_OVER.

    Attributes:
        replica_id: Leader.
        epoch: Epoch that it leads.
    """

    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]
    epoch: Epoch


class ElectReplicaRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """ELECT_REPLICA: an administrator has a replica lead that may lack acknowledged messages, since
    the replicas that had them are gone for good. The record notes the epoch (``unclean_since``).
    The answer comes when it stands.

    Attributes:
        epoch: Newest epoch that the administrator saw; the request fails if another one is the
            newest. 0: without this check.

    Errors:
        MESSAGE_ILLEGAL: The group has a master that lives, another epoch is the newest, or the
            coordinator does not know the group.
    """

    epoch: Epoch = 0


class InitGroupRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """INIT_GROUP: an administrator has the record of a group made anew that a coordinator lost. All
    replicas have to be there; the one with most of the log leads then.

    Attributes:
        replica_ids: Members of the group; none for 1 to ``ha.total_replicas``.

    Errors:
        MESSAGE_ILLEGAL: The coordinator knows the group, or a replica is missing.
    """

    replica_ids: Annotated[
        list[Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]],
        msgspec.Meta(max_length=MAX_REPLICA_ID),
    ] = []


class ChangeVotersRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CHANGE_VOTERS: an administrator adds a replica to a group, or takes one out.

    The record is changed once the replicas that confirm by it have all that was confirmed before;
    the answer comes then, or after 2 s, and at once if it is so already.

    Attributes:
        replica_id: Which.
        adds: True to add the replica to the group; false to take it out.
        epoch: Newest epoch that the administrator saw; the request fails if another one is the
            newest. 0: without this check.

    Errors:
        MESSAGE_ILLEGAL: Another epoch is the newest, another change is under way, it is the master,
            or too few would be left.
        NOT_MASTER: The broker is a follower.
        SERVICE_NOT_AVAILABLE: Nothing was changed, or the outcome is not known yet.
    """

    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID)]
    adds: bool
    epoch: Epoch = 0


class ChangeVotersResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to CHANGE_VOTERS, also if it was so before.

    Attributes:
        voters: Ids of the replicas that belong to the group.
        epoch: Of the master.
    """

    voters: list[int]
    epoch: Epoch


class PauseFailoverRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PAUSE_FAILOVER: an administrator wants no replica to stand because the master is missed, or
    ends that; any replica takes it.

    It is kept in the group's record. A replica that the record names as the master may stand all
    the same.

    Attributes:
        paused: No replica is to stand; false ends that.
        epoch: Newest epoch that the administrator saw; the request fails if another one is the
            newest. 0: without this check.

    Errors:
        MESSAGE_ILLEGAL: Another epoch is the newest, or the coordinator does not know the group.
        SERVICE_NOT_AVAILABLE: The coordinator cannot be reached.
    """

    paused: bool
    epoch: Epoch = 0


class PauseFailoverResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to PAUSE_FAILOVER, also if it was so before.

    Attributes:
        epoch: The newest one.
    """

    epoch: Epoch


class HaSetting(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A setting of replication.

    Attributes:
        name: As in the table ``[ha]`` of a broker's settings.
        value: As it is written there, without quotes.
    """

    name: Name
    value: Name


class SettingDiffers(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A setting of a replica that is not in force, since its cluster has another value.

    Attributes:
        name: As in the table ``[ha]``.
        own: Of the replica.
        in_force: Of the cluster, or of its group.
    """

    name: Name
    own: Name
    in_force: Name


class HaSettingsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_HA_SETTINGS: settings of replication that the coordinator keeps for a cluster. They
    override those of brokers, which read them every 5 s.

    Errors:
        SERVICE_NOT_AVAILABLE: The coordinator cannot be reached.
    """


class HaSettings(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_HA_SETTINGS and PUT_HA_SETTINGS: the coordinator's settings of a cluster.

    Attributes:
        version: Version of the settings; 0 when there are none.
        settings: Settings, which override those of brokers.
    """

    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
    settings: list[HaSetting]


class PutHaSettingsRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """PUT_HA_SETTINGS: an administrator replaces the settings of replication of a cluster, all at
    once.

    Attributes:
        version: Version of the settings that the administrator saw; the request fails if they have
            another one.
        settings: All new settings.

    Errors:
        MESSAGE_ILLEGAL: No such setting, a value out of bounds, one that this replica could not
            use, or they have another version by now.
        SERVICE_NOT_AVAILABLE: The coordinator cannot be reached, or the outcome is not known yet.
    """

    version: Annotated[int, msgspec.Meta(ge=0, le=MAX_OFFSET)]
    settings: Annotated[list[HaSetting], msgspec.Meta(max_length=100)]


class ReplicaStatus(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One follower, as its leader sees it.

    Attributes:
        replica_id: Its broker id.
        sent: Commit-log offset; chunks were sent up to there.
        written: Commit-log offset to which it has written.
        synced: And synced so far.
        silent_ms: Since its last word.
    """

    replica_id: int
    sent: int
    written: int
    synced: int
    silent_ms: int


class HaStatusRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """GET_HA_STATUS: state of a replica."""


class HaStatus(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to GET_HA_STATUS.

    Attributes:
        broker_name: Broker group.
        broker_id: Of the replica that answers.
        role: ``MASTER``, ``FOLLOWING``; in a group that elects also ``CANDIDATE``,
            ``STARTING_MASTER``, ``OUTSIDE`` (it does not belong to the group).
        epoch: The newest of its log.
        log_start: Commit-log offset of its oldest record.
        log_end: Commit-log offset of the next record.
        durable_end: Commit-log offset to which the log is on its disk.
        leader: Address of the leader that it follows, ``host:port``; "" for a master.
        connected: A follower: chunks come. A master: always true.
        leader_end: A follower: where the leader's log ended at the last message from it.
        replicas: A master: its followers.
        in_sync: A master that was elected: ids of the replicas that have all that is confirmed.
        confirmed: Commit-log offset that ends the part which no failover takes back, as far as the
            replica knows; 0 where no master is elected.
        lag_ms: A follower: time since it last had the whole log of its leader, ms; 0 while it has
            it.
        problem: A follower: reason why no chunks come.
        voters: Ids of the replicas in a group that elects; this field and the following ones are
            of such groups.
        paused: No replica stands when the master is missed, because an administrator wants it so.
        reason: Reason of the last change of the group's master.
        switched_ms: Time of that change, ms since 1970, wall clock; 0 if it is not known.
        lease_age_ms: Time since the replica's session was renewed, ms; -1 without a session.
        failsafe: The replica leads although its session is over: there is no failover meanwhile.
        settings: Those that must be equal at all replicas, as they are in force here.
        differing: Its own that are not in force, since the cluster or the group has others.
    """

    broker_name: Name
    broker_id: int
    role: Name
    epoch: int
    log_start: int
    log_end: int
    durable_end: int
    leader: Name = ""
    connected: bool = True
    leader_end: int = 0
    replicas: list[ReplicaStatus] = []
    in_sync: list[int] = []
    confirmed: int = 0
    lag_ms: int = 0
    problem: str = ""
    voters: list[int] = []
    paused: bool = False
    reason: str = ""
    switched_ms: int = 0
    lease_age_ms: int = -1
    failsafe: bool = False
    settings: list[HaSetting] = []
    differing: list[SettingDiffers] = []
