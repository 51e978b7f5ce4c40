"""Administration clients of console users: few for each, closed when they are idle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar, cast

import msgspec

from mqmesh.aio import AdminClient
from mqmesh.clock import Clock
from mqmesh.sdk.client.options import WHOLE_CLUSTER

MAX_PER_USER: Final = 4
"""Clients of one user at a time, each of which has a thread; further requests wait."""
TIMEOUT_MS: Final = 3_000
"""For each answer of a name server or broker."""
IDLE_MS: Final = 600_000

_C = TypeVar("_C", bound=AdminClient)


class _Idle(msgspec.Struct):
    client: AdminClient
    broker_name: str
    since_ms: int


class _OfUser:
    def __init__(self) -> None:
        self.free = asyncio.Semaphore(MAX_PER_USER)
        self.lent = 0
        self.idle: list[_Idle] = []


class Clients:
    """Lends administration clients of ``mqmesh.aio``; of one event loop.

    Args:
        namesrv_addr: Name servers.
        clock: Source of time.
        make: Makes a client of a type, with keywords as of ``AdminClient``.
    """

    def __init__(
        self,
        namesrv_addr: list[str],
        clock: Clock,
        make: Callable[..., AdminClient] = lambda kind, *args, **kwargs: kind(*args, **kwargs),
    ) -> None:
        self._namesrv_addr = namesrv_addr
        self._clock = clock
        self._make = make
        self._users: dict[str, _OfUser] = {}

    @asynccontextmanager
    async def lend(
        self, credentials: str, kind: type[_C], broker_name: str = ""
    ) -> AsyncIterator[_C]:
        """Implement ``Lender.lend``."""
        of_user = self._users.setdefault(credentials, _OfUser())
        async with of_user.free:
            of_user.lent += 1
            client: AdminClient | None = None
            try:
                client = await self._take(of_user, credentials, kind, broker_name)
                yield cast(_C, client)
            finally:
                of_user.lent -= 1
                if client is not None:
                    now_ms = self._clock.monotonic_ms()
                    of_user.idle.append(_Idle(client, broker_name, now_ms))

    async def _take(
        self, of_user: _OfUser, credentials: str, kind: type[_C], broker_name: str
    ) -> AdminClient:
        for one in of_user.idle:
            if isinstance(one.client, kind) and one.broker_name == broker_name:
                of_user.idle.remove(one)
                return one.client
        while of_user.idle and len(of_user.idle) + of_user.lent > MAX_PER_USER:
            await of_user.idle.pop(0).client.close()
        return self._make(
            kind,
            self._namesrv_addr,
            timeout_ms=TIMEOUT_MS,
            broker_name=broker_name,
            credentials=credentials,
            namespace=WHOLE_CLUSTER,
        )

    async def close_idle(self, idle_ms: int = IDLE_MS) -> None:
        """Closes clients that were unused for so long; 0 for all that are not lent."""
        latest_ms = self._clock.monotonic_ms() - idle_ms
        closed: list[AdminClient] = []
        for of_user in self._users.values():
            closed += [one.client for one in of_user.idle if one.since_ms <= latest_ms]
            of_user.idle = [one for one in of_user.idle if one.since_ms > latest_ms]
        for client in closed:
            await client.close()
