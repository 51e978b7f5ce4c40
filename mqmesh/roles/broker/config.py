"""Settings of a broker. Names are RocketMQ's in snake case; the defaults stand here only."""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.batch.delayed_batch import DEFAULT_DELAY_LEVELS, parse_delay_levels
from mqmesh.config import check_names
from mqmesh.coordination.interface import AckReplicas
from mqmesh.errors import ConfigError
from mqmesh.hosts import check_listen
from mqmesh.logs import LogLevel
from mqmesh.message import MAX_MESSAGE_BYTES_DEFAULT
from mqmesh.metrics import MAX_LABEL_SETS
from mqmesh.protocol.replication import MAX_REPLICA_ID
from mqmesh.protocol.route import MAX_QUEUES_PER_TOPIC, MAX_TOPICS_PER_BROKER
from mqmesh.roles.broker.ha_config import HaConfig, HaMode
from mqmesh.security.config import SecurityConfig
from mqmesh.storage.index.config import IndexConfig
from mqmesh.storage.interface import StoreConfig
from mqmesh.units import GIB, KIB, MIB

_Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]


CHANGEABLE: Final = (
    "auto_create_topic_enable",
    "auto_create_subscription_group",
    "default_topic_queue_nums",
    "message_delay_level",
    "transaction_timeout_ms",
    "transaction_check_interval_ms",
    "transaction_check_max",
    "table_tombstone_ms",
    "long_polling_max_ms",
    "busy_poll_us",
    "log_level",
    "max_held_pulls",
    "wait_time_mills_in_send_queue",
    "os_page_cache_busy_timeout_mills",
    "ha.max_ha_transfer_byte_in_second",
    "storage.file_reserved_time",
    "storage.delete_when",
    "storage.disk_max_used_space_ratio",
    "storage.clean_file_forcibly_enable",
)
"""Settings that administrators may change while a broker runs. None of them lets an administrator
read or write a file, listen or connect elsewhere, or start a program."""

MASTER_ID: Final = 0
"""Id of the master of a broker group."""


class SnapshotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of snapshots.

    Attributes:
        root_dir: Directory of this machine that gets them; empty for ``snapshots`` beside
            ``store_path_root_dir``. On the same file system they take little time and room.
        keep: Snapshots of this broker that stay, 1 to 1,000; when a new one is whole, older ones
            go. 0 keeps all. Those that `mqmesh archive run` makes are not counted: they stay until
            the archive has them.
        waiting_bytes: Room on the disk that snapshots which an archive has not taken yet may hold
            beside the store, from 0, 0 for no limit; the oldest go beyond it, and where the disk is
            as full as ``storage.disk_max_used_space_ratio``.
        copy_bytes_per_s: Of what must be copied, so that the disk has time for the broker; 0 for
            no limit. Links take no time.
    """

    root_dir: Annotated[str, msgspec.Meta(max_length=4_096)] = ""
    keep: Annotated[int, msgspec.Meta(ge=0, le=1_000)] = 2
    waiting_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    copy_bytes_per_s: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0

    def root(self, store: Path) -> Path:
        """The directory of snapshots of the store in a directory."""
        return Path(self.root_dir) if self.root_dir else store.absolute().parent / "snapshots"


class BrokerStoreConfig(StoreConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the broker's store: those of ``StoreConfig``, and which store it is.

    Attributes:
        backend: ``commitlog``; ``lmdb`` for small installations; ``memory`` for tests, which
            forgets everything, topics and offsets included; or the name of an entry point of
            the group ``mqmesh.storage``.
    """

    backend: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] = "commitlog"


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a broker.

    Attributes:
        cluster_name: Cluster that the broker belongs to; shown to administrators.
        broker_name: Broker group. Queues are known to clients by this name, so it must not
            change while consumers have offsets, and no two groups of a cluster may share it.
        broker_id: 0 for the master of its group, 1 to 64 for a follower; see ``ha``. Where the
            master is elected each replica has another one from 1 on, and the master is known to
            clients as 0.
        replicas: How many replicas of this broker `mqmesh up` starts on this machine, 1 to 65: the
            master, and followers with the ids behind it, each 10 ports further, if ``ha.mode`` is
            ``manual``; the ids 1 to so many if it is ``auto``. Only `mqmesh up` uses it.
        namesrv_addr: Name servers as ``host:port``; the broker registers with every one.
        listen_host: Address to listen at. The default serves this machine only.
        listen_port: TCP port, 0 to 65,535; 0 takes a free one, for tests.
        advertised_host: Host that clients are to connect to; empty for ``listen_host``.
            Needed when that is a wildcard or lies behind a translated address.
        allow_insecure_bind: Listen beyond this machine without encryption and without
            asking who a client is. Only for networks in which everybody may do everything.
        security: Keys and access list; see docs/security.md.
        enable_ipc: Also listen at a Unix socket, which clients on the same host prefer.
        auto_create_topic_enable: The first message to an unknown topic creates it. Turn it
            off where a misspelt topic should be an error.
        auto_create_subscription_group: The first use of an unknown consumer group creates its
            settings. Turn it off where a misspelt group should be an error.
        default_topic_queue_nums: Queues of a topic created that way, 1 to 65,536.
        message_delay_level: Delays of the delay levels, level 1 first: 1 to 64 numbers with
            their units s, m, h or d. Messages that wait already keep their times.
        filter_server_enable: Allow filters in Python, which consumers upload and which run in
            confined processes of filter servers beside this broker. Every client that may
            subscribe may then run code on those machines.
        transaction_timeout_ms: How long a half message may wait for its decision before a member
            of its producer group is asked about it, 0 to 86,400,000 ms; its sender may say
            otherwise (CHECK_IMMUNITY_TIME_IN_SECONDS). Longer than local transactions take.
        transaction_check_interval_ms: How long until one is asked again, 10 to 86,400,000 ms.
        transaction_check_max: How often in all, 1 to 1,000; then the half message is parked,
            and copied to TRANS_CHECK_MAX_TIME_TOPIC.
        table_tombstone_ms: How long a table remembers that a key was deleted or has expired, 1,000
            to 31,622,400,000 ms; it counts for keys deleted from then on. Longer than watchers may
            be away.
        long_polling_max_ms: Longest time that a pull may wait for a message, 0 to 30,000 ms.
        busy_poll_us: How long the broker waits awake for the next request before it sleeps, 0 to
            10,000 us; only as long as requests do come within that time. 0 spares the
            processor, and a synchronous send takes about half as long again.
        log_level: Least level that this broker logs: DEBUG, INFO, WARNING, ERROR or CRITICAL; or
            as-started, for what the command line says.
        register_broker_interval_ms: Heartbeat to the name servers, 100 to 60,000 ms; they
            drop a broker that was silent for 120 s.
        client_lost_grace_ms: How long a client whose connection broke keeps its queues, 0
            to 60,000 ms. Longer where networks blink, shorter for quicker redistribution.
        client_channel_expired_timeout_ms: A client silent for so long is gone, though its
            connection stands, 1,000 to 3,600,000 ms.
        rebalance_lock_max_live_time_ms: How long an ordered consumer has a queue for itself
            without renewing its lock, 1,000 to 600,000 ms. Consumers renew each 20 s.
        rebalance_lock_lost_grace_ms: How long it has it after its connection broke, 0 to
            600,000 ms. Clients notice within 2 s; below that a queue could have two readers. Where
            copies confirm the log, also how long, and at least 3 s, after an election.

        store_path_root_dir: Directory of everything the broker keeps. One broker each.
        storage: Settings of the store, a table of its own.
        index: Settings of the index of keys and message ids, a table of its own. Only the
            backend ``commitlog`` has one.
        snapshot: Settings of snapshots, a table of its own.
        ha: Settings of replication, a table of its own. Only the backend ``commitlog`` has it.
        sync_flush_timeout_ms: With ``SYNC_FLUSH``: after so long an answer says
            FLUSH_DISK_TIMEOUT instead of waiting on for the disk, 10 to 60,000 ms.
        flush_consumer_offset_interval_ms: How often committed offsets are saved, 100 to
            600,000 ms. A crash puts consumers back by at most so much.

        max_connections: Connections at a time, 1 to 1,000,000; more are refused with SYSTEM_BUSY,
            then ended. Each takes a descriptor: the broker raises its limit of open files at the
            start, and serves fewer where the system allows no more.
        max_pending_bytes: Bytes that may wait for one connection, 1 MiB to 16 GiB: answers that
            its client has not taken. With more, its pulls are refused with SYSTEM_BUSY.
        max_total_pending_bytes: The same of all connections together, 32 MiB to 1 TiB, with the
            requests that wait to be read. A quarter of what is left of it is what one connection
            may have; where it is used up, those that have the most are ended.
        max_message_size: Largest body in bytes, 1 B to 15 MiB. Consumers must hold it.
        check_compressed_batches: Inflate batches that clients compressed, to check their messages
            as those of others are checked. Costs about a millisecond of processor time a MiB of
            messages; without it a faulty client can store what no consumer can read.
        max_held_pulls: Pulls waiting at a time, 1 to 10,000,000; beyond it a pull that finds
            nothing is refused with SYSTEM_BUSY. About 1 KiB of memory each. So many more may wait
            for their turn while others ask for much.
        max_staged_bytes: Message bytes gathered before one write to the log, 64 KiB to 1 GiB.
            More makes no difference unless very many producers send large batches at once.
        max_sync_flush_waits: With ``SYNC_FLUSH`` or copies: sends that may wait for the disk or
            for copies at a time, and as many requests for locks of queues, 1 to 1,000,000; beyond
            it they are refused with SYSTEM_BUSY.
        wait_time_mills_in_send_queue: A send may be refused with SYSTEM_BUSY when it waited for
            longer than this to be written, 1 to 60,000 ms; see the next setting.
        os_page_cache_busy_timeout_mills: That happens only when waits have stayed so long for
            more than this, 0 to 60,000 ms: a disk that is slow for a moment refuses nobody.
        busy_retry_after_ms: Retry delay of a client after SYSTEM_BUSY, 1 to 60,000 ms.
        transaction_pending_max: Half messages that may wait for their decisions; more are
            refused. Up to 0.8 KiB of memory each, in batches less. 1 to 100,000,000.
        transaction_parked_max: Half messages that stay parked, 1 to 1,000,000; the oldest go.
        max_topics: Topics that users may have made, 1 to 100,000. Acknowledged messages are
            delivered all the same: where a delayed message is due whose topic was deleted, or
            messages failed in a group that has no retry or dead letter topic yet, the broker
            makes the topic beyond this number, up to 100,000 in all.
        max_auto_topics: Of them, topics that first messages have made (auto_create_topic_enable),
            1 to 100,000. Administrators may create the rest of ``max_topics``; a topic that one of
            them changes counts as theirs, too.
        auto_topics_per_minute: Topics that one client may make so in a minute, 1 to 100,000. Where
            security is on all connections of a user are one client.
        auto_queues_per_minute: Queues of these topics, 1 to 1,000,000.
        auto_groups_per_minute: Consumer groups that one client may make in a minute by using them
            (auto_create_subscription_group), 1 to 100,000.
        max_subscription_groups: Consumer groups that this broker keeps settings of, 1 to
            1,000,000.
        max_clients: Producers and consumers that may be registered, 1 to 1,000,000.
        max_producers_per_connection: Producers that may send by one connection, 1 to 65,536; a
            consumer that processes messages has up to 48.
        max_consumer_offsets: Offsets kept, one a group and queue, 1 to 100,000,000; about
            200 bytes of memory each.
        max_open_replies: Replies to requests that may be on their way to clients at a time, 1
            to 1,000,000; beyond it they are refused with SYSTEM_BUSY.
        max_label_sets: Topics, or pairs of topic and consumer group, that a metric lists, 1
            to 100,000; the others are added up. Each costs the reader, an exporter in the first
            place.
    """

    cluster_name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "DefaultCluster"
    broker_name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "broker-a"
    broker_id: Annotated[int, msgspec.Meta(ge=0, le=MAX_REPLICA_ID)] = 0
    replicas: Annotated[int, msgspec.Meta(ge=1, le=MAX_REPLICA_ID + 1)] = 1
    namesrv_addr: Annotated[list[str], msgspec.Meta(max_length=16)] = msgspec.field(
        default_factory=lambda: ["127.0.0.1:9876", "127.0.0.1:9877"]
    )
    listen_host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] = "127.0.0.1"
    listen_port: _Port = 10_911
    advertised_host: Annotated[str, msgspec.Meta(max_length=255)] = ""
    allow_insecure_bind: bool = False
    security: SecurityConfig = msgspec.field(default_factory=SecurityConfig)
    enable_ipc: bool = True
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    default_topic_queue_nums: Annotated[int, msgspec.Meta(ge=1, le=MAX_QUEUES_PER_TOPIC)] = 4
    message_delay_level: str = DEFAULT_DELAY_LEVELS
    filter_server_enable: bool = False
    transaction_timeout_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 6_000
    transaction_check_interval_ms: Annotated[int, msgspec.Meta(ge=10, le=86_400_000)] = 30_000
    transaction_check_max: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 15
    table_tombstone_ms: Annotated[int, msgspec.Meta(ge=1_000, le=31_622_400_000)] = 86_400_000
    long_polling_max_ms: Annotated[int, msgspec.Meta(ge=0, le=30_000)] = 30_000
    busy_poll_us: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 200
    log_level: LogLevel = LogLevel.AS_STARTED
    register_broker_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=60_000)] = 30_000
    client_lost_grace_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 1_000
    client_channel_expired_timeout_ms: Annotated[int, msgspec.Meta(ge=1_000, le=3_600_000)] = (
        120_000
    )
    rebalance_lock_max_live_time_ms: Annotated[int, msgspec.Meta(ge=1_000, le=600_000)] = 60_000
    rebalance_lock_lost_grace_ms: Annotated[int, msgspec.Meta(ge=0, le=600_000)] = 3_000

    store_path_root_dir: Annotated[str, msgspec.Meta(min_length=1)] = "./mqmesh-data/broker-a"
    storage: BrokerStoreConfig = msgspec.field(default_factory=BrokerStoreConfig)
    index: IndexConfig = msgspec.field(default_factory=IndexConfig)
    snapshot: SnapshotConfig = msgspec.field(default_factory=SnapshotConfig)
    ha: HaConfig = msgspec.field(default_factory=HaConfig)
    sync_flush_timeout_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 5_000
    flush_consumer_offset_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=600_000)] = 5_000

    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    max_pending_bytes: Annotated[int, msgspec.Meta(ge=MIB, le=16 * GIB)] = 128 * MIB
    max_total_pending_bytes: Annotated[int, msgspec.Meta(ge=32 * MIB, le=1024 * GIB)] = 1 * GIB
    max_message_size: Annotated[int, msgspec.Meta(ge=1, le=15 * MIB)] = MAX_MESSAGE_BYTES_DEFAULT
    check_compressed_batches: bool = True
    max_held_pulls: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000
    max_staged_bytes: Annotated[int, msgspec.Meta(ge=64 * KIB, le=1024 * MIB)] = 64 * MIB
    max_sync_flush_waits: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    wait_time_mills_in_send_queue: Annotated[int, msgspec.Meta(ge=1, le=60_000)] = 200
    os_page_cache_busy_timeout_mills: Annotated[int, msgspec.Meta(ge=0, le=60_000)] = 1_000
    busy_retry_after_ms: Annotated[int, msgspec.Meta(ge=1, le=60_000)] = 100
    transaction_pending_max: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 200_000
    transaction_parked_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    max_topics: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOPICS_PER_BROKER)] = 90_000
    max_auto_topics: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOPICS_PER_BROKER)] = 20_000
    auto_topics_per_minute: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 10_000
    auto_queues_per_minute: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 40_000
    auto_groups_per_minute: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 600
    max_subscription_groups: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 100_000
    max_clients: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 65_536
    max_producers_per_connection: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 64
    max_consumer_offsets: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 5_000_000
    max_open_replies: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000
    max_label_sets: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = MAX_LABEL_SETS

    def __post_init__(self) -> None:
        """Checks what concerns several fields, or needs more than a bound.

        Raises:
            ConfigError: Names the field and what to write instead.
        """
        check_names(self, "cluster_name", "broker_name")
        parse_delay_levels(self.message_delay_level)
        self._check_ha()
        check_listen(
            "broker",
            self.listen_host,
            self.advertised_host,
            allow_insecure_bind=self.allow_insecure_bind or self.security.enable,
        )

    def _check_ha(self) -> None:
        ha, follows = self.ha, self.broker_id != 0
        if ha.mode is HaMode.OFF:
            if follows:
                raise ConfigError(
                    f"broker_id = {self.broker_id} is a follower's, and replication is off "
                    '(ha.mode); set it to "manual"'
                )
            if ha.ack_replicas is not AckReplicas.NONE or ha.master_addr:
                name = "master_addr" if ha.master_addr else "ack_replicas"
                raise ConfigError(
                    f"ha.{name} is set, and nobody has a copy while replication is off (ha.mode): "
                    'set that to "manual" or "auto", or leave this out'
                )
            return
        if self.storage.backend != "commitlog":
            raise ConfigError(
                f"storage.backend = {self.storage.backend!r} has no log for replicas (ha.mode); "
                'use "commitlog"'
            )
        if ha.mode is HaMode.AUTO:
            self._check_auto()
            return
        if ha.ack_replicas not in (AckReplicas.NONE, AckReplicas.ONE):
            raise ConfigError(
                f"ha.ack_replicas = {ha.ack_replicas.value!r} needs an in-sync set, which "
                'ha.mode = "manual" has not; use "none" or "one"'
            )
        if ha.min_in_sync_replicas > 1:
            raise ConfigError(
                f"ha.min_in_sync_replicas = {ha.min_in_sync_replicas} needs an in-sync set, which "
                'ha.mode = "manual" has not; leave it out, or use "auto"'
            )
        if follows and not ha.master_addr:
            raise ConfigError(
                f"broker_id = {self.broker_id} follows a master: say where it listens "
                "(ha.master_addr)"
            )

    def _check_auto(self) -> None:
        ha = self.ha
        if not 1 <= self.broker_id <= ha.total_replicas:
            raise ConfigError(
                f"broker_id = {self.broker_id}: the replicas of a group that elects its master "
                f"have the ids 1 to ha.total_replicas = {ha.total_replicas}"
            )
        if ha.master_addr:
            raise ConfigError(
                f'ha.master_addr = {ha.master_addr!r} is of ha.mode = "manual"; in "auto" the '
                "master is elected"
            )
        if ha.min_in_sync_replicas > ha.total_replicas:
            raise ConfigError(
                f"ha.min_in_sync_replicas = {ha.min_in_sync_replicas} is more than there are "
                f"(ha.total_replicas = {ha.total_replicas}): no send would ever be taken"
            )
        if ha.min_in_sync_replicas > 1 and ha.ack_replicas is not AckReplicas.ALL:
            raise ConfigError(
                f"ha.min_in_sync_replicas = {ha.min_in_sync_replicas} is for ha.ack_replicas = "
                f'"all", and would do nothing with {ha.ack_replicas.value!r}: leave one of them out'
            )
        if ha.ack_replicas in (AckReplicas.ONE, AckReplicas.QUORUM) and ha.total_replicas < 2:
            raise ConfigError(
                f"ha.ack_replicas = {ha.ack_replicas.value!r} needs another replica "
                f"(ha.total_replicas = {ha.total_replicas})"
            )
