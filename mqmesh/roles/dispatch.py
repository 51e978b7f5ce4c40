"""Dispatch of requests to handlers: decoded, permitted, counted, timed; once for all servers.

A handler is a function ``(request, header) -> Answer | None``: it returns the struct of its
answer's header, or a ``Reply`` where there is a body; None means that it answers later.
The command server turns an error that a handler raises into a response code, by the table in
``protocol/codes.py``.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec

from mqmesh.errors import BrokerError, BrokerNotAvailable, NoPermission
from mqmesh.metrics import (
    LATENCY_BOUNDS_MS,
    Distribution,
    Histogram,
    LabelValues,
    Measured,
    counter,
    gauge,
    histogram,
)
from mqmesh.protocol.codes import ResponseCode, code_of
from mqmesh.protocol.command import Answer, Principal, Reply, reply_of
from mqmesh.protocol.commands import CommandSpec, RequestCode, Right, ServedBy, served_by
from mqmesh.protocol.request import Peer, PendingReply, Request

Handler = Callable[[Request, Any], Answer | None]
Serve = Callable[[Request], Reply | None]
Audit = Callable[[Peer, RequestCode, list[str], list[str], BaseException | None, str], None]
"""Function called for each action of an administrator and each refusal: requesting peer, command,
topics, groups, error, and the handler's description."""

_NS_PER_MS: Final = 1_000_000
_LONG_POLLING: Final = frozenset({RequestCode.PULL_MESSAGE, RequestCode.PULL_SCHEDULE})
"""Commands that may wait for messages; their latency says nothing about the server."""


class Authorizer(Protocol):
    """Check of rights before a command is served."""

    def check(self, principal: Principal, spec: CommandSpec, header: Any) -> None:
        """Looks up the right that a command needs.

        Args:
            principal: User that asks.
            spec: The command; it names the fields of the header that hold topics and groups.
            header: The decoded header.

        Raises:
            NoPermission: The principal lacks it.
        """

    def check_topic(self, principal: Principal, spec: CommandSpec, topic: str) -> None:
        """Looks up the right for a topic that is not in the header: see ``IN_BODY``, ``LOOKED_UP``.

        Args:
            principal: User that asks.
            spec: The command.
            topic: Topic that the command is about, too.

        Raises:
            NoPermission: The principal lacks the right to it.
        """

    def check_group(self, principal: Principal, spec: CommandSpec, group: str) -> None:
        """Looks up whether a group that is not in the header is in the namespace of a user.

        Args:
            principal: User that asks.
            spec: The command.
            group: Group that the command is about, too.

        Raises:
            NoPermission: The group is not in the namespace.
        """

    def check_creation(self, principal: Principal, topic: str) -> None:
        """Looks up the right to have a topic made by sending to it.

        Args:
            principal: User that sends.
            topic: Topic that is to be made.

        Raises:
            NoPermission: The principal lacks it.
        """


class CommandLatencies(dict[int, Histogram]):
    """Latencies of one command in ms, by the response code that it was answered with."""

    def __missing__(self, code: int) -> Histogram:
        """Begin the histogram of a response code."""
        meter = self[code] = Histogram(LATENCY_BOUNDS_MS)
        return meter

    def read(self) -> dict[str, Distribution]:
        """Return the latencies so far, by the code's name."""
        return {ResponseCode(code).name.lower(): meter.read() for code, meter in self.items()}


class CommandCount(msgspec.Struct):
    """Counters of one command.

    Attributes:
        requests: Number of requests taken, including those that failed.
        failures: Requests refused at once, or failed; later refusals are not counted here.
        spent_ns: Time of its handler altogether.
        longest_ns: Longest time of its handler.
        latency: Time from its handler's beginning to its answer.
        held_latency: The same of requests that waited for messages.
    """

    requests: int = 0
    failures: int = 0
    spent_ns: int = 0
    longest_ns: int = 0
    latency: CommandLatencies = msgspec.field(default_factory=CommandLatencies)
    held_latency: CommandLatencies = msgspec.field(default_factory=CommandLatencies)


class Dispatch:
    """Dispatch of one role's commands to their handlers.

    Args:
        server: The role.
        now_ns: Monotonic clock.
        authorizer: Looks up rights; None where every connected peer may do everything.

    Attributes:
        handlers: Handlers by request code, for the command server; ``open`` and ``refuse`` change
            them.
        counts: Counts by request code.
        looks_up: Rights are looked up; else every connected peer may do everything.
        audit: Audit function; None for no audit.
    """

    def __init__(
        self, server: ServedBy, now_ns: Callable[[], int], authorizer: Authorizer | None = None
    ) -> None:
        self._specs = served_by(server)
        self._now_ns = now_ns
        self._authorizer = authorizer
        self.looks_up = authorizer is not None
        self.handlers: dict[int, Serve] = {}
        self._kept: set[RequestCode] = set()
        self.audit: Audit | None = None
        self._noted: NoPermission | None = None
        self._described = ""
        self.counts = {code: CommandCount() for code in self._specs}

    def open(self, handlers: Mapping[RequestCode, Handler]) -> None:
        """Serves these commands from now on, also those that had handlers before."""
        for code, handler in handlers.items():
            self.handlers[int(code)] = self._serve(self._specs[code], handler)

    def keep(self, handlers: Mapping[RequestCode, Handler]) -> None:
        """Serves these commands from now on, also when all others are refused."""
        self.open(handlers)
        self._kept |= handlers.keys()

    def refuse(self, reason: str, kind: Callable[[str], BrokerError] = BrokerNotAvailable) -> None:
        """Refuses every command that is not kept from now on; not counted here.

        Args:
            reason: Error message that clients get.
            kind: Makes the error that they get.
        """

        def refusing(request: Request) -> Reply | None:
            raise kind(reason)

        self.handlers |= {int(code): refusing for code in self._specs.keys() - self._kept}

    def permit(self, peer: Peer, code: int, topic: str) -> None:
        """Looks up the right to a topic that a handler has found out for itself.

        Args:
            peer: Peer whose request is served.
            code: Request code.
            topic: Topic that it is about.

        Raises:
            NoPermission: The client lacks it.
        """
        if self._authorizer is None:
            return
        command = RequestCode(code)
        try:
            self._authorizer.check_topic(peer.principal, self._specs[command], topic)
        except NoPermission as error:
            self._note_refusal(peer, command, [topic], [], error)
            raise

    def permit_group(self, peer: Peer, code: int, group: str) -> None:
        """Looks up whether a group that a handler has found out for itself may be named.

        Args:
            peer: Peer whose request is served.
            code: Request code.
            group: Group that it is about.

        Raises:
            NoPermission: It is not in the namespace of the client.
        """
        if self._authorizer is None:
            return
        command = RequestCode(code)
        try:
            self._authorizer.check_group(peer.principal, self._specs[command], group)
        except NoPermission as error:
            self._note_refusal(peer, command, [], [group], error)
            raise

    def permit_creation(self, peer: Peer, code: int, topic: str) -> None:
        """Looks up the right to have a topic made by sending to it.

        Args:
            peer: Peer whose request is served.
            code: Request code.
            topic: Topic that is to be made.

        Raises:
            NoPermission: The client lacks it.
        """
        if self._authorizer is None:
            return
        try:
            self._authorizer.check_creation(peer.principal, topic)
        except NoPermission as error:
            self._note_refusal(peer, RequestCode(code), [topic], [], error)
            raise

    def _note_refusal(
        self,
        peer: Peer,
        command: RequestCode,
        topics: list[str],
        groups: list[str],
        error: NoPermission,
    ) -> None:
        if self.audit is not None:
            # Handlers may let it pass through, or put it into an answer's body.
            self._noted = error
            self.audit(peer, command, topics, groups, error, "")

    def describe(self, what: str) -> None:
        """Describes the command that is being served, for readers of the audit log."""
        self._described = what

    def _serve(self, spec: CommandSpec, handler: Handler) -> Serve:
        # A closure rather than methods: every send and pull runs it.
        decode, now_ns = spec.decoder(), self._now_ns
        check = None if self._authorizer is None else self._authorizer.check
        count = self.counts[spec.code]
        encode = encoder_of(spec)
        latency = count.latency
        late = count.held_latency if spec.code in _LONG_POLLING else count.latency
        of_admin = spec.right in (Right.ADMIN, Right.ADMIN_OWN)

        def note(request: Request, header: Any, error: BaseException | None) -> None:
            what, self._described = self._described, ""
            if self.audit is not None and (error is None or error is not self._noted):
                topics, groups = spec.topic_names(header), spec.group_names(header)
                self.audit(request.peer, spec.code, topics, groups, error, what)

        def answered(pending: PendingReply, code: int) -> None:
            late[code].observe((now_ns() - pending.received_ns) / _NS_PER_MS)

        def serve(request: Request) -> Reply | None:
            began_ns = request.received_ns = now_ns()
            request.on_answer = answered
            answered_with: int | None = None
            header = None
            try:
                header = decode(request.command.header)
                if check is not None:
                    check(request.peer.principal, spec, header)
                answer = handler(request, header)
                reply = None
                if answer is not None:
                    reply = answer if type(answer) is Reply else encode(answer)
                    answered_with = reply.code
                if of_admin:
                    note(request, header, None)
                return reply
            except BaseException as error:
                count.failures += 1
                answered_with = code_of(error)
                if header is not None and (of_admin or isinstance(error, NoPermission)):
                    note(request, header, error)
                raise
            finally:
                spent_ns = now_ns() - began_ns
                count.requests += 1
                count.spent_ns += spent_ns
                if spent_ns > count.longest_ns:
                    count.longest_ns = spent_ns
                if answered_with is not None:
                    latency[answered_with].observe(spent_ns / _NS_PER_MS)

        return serve


def encoder_of(spec: CommandSpec) -> Callable[[Answer], Reply]:
    """Return the encoder of a command's answers; an answer of another type is a bug."""

    def encode(answer: Answer) -> Reply:
        assert type(answer) is spec.reply, f"{spec.code.name} answers {type(answer).__name__}"
        return reply_of(answer)

    return encode


def _by_command(counts: Mapping[RequestCode, CommandCount], name: str) -> dict[LabelValues, int]:
    met = {code: count for code, count in counts.items() if count.requests}
    return {(code.name.lower(),): getattr(count, name) for code, count in met.items()}


def _ms_by_command(
    counts: Mapping[RequestCode, CommandCount], name: str
) -> dict[LabelValues, float]:
    return {labels: ns / _NS_PER_MS for labels, ns in _by_command(counts, name).items()}


def _latency_by_command(
    counts: Mapping[RequestCode, CommandCount],
) -> dict[LabelValues, Distribution]:
    return {
        (code.name.lower(), held, answer): total
        for code, count in counts.items()
        for held, meter in (("false", count.latency), ("true", count.held_latency))
        for answer, total in meter.read().items()
    }


METRICS: Final[tuple[Measured[Mapping[RequestCode, CommandCount]], ...]] = (
    counter(
        "command_requests_total",
        "requests that were served",
        lambda counts: _by_command(counts, "requests"),
        labels=("request_code",),
    ),
    counter(
        "command_failures_total",
        "of them, those that failed at once",
        lambda counts: _by_command(counts, "failures"),
        labels=("request_code",),
    ),
    counter(
        "command_spent_ms_total",
        "what the event loop spent in handlers",
        lambda counts: _ms_by_command(counts, "spent_ns"),
        labels=("request_code",),
    ),
    histogram(
        "command_latency_ms",
        "from a request to its answer",
        _latency_by_command,
        labels=("request_code", "is_long_polling", "response_code"),
        rocketmq_name="rocketmq_rpc_latency_milliseconds",
    ),
    gauge(
        "command_longest_ms",
        "the longest turn of a handler",
        lambda counts: _ms_by_command(counts, "longest_ns"),
        labels=("request_code",),
    ),
)
"""Metrics of ``Dispatch.counts``; commands that no client sent are left out."""
