"""Requests on their way to brokers: a few in flight each, none to one that is away or paused."""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, Protocol

import msgspec

from mqmesh.errors import ClientClosed, MQMeshError
from mqmesh.protocol.command import Command
from mqmesh.sdk.client.broker_connections import BrokerConnections
from mqmesh.transport.interface import Loop, OnDone

WATCH_MS: Final = 100
"""Interval of looks at messages that wait for brokers without a connection."""

_log = logging.getLogger(__name__)


class Effects(msgspec.Struct, eq=False):
    """Consequences of an event, for the outbox to carry out.

    Attributes:
        pause: A broker that gets no request for a while, and for how many ms.
        later: Events that are to come after so many ms.
        on_left: Called once the next requests have left: a thread that it wakes wants the GIL.
    """

    pause: tuple[str, int] | None = None
    later: list[tuple[int, "Event"]] = []
    on_left: Callable[[], None] | None = None


Event = Callable[[], Effects | None]
"""Something that happens to messages to send, in the client loop."""


class OutgoingRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that is ready to go.

    Attributes:
        code: Its code.
        parts: Its body.
        header: Its header.
        timeout_ms: Longest wait for its answer.
        on_answer: Takes the answer, or why there is none; called exactly once.
    """

    code: int
    parts: Sequence[bytes]
    header: bytes
    timeout_ms: int
    on_answer: Callable[[Command | MQMeshError], Effects | None]


class RequestSource(Protocol):
    """Source of requests; a machine that knows nothing of its outbox. For the client loop."""

    def brokers(self) -> Collection[str]:
        """Return the brokers that something waits for."""

    def take(self, broker_name: str) -> OutgoingRequest | None:
        """Return the next request to a broker; None when nothing is left that may go now."""

    def without(self, broker_name: str) -> Effects | None:
        """End late messages, without a connection to a broker that they wait for."""


class BrokerNetwork(Protocol):
    """Way of requests to brokers; ``ClientEngine`` is one.

    Attributes:
        loop: The loop that all callbacks come in.
        brokers: The connections to masters.
    """

    loop: Loop
    brokers: BrokerConnections

    @property
    def closed(self) -> bool:
        """True when nothing is sent any more."""

    @property
    def request(self) -> "MasterRequest":
        """Function that sends a request to a broker group's master, ``MasterRequests.request``."""

    def post(self, callback: Callable[[], None]) -> None:
        """Call back in the loop, soon; from any thread.

        Raises:
            ClientClosed: It is closed.
        """


class MasterRequest(Protocol):
    """Type of ``MasterRequests.request``."""

    def __call__(
        self,
        broker_name: str,
        code: int,
        on_done: OnDone,
        *parts: bytes | memoryview,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Ask a broker group's master."""


class Turns:
    """State of pumps, planned and under way; shared by senders and the client loop.

    Attributes:
        planned: One is wanted and has not begun.
        pumping: One is at work.
    """

    def __init__(self) -> None:
        self.planned = False
        self.pumping = False

    def plan(self) -> bool:
        """Note that a pump is wanted; False when one is planned already. From any thread."""
        is_new, self.planned = not self.planned, True
        return is_new

    def begin(self) -> None:
        """Note that a pump begins, in the client loop."""
        self.planned = False
        self.pumping = True

    def end(self) -> None:
        """Mark the pump as ended."""
        self.pumping = False


class RequestOutbox:
    """Send queue: requests leave as soon as they may; each is answered exactly once.

    It holds no more than ``max_in_flight`` requests a broker; the source keeps waiting messages,
    with a limit of its own, and deadlines. Methods are for the client loop, unless they say
    otherwise.

    Args:
        network: Where requests go.
        source: Makes the requests and judges the answers.
        max_in_flight: Requests in flight a broker. More would not be faster: messages that wait
            meanwhile make the next request larger.
        turns: Notes pumps, planned and under way.
    """

    def __init__(
        self,
        network: BrokerNetwork,
        source: RequestSource,
        max_in_flight: int,
        turns: Turns | None = None,
    ) -> None:
        self._network = network
        self._source = source
        self._max_in_flight = max_in_flight
        self._turns = turns or Turns()
        self._in_flight: dict[str, int] = {}
        self._flying: dict[OutgoingRequest, None] = {}  # no set: they end in the order they went
        self._posted: deque[Event] = deque()
        self._planned: dict[int, Event] = {}
        self._last_plan = 0
        self._paused: set[str] = set()
        self._absent: set[str] = set()
        self._watching = False

    @property
    def in_flight(self) -> int:
        """Requests without an answer; from any thread."""
        return len(self._flying)

    def has_room(self, broker_name: str) -> bool:
        """Return True when another request may go to a broker now; from any thread, a hint only."""
        return (
            self._in_flight.get(broker_name, 0) < self._max_in_flight
            and broker_name not in self._absent
            and broker_name not in self._paused
        )

    def schedule(self) -> None:
        """Makes the client loop pump soon; from any thread."""
        if self._turns.plan():
            try:
                self._network.post(self._pump)
            except ClientClosed:
                return  # the closing thread ends what waits
            except BaseException:
                self._turns.planned = False  # Ctrl-C: else no pump would be planned any more
                raise

    def post(self, event: Event) -> None:
        """Post an event to the client loop, soon; from any thread.

        Raises:
            ClientClosed: The client is closed; it is not certain that the event comes.
        """
        self._posted.append(event)
        self._network.post(self._take_posted)

    def take_elsewhere(self, request: OutgoingRequest, answer: Command | MQMeshError) -> None:
        """Takes the answer of a request that did not go through this queue; from any thread.

        Raises:
            ClientClosed: As ``post``.
        """
        effects = request.on_answer(answer)
        if effects is None:
            return
        if effects.on_left is not None:
            effects.on_left()
        for _, event in effects.later:
            self.post(event)

    def close(self, error: MQMeshError) -> None:
        """End with the client loop: nothing is sent any more, and nothing is left open.

        Args:
            error: Answer to the requests that are at brokers. Planned events come now.
        """
        flying, self._flying = self._flying, {}
        events: deque[Event] = deque(partial(request.on_answer, error) for request in flying)
        events += [*self._posted, *self._planned.values()]
        self._posted.clear()
        self._planned.clear()
        while events:
            effects = events.popleft()()
            if effects is not None:
                events += [event for _, event in effects.later]
                if effects.on_left is not None:
                    effects.on_left()

    # ---- Requests and answers ------------------------------------------------------------

    def _pump(self) -> None:
        self._turns.begin()
        try:
            # First forgotten and then looked for again: a reader meanwhile schedules in
            # vain, whereas the other way round something could be overlooked.
            self._absent = set()
            if not self._network.closed:
                for broker_name in self._source.brokers():
                    self._send_to(broker_name)
        finally:
            self._turns.end()

    def _send_to(self, broker_name: str) -> None:
        if not self._network.brokers.is_connected(broker_name):
            self._wait_for(broker_name)
            return
        while self.has_room(broker_name):
            request = self._source.take(broker_name)
            if request is None:
                break
            self._in_flight[broker_name] = self._in_flight.get(broker_name, 0) + 1
            self._flying[request] = None
            self._network.request(
                broker_name,
                request.code,
                partial(self._answered, broker_name, request),
                *request.parts,
                header=request.header,
                timeout_ms=request.timeout_ms,
            )

    def _answered(
        self, broker_name: str, request: OutgoingRequest, answer: Command | MQMeshError
    ) -> None:
        if request not in self._flying:
            return  # closing has answered it
        del self._flying[request]
        self._in_flight[broker_name] -= 1
        self._carry_out(request.on_answer(answer))

    # ---- Events and effects --------------------------------------------------------------

    def _take_posted(self) -> None:
        if self._posted:
            self._carry_out(self._posted.popleft()())

    def _carry_out(self, effects: Effects | None) -> None:
        if effects is None:
            self._pump()
            return
        loop = self._network.loop
        if effects.pause is not None:
            broker_name, pause_ms = effects.pause
            self._paused.add(broker_name)
            loop.call_later(pause_ms, partial(self._resume, broker_name))
        for delay_ms, event in effects.later:
            self._last_plan += 1
            self._planned[self._last_plan] = event
            loop.call_later(delay_ms, partial(self._come, self._last_plan))
        try:
            self._pump()
        finally:
            if effects.on_left is not None:
                effects.on_left()

    def _resume(self, broker_name: str) -> None:
        self._paused.discard(broker_name)
        self._pump()

    def _come(self, number: int) -> None:
        event = self._planned.pop(number, None)
        if event is not None:
            self._carry_out(event())

    # ---- Brokers without a connection ----------------------------------------------------

    def _wait_for(self, broker_name: str) -> None:
        # Messages for the broker wait at the source, not in a request: there a batch may grow, go
        # to another broker, and end by its own deadline.
        self._absent.add(broker_name)
        if not self._watching:
            self._watching = True
            self._network.loop.call_later(WATCH_MS, self._watch)
        try:
            self._network.brokers.connection(broker_name)
        except MQMeshError as error:
            _log.debug("broker %s cannot be connected to: %s", broker_name, error)

    def _watch(self) -> None:
        self._watching = False
        try:
            for broker_name in self._source.brokers():
                if not self._network.brokers.is_connected(broker_name):
                    self._carry_out(self._source.without(broker_name))
        finally:
            self._pump()  # watches on, if need be
