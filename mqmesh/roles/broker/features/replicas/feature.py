"""Followers of a master: they get its log, and sends may wait for them."""

from typing import Final

from mqmesh.figures import counter, gauge, histogram
from mqmesh.protocol.codes import RequestCode
from mqmesh.roles.broker.context import BrokerContext
from mqmesh.roles.broker.feature import Beginning, Feature
from mqmesh.roles.broker.features.replicas import log_checks, replicas
from mqmesh.roles.broker.features.replicas.follower_table import FollowerTable
from mqmesh.roles.broker.ha.ha_config import HaConfig
from mqmesh.storage.interface import FlushDiskType
from mqmesh.token_bucket import TokenBucket


def make_followers(begins: Beginning) -> FollowerTable:
    """Followers of a master: none has come yet."""
    ha = begins.config.ha
    table = FollowerTable(
        window_bytes=ha.ha_window_bytes,
        fall_behind_bytes=ha.ha_slave_fallbehind_max,
        retain_ms=ha.ha_retain_for_slaves_ms,
        counts_synced=begins.config.storage.flush_disk_type is FlushDiskType.SYNC_FLUSH,
        counts=begins.replication,
        began_ms=begins.now_ms,
    )
    table.catch_up_rate = _catch_up_rate(ha)
    return table


def _configured(context: BrokerContext) -> None:
    context.followers.catch_up_rate = _catch_up_rate(context.config.ha)


def _catch_up_rate(ha: HaConfig) -> TokenBucket | None:
    rate = ha.max_ha_transfer_byte_in_second
    return TokenBucket(rate) if rate else None


def _last_heard(context: BrokerContext) -> dict[int, tuple[int, int]]:
    """What replicas said last, and when, by id. One that hangs or is gone is told of, too.

    Of an elected master's group all replicas are; of another, one that was not heard for as long
    as the log is kept for it counts as taken away.
    """
    table, leadership = context.followers, context.leadership
    voters = () if leadership is None else leadership.in_sync.state.voters
    if not voters:
        retain_ms = context.config.ha.ha_retain_for_slaves_ms
        return table.last_heard(since_ms=context.clock.monotonic_ms() - retain_ms)
    heard, never = table.last_heard(), (0, table.began_ms)
    return {one: heard.get(one, never) for one in voters if one != context.config.broker_id}


def _lag_bytes(context: BrokerContext) -> dict[tuple[str, ...], int]:
    heard = _last_heard(context)
    end = context.store.stats().max_commitlog_offset if heard else 0
    return {(str(one),): max(end - written, 0) for one, (written, _) in heard.items()}


def _silent_ms(context: BrokerContext) -> dict[tuple[str, ...], int]:
    now_ms = context.clock.monotonic_ms()
    heard = _last_heard(context)
    return {(str(one),): max(now_ms - heard_ms, 0) for one, (_, heard_ms) in heard.items()}


def _lag_ms(context: BrokerContext) -> dict[tuple[str, ...], int]:
    """Since when followers of an elected master lack something, by replica."""
    leadership, now_ms = context.leadership, context.clock.monotonic_ms()
    if leadership is None:
        return {}
    lags = leadership.in_sync.lags_ms(context.store.stats().max_commitlog_offset, now_ms)
    return {(str(replica_id),): lag_ms for replica_id, lag_ms in lags.items()}


def _unconfirmed(context: BrokerContext) -> int:
    if context.leadership is None:
        return 0
    return max(context.store.stats().max_commitlog_offset - context.leadership.confirmed(), 0)


REPLICAS: Final = Feature(
    commands={
        RequestCode.OPEN_REPLICATION: replicas.open_replication,
        RequestCode.ACK_REPLICATION: replicas.ack_replication,
        RequestCode.READ_LOG: replicas.read_log,
        RequestCode.GET_HA_STATUS: replicas.get_ha_status,
        **log_checks.COMMANDS,
        RequestCode.PROMOTE_REPLICA: replicas.refuse_promotion,
        RequestCode.FENCE: replicas.refuse_election,
        RequestCode.STAND_FOR_ELECTION: replicas.refuse_election,
        RequestCode.SWITCH_OVER: replicas.refuse_election,
        RequestCode.ELECT_REPLICA: replicas.refuse_election,
        RequestCode.INIT_GROUP: replicas.refuse_election,
        RequestCode.CHANGE_VOTERS: replicas.refuse_election,
        RequestCode.PAUSE_FAILOVER: replicas.refuse_election,
        RequestCode.GET_HA_SETTINGS: replicas.refuse_election,
        RequestCode.PUT_HA_SETTINGS: replicas.refuse_election,
        RequestCode.HOLD_STILL: replicas.refuse_election,
    },
    configured=_configured,
    turn_ended=replicas.feed,
    durable=replicas.note_durable,
    tick=replicas.tick,
    client_gone=replicas.forget_follower,
    figures=(
        gauge("ha_followers", "followers that are connected", lambda broker: len(broker.followers)),
        gauge(
            "ha_replica_lag_bytes",
            "what a follower has not written yet, one that is gone too",
            _lag_bytes,
            unit="bytes",
            labels=("replica",),
        ),
        gauge(
            "ha_replica_lag_ms",
            "since when a follower of an elected master lacks something",
            _lag_ms,
            unit="ms",
            labels=("replica",),
        ),
        gauge(
            "ha_replica_silent_ms",
            "since a follower was heard, one that is gone too",
            _silent_ms,
            unit="ms",
            labels=("replica",),
        ),
        gauge(
            "ha_epoch",
            "of a master that was elected",
            lambda broker: 0 if broker.leadership is None else broker.leadership.epoch,
        ),
        gauge(
            "ha_in_sync",
            "replicas in sync, of a master that was elected",
            lambda broker: 0 if broker.leadership is None else len(broker.leadership.members),
        ),
        gauge(
            "ha_confirmed_lag_bytes",
            "of the log that may still be taken back, of a master that was elected",
            _unconfirmed,
            unit="bytes",
        ),
        histogram(
            "ha_ack_wait_ms",
            "how long sends waited for followers, or for the disk",
            lambda broker: broker.commit_point.waits_ms.read(),
            unit="ms",
        ),
        counter(
            "ha_state_records_total",
            "records of topics, groups and offsets that were put into the log",
            lambda broker: broker.state.records_written,
        ),
    ),
)
