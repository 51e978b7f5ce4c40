"""Clients by gRPC: their settings, Telemetry streams, and membership at brokers.

A client has one id on all its connections. For each broker group that it uses, the gateway sends
heartbeats in its name, so brokers know each client as a member of its own.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from mqmesh.batch.delayed_batch import DEFAULT_DELAY_LEVELS, parse_delay_levels
from mqmesh.errors import GroupNotFound, MQMeshError
from mqmesh.message import check_group, check_topic
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.delivery import DeliveryMode
from mqmesh.protocol.gateway import GatewayClient, shown_names
from mqmesh.protocol.groups import (
    GetGroupsRequest,
    GroupConfig,
    GroupSummaries,
    UpdateGroupRequest,
)
from mqmesh.protocol.grpc.calls import GrpcStatus
from mqmesh.protocol.grpc.codes import ClientType, FilterType, RefusedCall, ReplyCode
from mqmesh.protocol.grpc.messages import CLASSES, GrpcMessage, duration
from mqmesh.protocol.membership import (
    ConsumeFromWhere,
    ConsumerData,
    HeartbeatRequest,
    MessageModel,
    Subscription,
    UnregisterClientRequest,
)
from mqmesh.protocol.policies import parse_retry_delays
from mqmesh.protocol.pulling import ExpressionType
from mqmesh.protocol.retries import DEFAULT_MAX_RECONSUME_TIMES, FIRST_RETRY_LEVEL
from mqmesh.roles.gateway.grpc.session import (
    MOST_ID_CHARACTERS,
    OK,
    GrpcMethod,
    GrpcSession,
    ServedCall,
)
from mqmesh.roles.gateway.messages import tag_expression
from mqmesh.roles.gateway.upstream import Upstream
from mqmesh.sdk.consumer.fetching.message_selector import MessageSelector
from mqmesh.units import MIB

LEAVE_MS: Final = 1_000
"""So long after its last connection ended a client leaves, unless it came back."""
HEARTBEAT_MS: Final = 20_000
"""Interval of heartbeats to brokers in the names of clients."""
SILENT_MS: Final = 90_000
"""A client whose connections are there, but that sends no call for so long, is gone."""
SETTINGS_KEPT_MS: Final = 10_000
"""Time after which the settings of a consumer group are queried again."""
MOST_IDS: Final = 1_000
"""Clients of one connection; a proxy may have those of many."""
MOST_PRODUCED: Final = 256
"""Topics of one client's transactions."""
MOST_TOPICS: Final = 1_024
"""Topics that one client subscribes to."""
MOST_RECEIVES: Final = 64
"""Receives and pulls of one client that wait at one broker group, with those that it gave up."""
MOST_ADDRESSES: Final = 16
MOST_HOST_CHARACTERS: Final = 255
RECEIVE_BATCH: Final = 32
LONG_POLLING_S: Final = 20
BEFORE_DEADLINE_MS: Final = 500
"""Time before a call's deadline at which it is answered."""
MOST_TELEMETRY_BYTES: Final = 1 * MIB
"""Longest message of a client's Telemetry stream: its stacks."""
FIFO_RETRY_MS: Final = 1_000
NODEJS: Final = 8
"""Language in a client's settings. Node.js's client 1.0.8 knows no schedule of retries, and without
one gives a message of a fifo group up when it fails once."""
MAX_BODY_BYTES: Final = 4 * 1024 * 1024
SEND_ATTEMPTS: Final = 3

OnJoined = Callable[[MQMeshError | None], None]
OnGroup = Callable[[GroupConfig | MQMeshError], None]
_log = logging.getLogger(__name__)


class _Joined(msgspec.Struct, eq=False):
    """A client at one broker group: the heartbeat that it took last, and who waits for the next."""

    heartbeat: HeartbeatRequest | None = None
    reported: HeartbeatRequest | None = None
    waiting: list[OnJoined] = []


class GrpcClient(msgspec.Struct, eq=False):
    """A client.

    Attributes:
        client_id: Id of the client.
        language: Language of the client, and version of its library.
        version: See ``language``.
        kind: ``ClientType``.
        group: Consumer group; "" for producers.
        subscriptions: Subscriptions by topic.
        produced: Topics that it sends transactions for; each is a producer group of its own.
        delivery: Mode of its group, once that is known.
        has_schedule: It knows when to try again what failed; else the group's schedule counts.
        sessions: Connections of the client.
        streams: Telemetry streams of the client.
        brokers: Broker groups that know it.
        receives: Receives and pulls without a broker's answer, by broker group.
        last_seen_ms: Time of its last call, monotonic clock.
    """

    client_id: str
    language: str
    version: str
    last_seen_ms: int
    kind: int = ClientType.UNSPECIFIED
    group: str = ""
    subscriptions: dict[str, Subscription] = {}
    produced: dict[str, None] = {}
    delivery: str = DeliveryMode.MESSAGE.value
    has_schedule: bool = True
    sessions: dict[GrpcSession, None] = {}
    streams: dict[ServedCall, None] = {}
    brokers: dict[str, _Joined] = {}
    receives: dict[str, int] = {}

    def heartbeat(self) -> HeartbeatRequest:
        """Return what brokers are to know of it."""
        consumers = []
        if self.group and self.subscriptions:
            consumers.append(
                ConsumerData(
                    self.group,
                    MessageModel.CLUSTERING.value,
                    # As RocketMQ's: a new group finds what is in a young topic.
                    ConsumeFromWhere.FIRST_OFFSET.value,
                    list(self.subscriptions.values()),
                    self.delivery,
                )
            )
        return HeartbeatRequest(
            self.client_id, list(self.produced), consumers, self.language, self.version
        )

    def check_receives(self, broker_name: str) -> None:
        """Check that one receive or pull more may wait at a broker.

        Raises:
            RefusedCall: Too many do.
        """
        if self.receives.get(broker_name, 0) >= MOST_RECEIVES:
            raise RefusedCall(
                ReplyCode.TOO_MANY_REQUESTS,
                f"{MOST_RECEIVES} receives and pulls of the client wait at broker group "
                f"{broker_name!r:.100} already, with those that it gave up",
            )

    def begin_receive(self, broker_name: str) -> None:
        """Note that a receive or pull waits at a broker."""
        self.receives[broker_name] = self.receives.get(broker_name, 0) + 1

    def end_receive(self, broker_name: str) -> None:
        """Note that a broker holds a receive or pull no more."""
        left = self.receives.pop(broker_name) - 1
        if left:
            self.receives[broker_name] = left

    def row(self, user: str, now_ms: int) -> GatewayClient:
        """Return what administrators see of it; ``user`` is its access key."""
        return GatewayClient(
            self.client_id,
            user,
            "gRPC",
            next(iter(self.sessions)).peer if self.sessions else "",
            self.language,
            self.version,
            bool(self.sessions),
            now_ms - self.last_seen_ms,
            shown_names(self.produced),
            [self.group] if self.group else [],
            shown_names(self.subscriptions),
            sorted(self.brokers),
        )


class GrpcClients:
    """All clients by gRPC.

    Args:
        upstream: Way to the brokers.
        brokers: Returns the names of the broker groups that are served.
        max_clients: More are refused.
        on_left: Called with a client that is gone.
        on_reply: Called with a client and its answer to a question.
    """

    def __init__(
        self,
        upstream: Upstream,
        brokers: Callable[[], Iterable[str]],
        max_clients: int,
        on_left: Callable[[GrpcClient], None],
        on_reply: Callable[[GrpcClient, GrpcMessage], None],
    ) -> None:
        self._upstream = upstream
        self._brokers = brokers
        self._max_clients = max_clients
        self._on_left = on_left
        self._on_reply = on_reply
        self._clients: dict[str, GrpcClient] = {}
        self._groups: dict[tuple[str, str], tuple[int, GroupConfig]] = {}

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._clients)

    def methods(self) -> dict[str, GrpcMethod]:
        """Return the methods about clients themselves."""
        return {
            "Heartbeat": GrpcMethod("HeartbeatRequest", "HeartbeatResponse", self._heartbeat),
            "NotifyClientTermination": GrpcMethod(
                "NotifyClientTerminationRequest", "NotifyClientTerminationResponse", self._terminate
            ),
            "Telemetry": GrpcMethod(
                "TelemetryCommand",
                "TelemetryCommand",
                self._telemetry,
                is_stream=True,
                max_request_bytes=MOST_TELEMETRY_BYTES,
            ),
        }

    def meet(self, call: ServedCall) -> None:
        """Note by which connection a client comes that is known.

        Raises:
            RefusedCall: The call names no client, or its connection has too many.
        """
        client_id = call.client_id
        if not 0 < len(client_id) <= MOST_ID_CHARACTERS:
            raise RefusedCall(
                ReplyCode.CLIENT_ID_REQUIRED,
                f"the header x-mq-client-id must have 1 to {MOST_ID_CHARACTERS} characters",
            )
        client = self._clients.get(client_id)
        if client is not None:
            self._note(client, call.session)

    def _note(self, client: GrpcClient, session: GrpcSession) -> None:
        client.last_seen_ms = self._now_ms()
        _check_ids(client.client_id, session)
        client.sessions[session] = None
        session.client_ids[client.client_id] = None

    def of(self, call: ServedCall) -> GrpcClient:
        """Return the client of a call that only a client can make; it is known from then on.

        Raises:
            RefusedCall: There are too many.
        """
        client_id = call.client_id
        client = self._clients.get(client_id)
        if client is None:
            _check_ids(client_id, call.session)
            if len(self._clients) >= self._max_clients:
                raise RefusedCall(
                    ReplyCode.TOO_MANY_REQUESTS,
                    f"{self._max_clients} clients are the limit (max_connections)",
                )
            client = self._clients[client_id] = GrpcClient(
                client_id,
                call.headers.get("x-mq-language", "")[:32],
                call.headers.get("x-mq-client-version", "")[:32],
                self._now_ms(),
            )
            self._note(client, call.session)
        return client

    def all(self) -> Iterable[GrpcClient]:
        """Return all clients."""
        return self._clients.values()

    def find(self, client_id: str) -> GrpcClient | None:
        """Return a client by its id."""
        return self._clients.get(client_id)

    def producers(self, topic: str) -> list[ServedCall]:
        """Return Telemetry streams of producers that send transactions for a topic."""
        return [
            stream
            for one in self._clients.values()
            if topic in one.produced
            for stream in one.streams
        ]

    def session_ended(self, session: GrpcSession) -> None:
        """Have the clients of a connection leave soon, unless they come back."""
        for client_id in list(session.client_ids):
            client = self._clients.get(client_id)
            if client is not None:
                client.sessions.pop(session, None)
                if not client.sessions:
                    self._upstream.loop.call_later(LEAVE_MS, partial(self._leave_if_gone, client))

    def tick(self) -> None:
        """Send heartbeats in the name of clients; to be called each ``HEARTBEAT_MS``."""
        now_ms = self._now_ms()
        for client in list(self._clients.values()):
            if now_ms - client.last_seen_ms > SILENT_MS and not client.streams:
                self._leave(client)
            elif client.sessions:  # else it may be at another worker by now
                for broker_name in client.brokers:
                    self._send(client, broker_name)

    def on_broker_up(self, broker_name: str, on_joined: Callable[[GrpcClient], None]) -> None:
        """Send heartbeats again to a broker that may know nothing of the clients.

        Args:
            broker_name: Broker group.
            on_joined: Called with each client that it knows again.
        """
        for client in self._clients.values():
            if broker_name in client.brokers:

                def joined(error: MQMeshError | None, client: GrpcClient = client) -> None:
                    if error is None:
                        on_joined(client)

                # Nothing of before counts, nor what is under way by the former connection.
                known = client.brokers[broker_name]
                known.heartbeat = known.reported = None
                self.join(client, broker_name, joined)

    def leave_all(self) -> None:
        """Have all clients leave: the gateway stops."""
        for client in list(self._clients.values()):
            self._leave(client)

    # ---- Membership ----------------------------------------------------------------------

    def join(self, client: GrpcClient, broker_name: str, on_joined: OnJoined) -> None:
        """Have a broker know a client as it is now.

        Args:
            client: The client.
            broker_name: Broker group.
            on_joined: Called with why that failed, or None; maybe before this returns.
        """
        joined = client.brokers.get(broker_name)
        if joined is None:
            joined = client.brokers[broker_name] = _Joined()
        wanted = client.heartbeat()
        if joined.heartbeat == wanted:
            on_joined(None)
            return
        joined.waiting.append(on_joined)
        if joined.reported != wanted:
            self._send(client, broker_name)

    def subscribe(self, client: GrpcClient, group: str, one: Subscription) -> None:
        """Note what a client receives; a consumer may do so before it says its settings.

        Raises:
            RefusedCall: It subscribes to too much.
        """
        if client.group != group:
            client.group, client.subscriptions = group, {}
        if client.subscriptions.get(one.topic) != one:
            if len(client.subscriptions) >= MOST_TOPICS:
                raise _too_many_topics()
            client.subscriptions[one.topic] = one

    def produces(self, client: GrpcClient, topic: str, broker_name: str) -> None:
        """Note that a client sends transactions, so that brokers ask it about them."""
        if topic not in client.produced:
            if len(client.produced) >= MOST_PRODUCED:
                del client.produced[next(iter(client.produced))]
            client.produced[topic] = None
        self.join(client, broker_name, _log_refusal)

    def find_group(self, group: str, broker_name: str, on_done: OnGroup) -> None:
        """Find the settings of a consumer group at a broker, which may be seconds old.

        Args:
            group: Consumer group; defaults for one that is unknown.
            broker_name: Broker group; "" for any that answers.
            on_done: Called with them, or why they are not known; maybe before this returns.
        """
        if broker_name:
            self._find_group(group, broker_name, on_done)
            return
        known = self._upstream.routes.address
        names = iter(sorted(self._brokers(), key=lambda name: not known(name)))

        def tried(found: GroupConfig | MQMeshError) -> None:
            name = next(names, "") if isinstance(found, MQMeshError) else ""
            if name:
                self._find_group(group, name, tried)
            else:
                on_done(found)

        tried(GroupNotFound("no broker group is served yet"))

    def _find_group(self, group: str, broker_name: str, on_done: OnGroup) -> None:
        known = self._groups.get((broker_name, group))
        if known is not None and self._now_ms() - known[0] < SETTINGS_KEPT_MS:
            on_done(known[1])
            return

        def done(answer: Command | MQMeshError) -> None:
            try:
                if isinstance(answer, MQMeshError):
                    raise answer
                found = decode_header(GroupSummaries, answer.header).groups
            except MQMeshError as error:
                on_done(error)
                return
            config = GroupConfig(group, delivery=DeliveryMode.MESSAGE.value)
            if found and found[0].is_configured:
                config = found[0].config
                is_used = found[0].members or found[0].topics
                if config.delivery == DeliveryMode.QUEUE and not is_used:
                    self._change_mode(broker_name, config, keep)
                    return
            keep(config)

        def keep(config: GroupConfig) -> None:
            if len(self._groups) >= MOST_TOPICS:
                del self._groups[next(iter(self._groups))]
            self._groups[(broker_name, group)] = (self._now_ms(), config)
            on_done(config)

        header = encode_header(GetGroupsRequest(group))
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        self._upstream.ask(broker_name, code, header, done)

    def _change_mode(
        self, broker_name: str, config: GroupConfig, on_done: Callable[[GroupConfig], None]
    ) -> None:
        """Have members acknowledge each message in a group that was made and never used.

        Tools of RocketMQ make groups before their first member comes, and know no such mode.
        """
        wanted = msgspec.structs.replace(config, delivery=DeliveryMode.MESSAGE.value)

        def done(answer: Command | MQMeshError) -> None:
            # Where that is refused the group refuses its member, with a sentence.
            on_done(config if isinstance(answer, MQMeshError) else wanted)

        header = encode_header(UpdateGroupRequest(wanted, must_exist=True))
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        self._upstream.ask(broker_name, code, header, done)

    def _send(self, client: GrpcClient, broker_name: str) -> None:
        joined = client.brokers[broker_name]
        wanted = joined.reported = client.heartbeat()

        def done(answer: Command | MQMeshError) -> None:
            if joined.reported is wanted:
                joined.reported = None
            error = answer if isinstance(answer, MQMeshError) else None
            if error is None:
                joined.heartbeat = wanted
            if joined.reported is None:
                waiting, joined.waiting = joined.waiting, []
                for one in waiting:
                    one(error)

        self._upstream.ask(broker_name, RequestCode.HEART_BEAT, encode_header(wanted), done)

    def _leave_if_gone(self, client: GrpcClient) -> None:
        if not client.sessions:
            self._leave(client)

    def _leave(self, client: GrpcClient) -> None:
        if self._clients.get(client.client_id) is not client:
            return
        del self._clients[client.client_id]
        for session in client.sessions:
            session.client_ids.pop(client.client_id, None)
        self._on_left(client)
        header = encode_header(UnregisterClientRequest(client.client_id))
        for broker_name in client.brokers:
            self._upstream.ask(broker_name, RequestCode.UNREGISTER_CLIENT, header, _ignore)

    def _now_ms(self) -> int:
        return self._upstream.loop.clock.monotonic_ms()

    # ---- Calls ---------------------------------------------------------------------------

    def _heartbeat(self, call: ServedCall, request: GrpcMessage) -> None:
        self.of(call)
        call.answer()

    def _terminate(self, call: ServedCall, request: GrpcMessage) -> None:
        client = self.find(call.client_id)
        if client is not None:
            self._leave(client)
        call.answer()

    def _telemetry(self, call: ServedCall, command: GrpcMessage) -> None:
        if not command.HasField("settings"):
            client = self.find(call.client_id)
            if client is not None:
                self._on_reply(client, command)
            return
        settings = command.settings
        check_endpoints(settings.access_point)
        client = self.of(call)
        client.streams[call] = None
        call.on_over = partial(client.streams.pop, call, None)
        client.kind = settings.client_type
        client.has_schedule = settings.user_agent.language != NODEJS
        if not settings.HasField("subscription"):
            # Of one that was started again brokers may have half messages, before it sends others.
            for resource in settings.publishing.topics[:MOST_PRODUCED]:
                topic = name_of(resource)
                check_topic(topic)
                for broker_name in self._brokers():
                    self.produces(client, topic, broker_name)
            call.send(status=OK, settings=producer_settings(settings))
            return
        group = name_of(settings.subscription.group)
        check_group(group)
        entries = settings.subscription.subscriptions
        if len(entries) > MOST_TOPICS:
            raise _too_many_topics()
        for entry in entries:
            topic = name_of(entry.topic)
            check_topic(topic)
            self.subscribe(client, group, subscription_of(topic, entry.expression))

        if client.kind == ClientType.PULL_CONSUMER:
            # No member: its group keeps its mode.
            call.send(status=OK, settings=consumer_settings(settings, GroupConfig(group)))
            return

        def found(config: GroupConfig | MQMeshError) -> None:
            if isinstance(config, MQMeshError):
                # Wrong ones would mix up the order of messages; the client sends the query again.
                call.finish(GrpcStatus.UNAVAILABLE, f"settings of {group!r}: {config}"[:500])
                call.give_up()
                return
            client.delivery = delivery_of(config)
            call.send(status=OK, settings=consumer_settings(settings, config))

        self.find_group(group, "", found)


def subscription_of(topic: str, expression: GrpcMessage) -> Subscription:
    """Return a subscription of a client's filter expression.

    Raises:
        RefusedCall: The expression makes no sense, or is too long.
    """
    is_sql = expression.type == FilterType.SQL
    kind = ExpressionType.SQL92.value if is_sql else ExpressionType.TAG.value
    found = Subscription(topic, tag_expression(expression.expression or "*", kind), kind)
    try:
        selector_of(found).check()
    except MQMeshError as error:
        raise RefusedCall(ReplyCode.ILLEGAL_FILTER_EXPRESSION, str(error)) from error
    return found


def selector_of(wanted: Subscription) -> MessageSelector:
    """Return the selector of a subscription."""
    return MessageSelector(expression=wanted.expression, expression_type=wanted.expression_type)


def check_endpoints(endpoints: GrpcMessage) -> None:
    """Check addresses that a client names, for answers repeat them.

    Raises:
        RefusedCall: They are too many, or too long.
    """
    addresses = endpoints.addresses
    if len(addresses) > MOST_ADDRESSES or any(
        len(one.host) > MOST_HOST_CHARACTERS for one in addresses
    ):
        raise RefusedCall(
            ReplyCode.BAD_REQUEST,
            f"endpoints have at most {MOST_ADDRESSES} addresses, and their hosts "
            f"{MOST_HOST_CHARACTERS} characters; got {len(addresses)} addresses",
        )


def _check_ids(client_id: str, session: GrpcSession) -> None:
    if client_id not in session.client_ids and len(session.client_ids) >= MOST_IDS:
        raise RefusedCall(
            ReplyCode.TOO_MANY_REQUESTS, f"a connection speaks for at most {MOST_IDS} clients"
        )


def _too_many_topics() -> RefusedCall:
    return RefusedCall(
        ReplyCode.BAD_REQUEST, f"a client subscribes to at most {MOST_TOPICS} topics"
    )


def resource_of(name: str, namespace: str) -> GrpcMessage:
    """Return a name as clients in a namespace have it: they put both together again."""
    head = f"{namespace}%"
    if not namespace or not name.startswith(head):
        return CLASSES["Resource"](name=name)
    return CLASSES["Resource"](resource_namespace=namespace, name=name.removeprefix(head))


def names_of(group: GrpcMessage, topic: GrpcMessage) -> tuple[str, str]:
    """Return the names of a consumer group and a topic.

    Raises:
        RefusedCall: One of them is none.
    """
    name = name_of(group)
    try:
        check_group(name)
    except MQMeshError as error:
        raise RefusedCall(ReplyCode.ILLEGAL_CONSUMER_GROUP, str(error)) from error
    return name, topic_of(topic)


def topic_of(resource: GrpcMessage) -> str:
    """Return the name of a topic.

    Raises:
        RefusedCall: It is none.
    """
    name = name_of(resource)
    try:
        check_topic(name)
    except MQMeshError as error:
        raise RefusedCall(ReplyCode.ILLEGAL_TOPIC, str(error)) from error
    return name


def name_of(resource: GrpcMessage) -> str:
    """Return the name of a topic or group, which begins with its namespace."""
    space, name = resource.resource_namespace, resource.name
    return f"{space}%{name}" if space else str(name)


def producer_settings(settings: GrpcMessage) -> GrpcMessage:
    """Return a producer's settings, filled in."""
    found = CLASSES["Settings"]()
    found.CopyFrom(settings)
    found.publishing.max_body_size = MAX_BODY_BYTES
    found.publishing.validate_message_type = False
    found.metric.on = False
    if not found.backoff_policy.HasField("exponential_backoff"):
        backoff = found.backoff_policy.exponential_backoff
        backoff.initial.nanos, backoff.max.seconds, backoff.multiplier = 10_000_000, 1, 2.0
    found.backoff_policy.max_attempts = SEND_ATTEMPTS
    return found


def consumer_settings(settings: GrpcMessage, config: GroupConfig) -> GrpcMessage:
    """Return a consumer's settings, filled in from those of its group."""
    found = CLASSES["Settings"]()
    found.CopyFrom(settings)
    subscription = found.subscription
    is_fifo = config.delivery == DeliveryMode.FIFO
    subscription.fifo = is_fifo
    subscription.receive_batch_size = RECEIVE_BATCH
    if not subscription.HasField("long_polling_timeout"):
        subscription.long_polling_timeout.seconds = LONG_POLLING_S
    found.metric.on = False
    retries = config.retry_max_times
    if retries < 0:
        retries = DEFAULT_MAX_RECONSUME_TIMES
    found.backoff_policy.Clear()
    found.backoff_policy.max_attempts = retries + 1
    delays = [FIFO_RETRY_MS] if is_fifo else _retry_delays(config, retries)
    if settings.user_agent.language == NODEJS:
        backoff = found.backoff_policy.exponential_backoff
        backoff.initial.CopyFrom(duration(delays[0]))
        backoff.max.CopyFrom(duration(delays[-1]))
        backoff.multiplier = (delays[-1] / (delays[0] or 1)) ** (1 / max(len(delays) - 1, 1))
    else:
        found.backoff_policy.customized_backoff.next.extend(map(duration, delays))
    return found


def _retry_delays(config: GroupConfig, retries: int) -> list[int]:
    own = parse_retry_delays(config.retry_delays)
    levels = parse_delay_levels(DEFAULT_DELAY_LEVELS)[FIRST_RETRY_LEVEL - 1 :]
    if own is None:
        return list(levels)
    return [own.delay_ms(times, "") for times in range(max(min(retries, len(levels)), 1))]


def delivery_of(config: GroupConfig) -> str:
    """Return the mode in which a client joins a group; one in another mode refuses it."""
    return config.delivery if config.delivery == DeliveryMode.FIFO else DeliveryMode.MESSAGE.value


def _log_refusal(error: MQMeshError | None) -> None:
    if error is not None:
        _log.debug("a heartbeat was refused: %s", error)


def _ignore(answer: Command | MQMeshError) -> None:
    """Ignore what became of a farewell."""
