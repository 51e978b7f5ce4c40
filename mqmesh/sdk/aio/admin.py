"""Administration and queries for asyncio programs."""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from mqmesh.sdk.admin.access import AccessClient as BlockingAccessClient
from mqmesh.sdk.admin.admin import AdminClient as BlockingAdminClient
from mqmesh.sdk.admin.broker_admin import BrokerAdmin as BlockingBrokerAdmin
from mqmesh.sdk.admin.cluster_admin import ClusterAdmin as BlockingClusterAdmin
from mqmesh.sdk.admin.dead_letters import DeadLetterClient as BlockingDeadLetterClient
from mqmesh.sdk.admin.delays import DelayClient as BlockingDelayClient
from mqmesh.sdk.admin.group_admin import GroupAdmin as BlockingGroupAdmin
from mqmesh.sdk.admin.ha_admin import HaAdmin as BlockingHaAdmin
from mqmesh.sdk.admin.members import MemberClient as BlockingMemberClient
from mqmesh.sdk.admin.namesrv_admin import NamesrvAdmin as BlockingNamesrvAdmin
from mqmesh.sdk.admin.queries import QueryClient as BlockingQueryClient
from mqmesh.sdk.admin.replays import ReplayClient as BlockingReplayClient
from mqmesh.sdk.admin.searches import SearchClient as BlockingSearchClient
from mqmesh.sdk.admin.traces import TraceClient as BlockingTraceClient
from mqmesh.sdk.admin.tracks import TrackClient as BlockingTrackClient
from mqmesh.sdk.admin.transaction_admin import TransactionAdmin as BlockingTransactionAdmin
from mqmesh.sdk.aio.signatures import signed_as
from mqmesh.sdk.client.options import DEFAULT_NAMESRV, NamesrvAddr
from mqmesh.sdk.probes import ProbeClient as BlockingProbeClient
from mqmesh.sdk.tables.table_admin import TableAdmin as BlockingTableAdmin
from mqmesh.security.keys import Credentials

_P = ParamSpec("_P")
_T = TypeVar("_T")


def awaited(
    method: Callable[Concatenate[Any, _P], _T],
) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """Return a coroutine method that runs a blocking client's method, in its thread."""

    @functools.wraps(method)
    async def call(self: "AdminClient", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._run(functools.partial(method, self._inner, *args, **kwargs))

    return call


def stepped(
    method: Callable[Concatenate[Any, _P], Iterator[_T]],
) -> Callable[Concatenate[Any, _P], AsyncIterator[_T]]:
    """Return an asynchronous iterator over a blocking method's values, in its own thread."""

    @functools.wraps(method)
    async def walk(
        self: "AdminClient", /, *args: _P.args, **kwargs: _P.kwargs
    ) -> AsyncIterator[_T]:
        steps = await self._run(lambda: iter(method(self._inner, *args, **kwargs)))
        while True:
            found = await self._run(lambda: list(itertools.islice(steps, 1)))
            if not found:
                return
            yield found[0]

    return walk


class AdminClient:
    """Administration from coroutines; names, meaning and errors as in ``mqmesh.sdk.admin.admin``.

    Calls are carried out one after the other, in a thread of the client's own, so an event loop
    never waits for an answer. Cancelling a call does not take its request back.

    Args:
        namesrv_addr, timeout_ms, broker_name, credentials, namespace: As for
            ``mqmesh.sdk.admin.admin.AdminClient``.
    """

    _kind: ClassVar[type[BlockingAdminClient]] = BlockingAdminClient

    def __init__(
        self,
        namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV,
        *,
        timeout_ms: int = 3_000,
        broker_name: str = "",
        credentials: str | Credentials = "",
        namespace: str | None = None,
    ) -> None:
        self._inner = self._kind(
            namesrv_addr,
            timeout_ms=timeout_ms,
            broker_name=broker_name,
            credentials=credentials,
            namespace=namespace,
        )
        # One thread: the blocking clients serve one caller at a time.
        self._thread = ThreadPoolExecutor(1, "mqmesh-admin")

    async def close(self) -> None:
        """Closes all connections, when the call under way is over."""
        try:
            await self._run(self._inner.close)
        except RuntimeError:
            return  # closed before
        self._thread.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    ping = awaited(BlockingAdminClient.ping)
    cluster = awaited(BlockingAdminClient.cluster)
    topics = awaited(BlockingAdminClient.topics)
    route = awaited(BlockingAdminClient.route)
    topic_configs = awaited(BlockingAdminClient.topic_configs)
    topic_stats = awaited(BlockingAdminClient.topic_stats)
    runtime_info = awaited(BlockingAdminClient.runtime_info)
    role_info = awaited(BlockingAdminClient.role_info)
    gateway_clients = awaited(BlockingAdminClient.gateway_clients)
    ask_masters = awaited(BlockingAdminClient.ask_masters)
    create_topic = awaited(BlockingAdminClient.create_topic)
    create_topics = awaited(BlockingAdminClient.create_topics)
    put_topic = awaited(BlockingAdminClient.put_topic)
    topic_schema = awaited(BlockingAdminClient.topic_schema)
    put_topic_schema = awaited(BlockingAdminClient.put_topic_schema)
    delete_topic = awaited(BlockingAdminClient.delete_topic)
    create_snapshot = awaited(BlockingAdminClient.create_snapshot)


class BrokerAdmin(AdminClient):
    """Brokers that run, from coroutines; as ``mqmesh.sdk.admin.broker_admin.BrokerAdmin``."""

    _kind = BlockingBrokerAdmin

    config = awaited(BlockingBrokerAdmin.config)
    set_config = awaited(BlockingBrokerAdmin.set_config)
    clients = awaited(BlockingBrokerAdmin.clients)
    queue_entries = awaited(BlockingBrokerAdmin.queue_entries)
    clean = awaited(BlockingBrokerAdmin.clean)


class AccessClient(AdminClient):
    """The access list from coroutines; as ``mqmesh.sdk.admin.access.AccessClient``."""

    _kind = BlockingAccessClient

    access_list = awaited(BlockingAccessClient.access_list)
    access_states = awaited(BlockingAccessClient.access_states)
    put_access_list = awaited(BlockingAccessClient.put_access_list)


class QueryClient(AdminClient):
    """Message queries from coroutines; as ``mqmesh.sdk.admin.queries.QueryClient``."""

    _kind: ClassVar[type[BlockingAdminClient]] = BlockingQueryClient

    by_id = awaited(BlockingQueryClient.by_id)
    by_key = awaited(BlockingQueryClient.by_key)
    by_offset_id = awaited(BlockingQueryClient.by_offset_id)
    by_offset = awaited(BlockingQueryClient.by_offset)


class SearchClient(QueryClient):
    """Search of topics from coroutines; as ``mqmesh.sdk.admin.searches.SearchClient``."""

    _kind = BlockingSearchClient

    search = awaited(BlockingSearchClient.search)


class ReplayClient(SearchClient):
    """Replay of topics from coroutines; as ``mqmesh.sdk.admin.replays.ReplayClient``."""

    _kind = BlockingReplayClient

    replay = awaited(BlockingReplayClient.replay)


class GroupAdmin(AdminClient):
    """Consumer groups from coroutines; as ``mqmesh.sdk.admin.group_admin.GroupAdmin``."""

    _kind = BlockingGroupAdmin

    groups = awaited(BlockingGroupAdmin.groups)
    connections = awaited(BlockingGroupAdmin.connections)
    producer_connections = awaited(BlockingGroupAdmin.producer_connections)
    leases = awaited(BlockingGroupAdmin.leases)
    release_leases = awaited(BlockingGroupAdmin.release_leases)
    progress = awaited(BlockingGroupAdmin.progress)
    all_progress = awaited(BlockingGroupAdmin.all_progress)
    topic_consumers = awaited(BlockingGroupAdmin.topic_consumers)
    create_group = awaited(BlockingGroupAdmin.create_group)
    put_group = awaited(BlockingGroupAdmin.put_group)
    change_group = awaited(BlockingGroupAdmin.change_group)
    pause_group = awaited(BlockingGroupAdmin.pause_group)
    resume_group = awaited(BlockingGroupAdmin.resume_group)
    delete_group = awaited(BlockingGroupAdmin.delete_group)
    reset_offset = awaited(BlockingGroupAdmin.reset_offset)
    clone_offset = awaited(BlockingGroupAdmin.clone_offset)
    skip_backlog = awaited(BlockingGroupAdmin.skip_backlog)


class TrackClient(QueryClient, GroupAdmin):
    """Tracks of messages for coroutines; the counterpart of ``mqmesh.TrackClient``."""

    _kind = BlockingTrackClient

    track = awaited(BlockingTrackClient.track)


class MemberClient(QueryClient, GroupAdmin):
    """Single members of groups, from coroutines; as ``mqmesh.MemberClient``."""

    _kind = BlockingMemberClient

    running_info = awaited(BlockingMemberClient.running_info)
    hand_to = awaited(BlockingMemberClient.hand_to)


class TraceClient(TrackClient):
    """Message trace for coroutines; as ``mqmesh.TraceClient``."""

    _kind = BlockingTraceClient

    trace = awaited(BlockingTraceClient.trace)
    trace_by_key = awaited(BlockingTraceClient.trace_by_key)


class DeadLetterClient(QueryClient):
    """Dead letters from coroutines; as ``mqmesh.sdk.admin.dead_letters.DeadLetterClient``.

    ``scan`` and ``resend`` are to be iterated by ``async for``.
    """

    _kind = BlockingDeadLetterClient

    @signed_as(BlockingDeadLetterClient.__init__)
    def __init__(
        self, namesrv_addr: NamesrvAddr = DEFAULT_NAMESRV, *, timeout_ms: int = 10_000, **own: Any
    ) -> None:
        super().__init__(namesrv_addr, timeout_ms=timeout_ms, **own)

    groups = awaited(BlockingDeadLetterClient.groups)
    overview = awaited(BlockingDeadLetterClient.overview)
    purge = awaited(BlockingDeadLetterClient.purge)
    scan = stepped(BlockingDeadLetterClient.scan)
    resend = stepped(BlockingDeadLetterClient.resend)


class DelayClient(AdminClient):
    """Delayed messages from coroutines; as ``mqmesh.sdk.admin.delays.DelayClient``."""

    _kind = BlockingDelayClient

    waiting = awaited(BlockingDelayClient.waiting)
    cancel = awaited(BlockingDelayClient.cancel)


class TableAdmin(AdminClient):
    """Tables from coroutines; as ``mqmesh.sdk.tables.table_admin.TableAdmin``."""

    _kind = BlockingTableAdmin

    tables = awaited(BlockingTableAdmin.tables)
    table_keys = awaited(BlockingTableAdmin.table_keys)
    table_history = awaited(BlockingTableAdmin.table_history)
    table_value = awaited(BlockingTableAdmin.table_value)


class HaAdmin(AdminClient):
    """Replicas from coroutines; as ``mqmesh.sdk.admin.ha_admin.HaAdmin``."""

    _kind = BlockingHaAdmin

    ha_status = awaited(BlockingHaAdmin.ha_status)
    promote = awaited(BlockingHaAdmin.promote)
    switch_over = awaited(BlockingHaAdmin.switch_over)
    elect_unclean = awaited(BlockingHaAdmin.elect_unclean)
    init_group = awaited(BlockingHaAdmin.init_group)
    add_replica = awaited(BlockingHaAdmin.add_replica)
    remove_replica = awaited(BlockingHaAdmin.remove_replica)
    pause_failover = awaited(BlockingHaAdmin.pause_failover)
    epochs = awaited(BlockingHaAdmin.epochs)
    compare_logs = stepped(BlockingHaAdmin.compare_logs)
    cluster_settings = awaited(BlockingHaAdmin.cluster_settings)
    change_cluster_settings = awaited(BlockingHaAdmin.change_cluster_settings)


class NamesrvAdmin(AdminClient):
    """Name servers from coroutines; as ``mqmesh.sdk.admin.namesrv_admin.NamesrvAdmin``."""

    _kind = BlockingNamesrvAdmin

    put_kv = awaited(BlockingNamesrvAdmin.put_kv)
    get_kv = awaited(BlockingNamesrvAdmin.get_kv)
    has_kv = awaited(BlockingNamesrvAdmin.has_kv)
    delete_kv = awaited(BlockingNamesrvAdmin.delete_kv)
    list_kv = awaited(BlockingNamesrvAdmin.list_kv)
    kv_namespaces = awaited(BlockingNamesrvAdmin.kv_namespaces)
    config = awaited(BlockingNamesrvAdmin.config)
    set_config = awaited(BlockingNamesrvAdmin.set_config)
    drain = awaited(BlockingNamesrvAdmin.drain)
    undrain = awaited(BlockingNamesrvAdmin.undrain)


class ClusterAdmin(GroupAdmin, NamesrvAdmin):
    """A cluster's setup, from coroutines; as ``mqmesh.sdk.admin.cluster_admin.ClusterAdmin``."""

    _kind = BlockingClusterAdmin

    traffic = awaited(BlockingClusterAdmin.traffic)
    export = awaited(BlockingClusterAdmin.export)
    plan_import = awaited(BlockingClusterAdmin.plan_import)
    carry_out = awaited(BlockingClusterAdmin.carry_out)


class ProbeClient(AdminClient):
    """Test messages from coroutines; as ``mqmesh.sdk.probes.ProbeClient``."""

    _kind = BlockingProbeClient

    probe_topic = stepped(BlockingProbeClient.probe_topic)
    probe_brokers = stepped(BlockingProbeClient.probe_brokers)


class TransactionAdmin(AdminClient):
    """Half messages from coroutines; as ``mqmesh.sdk.admin.transaction_admin.TransactionAdmin``."""

    _kind = BlockingTransactionAdmin

    half_messages = awaited(BlockingTransactionAdmin.half_messages)
    half_message = awaited(BlockingTransactionAdmin.half_message)
    end_half_message = awaited(BlockingTransactionAdmin.end_half_message)
