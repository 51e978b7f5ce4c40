"""Settings of replication: the table ``[ha]`` of a broker's settings."""

import enum
from typing import Annotated

import msgspec

from mqmesh.coordination.interface import MAX_TTL_MS, MIN_TTL_MS, MOST_REPLICAS, AckReplicas
from mqmesh.protocol.pulling import Zone
from mqmesh.security.keys import KeyOrNone
from mqmesh.units import GIB, KIB, MIB


class HaMode(enum.Enum):
    """Way in which the master of a group is decided."""

    OFF = "off"
    """No replicas."""
    MANUAL = "manual"
    """The settings, and ``mqmesh ha promote``; RocketMQ's masters and slaves."""
    AUTO = "auto"
    """The replicas elect it, by a record of the coordinator; see ``docs/replication.md``."""


class HaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of replication.

    Attributes:
        mode: ``off``, or ``manual``: the broker with broker_id 0 is the master of its group, others
            follow it until ``mqmesh ha promote`` makes one of them the master; ``auto``: the
            replicas elect their master, and another one when it is gone.
        master_addr: Of a follower: where its master listens, ``host:port``.
        master_server_key: Of a follower with security on: the master's public key; "" for one that
            both have. In ``auto`` replicas exchange theirs.
        ack_replicas: Of a master: ``none``, a send is answered when the master has it; ``one``,
            when a follower has it, too; in ``auto`` also ``all``, when all replicas in sync have
            it, and ``quorum``, when most of all replicas have it. SEND_OK of all but ``none``
            survives the loss of a machine. A group keeps what it was made with.
        slave_timeout_ms: In ``manual`` with ``one``: after so long an answer says
            FLUSH_SLAVE_TIMEOUT instead of waiting on, 10 to 60,000 ms. The message is stored by the
            master. In ``auto`` a send waits for as long as it takes.
        ha_slave_fallbehind_max: With ``one``: a follower that lacks more bytes of the log counts as
            not there, 64 KiB to 64 GiB. Without any other the answer says SLAVE_NOT_AVAILABLE in
            ``manual``; in ``auto`` sends are refused.
        ha_window_bytes: How far ahead of its acknowledgements a follower is sent the log, 64 KiB
            to 1 GiB; so much memory of the master one may take.
        max_ha_transfer_byte_in_second: How much of the log a second a master sends to all
            followers together that catch up, 0 to 64 GiB; 0 for as much as they take. One that is
            sent less than what producers send never catches up.
        ha_retain_for_slaves_ms: How long the log that a follower has not got yet is kept from
            retention after it was heard last, 0 to 86,400,000 ms.
        slave_read_enable: Of a follower: it answers reads. Of a master: it sends readers to
            followers that do.
        zone: Where the replica stands, up to 64 characters, such as the name of a data centre.
            Clients with the same ``zone`` read from a follower there rather than from a master
            elsewhere.
        access_message_in_memory_max_ratio: Of a master: a client that reads further back in the log
            than so many percent of the machine's memory, 0 to 100, is sent to a follower.
        coordinator: In ``auto``: who keeps the group's record, ``embedded://host:port``,
            ``etcd://host:port,host:port,…`` or the URL of another engine.
        total_replicas: In ``auto``: how many replicas the group has when it is made, 1 to 64; it is
            made once all of them are there.
        min_in_sync_replicas: With ``all``: so many replicas must be in sync for a send to be taken,
            1 to 64.
        lease_ttl_ms: In ``auto``: a replica that does not renew its session for so long is taken
            for gone, 2,000 to 600,000 ms.
        failsafe: With ``none``: a master that does not reach the coordinator goes on while all
            replicas in sync promise not to stand.
        replica_lag_max_ms: A follower that was not caught up for so long answers no reads, and in
            ``auto`` leaves the replicas in sync, 100 to 600,000 ms.
        restart_before_failover_ms: In ``auto``: a master whose process has ended has so long to be
            started again before another one takes over, 0 to 60,000 ms.
        preferred: In ``auto``: this replica leads where others could as well. It gets the lead once
            it was in sync for a minute, but not twice within ten.
    """

    mode: HaMode = HaMode.OFF
    master_addr: Annotated[str, msgspec.Meta(max_length=255)] = ""
    master_server_key: KeyOrNone = ""
    ack_replicas: AckReplicas = AckReplicas.NONE
    slave_timeout_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 3_000
    ha_slave_fallbehind_max: Annotated[int, msgspec.Meta(ge=64 * KIB, le=64 * GIB)] = 256 * MIB
    ha_window_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=1 * GIB)] = 16 * MIB
    max_ha_transfer_byte_in_second: Annotated[int, msgspec.Meta(ge=0, le=64 * GIB)] = 0
    ha_retain_for_slaves_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 600_000
    slave_read_enable: bool = True
    zone: Zone = ""
    access_message_in_memory_max_ratio: Annotated[int, msgspec.Meta(ge=0, le=100)] = 40
    coordinator: Annotated[str, msgspec.Meta(max_length=1_024)] = "embedded://127.0.0.1:9870"
    total_replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)] = 1
    min_in_sync_replicas: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)] = 1
    lease_ttl_ms: Annotated[int, msgspec.Meta(ge=MIN_TTL_MS, le=MAX_TTL_MS)] = 3_000
    failsafe: bool = True
    replica_lag_max_ms: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 3_000
    restart_before_failover_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 0
    preferred: bool = False
