"""The name server's process: sockets, timers and files around its tables."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from mqmesh.clock import Clock
from mqmesh.errors import ConfigError, CorruptRecord, StorageError, TopicNotFound
from mqmesh.hosts import bindable
from mqmesh.namespaces import is_within
from mqmesh.private_files import make_folder, make_private
from mqmesh.protocol.command import EMPTY_REPLY, MAX_HEADER_BYTES, Answer, Reply, encode_header
from mqmesh.protocol.commands import RequestCode, ServedBy
from mqmesh.protocol.request import Peer, Request
from mqmesh.protocol.route import (
    ClusterInfo,
    DeleteTopicRequest,
    GetClusterRequest,
    GetRouteRequest,
    GetRoutesRequest,
    KvRequest,
    KvResponse,
    RegisterBrokerRequest,
    RouteHint,
    TopicList,
    TopicListRequest,
    UnregisterBrokerRequest,
    WipeWritePermRequest,
    topic_hash,
)
from mqmesh.roles.descriptors import room_for_connections
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.live_settings import LiveSettings
from mqmesh.roles.namesrv.config import CHANGEABLE, NamesrvConfig
from mqmesh.roles.namesrv.effects import Announce, Effect
from mqmesh.roles.namesrv.kv_table import KvTable
from mqmesh.roles.namesrv.route_table import (
    MAX_HINT_TOPICS,
    ROUTE_METRICS,
    OrderedTopics,
    RouteTable,
)
from mqmesh.roles.settings_service import OnKept, SettingsService
from mqmesh.roles.shell import RoleShell
from mqmesh.roles.started_as import begin_in
from mqmesh.storage.files.atomic_file import load_document, save_document
from mqmesh.storage.files.store_lock import StoreLock
from mqmesh.transport.interface import Publisher, ServerLimits, Timer, Transport
from mqmesh.units import MIB

STATE_FILE: Final = "namesrv.json"
STATE_VERSION: Final = 1
HINT_INTERVAL_MS: Final = 100
"""The first change is published at once, later changes within this time together."""

_log = logging.getLogger(__name__)


class _Saved(msgspec.Struct, frozen=True):
    """State that outlives a restart; the JSON document of ``STATE_FILE``."""

    version: int = STATE_VERSION
    kv: dict[str, dict[str, str]] = {}
    drained: list[str] = []
    ordered: list[OrderedTopics] = []
    overrides: dict[str, str] = {}


class NameServer:
    """One name server; it knows of no other.

    Args:
        config: Settings.
        transport: Transport of the process.
        clock: Source of time, the loop's by default.
    """

    def __init__(
        self,
        config: NamesrvConfig,
        transport: Transport,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._settings = LiveSettings(config, CHANGEABLE, f"name server {config.name}")
        self._transport = transport
        self._loop = transport.loop
        self._clock = clock or transport.loop.clock
        self._shell = RoleShell(ServedBy.NAMESRV, "namesrv", config.name, transport, clock)
        self._desk = SettingsService(
            self._settings, self._keep_overrides, self._on_settings, self._shell.dispatch
        )
        self._ticks: Timer | None = None
        self._publisher: Publisher | None = None
        self._lock: StoreLock | None = None
        self._state_path = Path(config.data_dir, STATE_FILE) if config.data_dir else None
        self._unsaved = False
        self._hint_endpoint = ""
        self._hint: Announce | None = None
        self._next_hint_ms = 0

    # ---- Life ------------------------------------------------------------------------

    def start(self) -> str:
        """Reads what was saved, and listens.

        Returns:
            The endpoint for requests.

        Raises:
            OSError: A port is taken, or ``data_dir`` cannot be used.
            StoreLocked: Another process uses ``data_dir``.
            ConfigError: Security was on in ``data_dir``, and is off now.
            StorageError: The saved state cannot be read.
        """
        saved = self._load()
        try:
            self._settings.take(saved.overrides)
        except ConfigError as error:
            _log.error(
                "what `mqmesh namesrv set` has changed is not in force, %s: %s",
                self._state_path, error,
            )  # fmt: skip
        config = self._config = self._settings.now
        self._kv = KvTable(config.max_kv_bytes, saved.kv)
        self._table = RouteTable(
            broker_expire_ms=config.broker_expire_ms,
            max_brokers=config.max_brokers,
            max_topic_entries=config.max_topic_entries,
            drained=saved.drained,
            ordered=saved.ordered,
        )
        host = bindable(config.listen_host)
        self._publisher = self._transport.publish()
        bound = self._publisher.bind(f"tcp://{host}:{config.publish_port}")
        port = bound.rpartition(":")[2]
        self._hint_endpoint = f"tcp://{config.advertised_host or host}:{port}"
        limits = ServerLimits(
            max_connections=room_for_connections(config.max_connections, 0),
            max_total_pending_bytes=config.max_total_pending_bytes,
            max_frame_bytes=MAX_HEADER_BYTES + MIB,
        )
        server = self._shell.open(self._handlers(), self._on_disconnect, limits)
        endpoint = server.bind(f"tcp://{host}:{config.listen_port}")
        self._ticks = self._shell.every(config.scan_interval_ms, self._tick)
        self._shell.expose(ROUTE_METRICS, lambda: self._table)
        self._shell.look_after_peers()
        self._shell.ready()
        if config.allow_insecure_bind:
            _log.warning("allow_insecure_bind: everybody who reaches %s may do all", endpoint)
        self._shell.on_access_change = self._publisher.review
        return endpoint

    def stop(self) -> None:
        """Closes everything; also what a failed ``start`` left open."""
        self._shell.close()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        if self._lock is not None:
            if self._unsaved:
                self._save()
            self._lock.release()
            self._lock = None

    # ---- Handlers --------------------------------------------------------------------

    def _handlers(self) -> dict[RequestCode, Handler]:
        return {
            RequestCode.REGISTER_BROKER: self._register,
            RequestCode.UNREGISTER_BROKER: self._unregister,
            RequestCode.GET_ROUTEINFO_BY_TOPIC: self._route,
            RequestCode.GET_ROUTES_OF_TOPICS: self._routes,
            RequestCode.GET_BROKER_CLUSTER_INFO: self._cluster,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER: self._topics,
            RequestCode.DELETE_TOPIC_IN_NAMESRV: self._delete_topic,
            RequestCode.WIPE_WRITE_PERM_OF_BROKER: self._wipe_write_perm,
            RequestCode.PUT_KV_CONFIG: self._put_kv,
            RequestCode.GET_KV_CONFIG: self._get_kv,
            RequestCode.DELETE_KV_CONFIG: self._delete_kv,
            RequestCode.LIST_KV_CONFIG: self._list_kv,
            RequestCode.GET_NAMESRV_CONFIG: self._desk.get,
            RequestCode.UPDATE_NAMESRV_CONFIG: self._desk.update,
        }

    def _register(self, request: Request, header: RegisterBrokerRequest) -> Answer:
        # The key that a broker reports counts for nothing: clients trust the key that it has
        # proved.
        address = msgspec.structs.replace(header.address, server_key=request.peer.principal.key)
        header = msgspec.structs.replace(header, address=address)
        response, effects = self._table.on_register(
            header, request.peer, self._clock.monotonic_ms()
        )
        self._carry_out(effects)
        guard = self._transport.guard
        if guard is not None:
            version = guard.access_list.version
            response = msgspec.structs.replace(response, access_version=version)
        return response

    def _unregister(self, request: Request, header: UnregisterBrokerRequest) -> Reply:
        self._carry_out(self._table.on_unregister(header))
        return EMPTY_REPLY

    def _route(self, request: Request, header: GetRouteRequest) -> Answer:
        topic = header.topic
        return self._table.route(topic, self._hint_endpoint)

    def _routes(self, request: Request, header: GetRoutesRequest) -> Answer:
        known, hidden = [], []
        for topic in header.topics:
            try:
                self._shell.dispatch.permit(request.peer, request.command.code, topic)
                known.append(topic)
            except TopicNotFound:
                hidden.append(topic)  # as if it were not there
        found = self._table.routes(known, self._hint_endpoint)
        return msgspec.structs.replace(found, missing=found.missing + hidden)

    def _cluster(self, request: Request, header: GetClusterRequest) -> ClusterInfo:
        return ClusterInfo(self._table.brokers(), self._hint_endpoint)

    def _topics(self, request: Request, header: TopicListRequest) -> TopicList:
        namespace = request.peer.principal.namespace
        return TopicList([one for one in self._table.topics() if is_within(namespace, one)])

    def _delete_topic(self, request: Request, header: DeleteTopicRequest) -> Reply:
        self._carry_out(self._table.on_delete_topic(header.topic))
        return EMPTY_REPLY

    def _wipe_write_perm(self, request: Request, header: WipeWritePermRequest) -> Answer:
        response, effects = self._table.on_wipe_write_perm(header)
        self._carry_out(effects, must_save=True)
        return response

    def _put_kv(self, request: Request, header: KvRequest) -> Reply:
        self._carry_out(self._kv.put(header), must_save=True)
        return EMPTY_REPLY

    def _get_kv(self, request: Request, header: KvRequest) -> KvResponse:
        return KvResponse(self._kv.get(header))

    def _delete_kv(self, request: Request, header: KvRequest) -> Reply:
        self._carry_out(self._kv.delete(header), must_save=True)
        return EMPTY_REPLY

    def _list_kv(self, request: Request, header: KvRequest) -> KvResponse:
        if not header.namespace:
            return KvResponse({}, self._kv.namespaces())
        return KvResponse(self._kv.list_namespace(header))

    # ---- Settings ----------------------------------------------------------------------

    def _keep_overrides(self, overrides: dict[str, str], on_kept: OnKept) -> None:
        on_kept(self._save(overrides) if self._state_path is not None else None)

    def _on_settings(self) -> None:
        config = self._config = self._settings.now
        self._table.broker_expire_ms = config.broker_expire_ms
        if self._ticks is not None:
            self._ticks.cancel()
        self._ticks = self._shell.every(config.scan_interval_ms, self._tick)

    # ---- Events ----------------------------------------------------------------------

    def _on_disconnect(self, peer: Peer) -> None:
        self._carry_out(self._table.on_disconnect(peer))

    def _tick(self) -> None:
        self._carry_out(self._table.tick(self._clock.monotonic_ms()))
        if self._unsaved:
            self._save()

    # ---- Effects ---------------------------------------------------------------------

    def _carry_out(self, effects: Iterable[Effect], *, must_save: bool = False) -> None:
        changed = False
        for effect in effects:
            if isinstance(effect, Announce):
                self._announce(effect)
            else:
                changed = True
        if changed and self._state_path is not None:
            self._unsaved = True
            error = self._save()
            if error is not None and must_save:
                raise error

    def _announce(self, change: Announce) -> None:
        if self._hint is None:
            # After this turn of the loop, so that many changes together make one hint; and in a
            # rush of changes at most one each HINT_INTERVAL_MS.
            now_ms = self._clock.monotonic_ms()
            self._hint = change
            self._loop.call_later(max(self._next_hint_ms - now_ms, 0), self._publish)
            return
        both = self._hint.topics | change.topics
        few = self._hint.topics and change.topics and len(both) <= MAX_HINT_TOPICS
        self._hint = Announce(self._hint.brokers | change.brokers, both if few else frozenset())

    def _publish(self) -> None:
        hint, self._hint = self._hint, None
        self._next_hint_ms = self._clock.monotonic_ms() + HINT_INTERVAL_MS
        if hint is not None and self._publisher is not None:
            _log.info("routes of %s changed", ", ".join(sorted(hint.brokers)))
            self._publisher.publish(
                encode_header(RouteHint(sorted(hint.brokers), sorted(map(topic_hash, hint.topics))))
            )

    # ---- State on disk ---------------------------------------------------------------

    def _load(self) -> _Saved:
        if self._state_path is None:
            return _Saved()
        make_folder(self._state_path.parent)
        make_private(self._state_path)
        self._lock = StoreLock(self._state_path.parent)
        begin_in(self._state_path.parent, self._config.security)
        document = load_document(self._state_path)
        if document is None:
            return _Saved()
        try:
            saved = msgspec.json.decode(document, type=_Saved)
        except msgspec.MsgspecError as error:
            raise CorruptRecord(f"{self._state_path} cannot be understood: {error}") from error
        if saved.version != STATE_VERSION:
            raise CorruptRecord(
                f"{self._state_path} has version {saved.version}; this program reads "
                f"{STATE_VERSION} only"
            )
        return saved

    def _save(self, overrides: dict[str, str] | None = None) -> StorageError | None:
        assert self._state_path is not None
        saved = _Saved(
            kv=self._kv.dump(),
            drained=self._table.drained(),
            ordered=self._table.ordered(),
            overrides=self._settings.overrides if overrides is None else overrides,
        )
        try:
            save_document(self._state_path, msgspec.json.format(msgspec.json.encode(saved)))
        except StorageError as error:
            # It is in force, and tried again with the next scan.
            _log.error("%s", error)
            return error
        self._unsaved = False
        return None
