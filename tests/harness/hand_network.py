"""A client's engine that a test plays: it moves the time and gives the answers."""

from collections.abc import Callable

from mqmesh.errors import ClientClosed, EndpointUnreachable, MQMeshError
from mqmesh.protocol.command import Command
from mqmesh.testing.clock import ManualClock
from mqmesh.transport.interface import OnDone, Timer


class Asked:
    """A request that has no answer yet.

    Attributes:
        broker_name, code, body, header, timeout_ms: Parts of the request.
        on_done: Takes the answer.
    """

    def __init__(
        self,
        broker_name: str,
        code: int,
        body: bytes,
        header: bytes,
        timeout_ms: int,
        on_done: OnDone,
    ) -> None:
        self.broker_name = broker_name
        self.code = code
        self.body = body
        self.header = header
        self.timeout_ms = timeout_ms
        self.on_done = on_done


class HandNetwork:
    """One thread; a turn is ``run``. It is its own loop.

    Attributes:
        asked: Requests without an answer, the oldest first.
        away: Brokers without a connection.
        hopeless: Brokers among these that are not worth waiting for.
        connecting: Brokers of each call for a connection.
        closed: Nothing may be posted any more.
    """

    in_loop_thread = True

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.asked: list[Asked] = []
        self.away: set[str] = set()
        self.hopeless: set[str] = set()
        self.failures: dict[str, EndpointUnreachable] = {}
        self.connecting: list[str] = []
        self.closed = False
        self._posted: list[Callable[[], None]] = []
        self._timers: list[tuple[int, Timer]] = []

    @property
    def loop(self) -> "HandNetwork":
        """Itself."""
        return self

    @property
    def brokers(self) -> "HandNetwork":
        """Itself."""
        return self

    @property
    def planned(self) -> int:
        """Number of timers."""
        return sum(not timer.cancelled for _, timer in self._timers)

    def post(self, callback: Callable[[], None]) -> None:
        """Calls back in the next turn."""
        if self.closed:
            raise ClientClosed("closed")
        self._posted.append(callback)

    def call_later(self, delay_ms: int, callback: Callable[[], None]) -> Timer:
        """Calls back in the first turn that is late enough."""
        timer = Timer(callback, 0)
        self._timers.append((self.clock.monotonic_ms() + delay_ms, timer))
        return timer

    def is_connected(self, broker_name: str) -> bool:
        """Returns True while the broker is not away."""
        return broker_name not in self.away

    def may_come(self, broker_name: str) -> bool:
        """Returns False for a hopeless broker."""
        return broker_name not in self.hopeless

    def connection(self, broker_name: str) -> None:
        """Notes that a connection is wanted; there is none."""
        self.connecting.append(broker_name)
        raise EndpointUnreachable("not there")

    def request(
        self,
        broker_name: str,
        code: int,
        on_done: OnDone,
        *parts: bytes,
        header: bytes,
        timeout_ms: int,
    ) -> None:
        """Notes the request."""
        body = b"".join(parts)
        self.asked.append(Asked(broker_name, code, body, header, timeout_ms, on_done))

    def run(self, duration_ms: int = 0) -> None:
        """Lets time pass, and then everything happen that is due."""
        self.clock.advance(duration_ms)
        while True:
            now_ms = self.clock.monotonic_ms()
            due = [timer for at_ms, timer in self._timers if at_ms <= now_ms]
            self._timers = [one for one in self._timers if one[0] > now_ms]
            calls = self._posted + [timer.callback for timer in due if not timer.cancelled]
            self._posted = []
            if not calls:
                return
            for call in calls:
                call()

    def answer(self, answer: Command | MQMeshError) -> None:
        """Answers the oldest request."""
        self.asked.pop(0).on_done(answer)
