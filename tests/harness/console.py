"""A console without a cluster: its pages ask fakes, and are asked by Starlette's test client."""

from __future__ import annotations

import datetime
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from mqmesh.console.app import Console
from mqmesh.console.cluster_view import ClusterReadings, ClusterView
from mqmesh.console.config import ConsoleConfig
from mqmesh.console.page import Visit
from mqmesh.console.rights import UserRights
from mqmesh.console.series import SeriesBook
from mqmesh.console.tails import Tails
from mqmesh.console.users import ConsoleUser, UsersFile, new_user
from mqmesh.security.access_list import AccessList, Action, Rule, User, UserRole
from mqmesh.testing.clock import ManualClock

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
PASSWORD = "correct horse"
WELL = ClusterView(at_ms=1_700_000_000_000, problem="")
"""A cluster of which nothing is known but that it answers."""

Answers = Mapping[str, Any]
"""Answers of administration clients, by method: a value, an error to raise, or a function of the
call's arguments that returns one of both."""


class FakeAdmin:
    """An administration client of any kind, with given answers."""

    def __init__(self, world: ConsoleWorld, credentials: str) -> None:
        self._world = world
        self._credentials = credentials

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            answer = self._answer(method, args, kwargs)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def steps(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async def walk() -> AsyncIterator[Any]:
                for one in await call(*args, **kwargs):
                    yield one

            return walk()

        return steps if method in self._world.stepped else call

    def _answer(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._world.calls.append((self._credentials, method, args, kwargs))
        if self._world.failure is not None:
            return self._world.failure
        if method not in self._world.answers:
            raise AssertionError(f"no answer for {method}{args}")
        answer = self._world.answers[method]
        return answer(*args, **kwargs) if callable(answer) else answer


class ConsoleWorld:
    """A cluster of fakes, as the console has it.

    Args:
        answers: Answers of administration clients.
        view: Last look at the cluster.
        readings: Of that look.
        access_list: For greying out; None where security is off.
        stepped: Methods that are iterated by ``async for``.
        consume: Makes the consumers of tails.

    Attributes:
        calls: Credentials, method, positional and keyword arguments of each call.
        failure: Error that every call raises; None for none.
        sees_all: The user may see the whole cluster.
    """

    def __init__(
        self,
        answers: Answers | None = None,
        view: ClusterView = WELL,
        readings: ClusterReadings | None = None,
        access_list: AccessList | None = None,
        stepped: tuple[str, ...] = ("scan", "resend", "compare_logs"),
        consume: Any = None,
    ) -> None:
        self.answers = dict(answers or {})
        self.view = view
        self.readings = readings
        self.access_list = access_list
        self.stepped = stepped
        self.calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = []
        self.failure: Exception | None = None
        self.sees_all = True
        self.clock = ManualClock()
        self.series = SeriesBook()
        self.tails = Tails(["127.0.0.1:9876"], self.clock, consume=consume)

    @asynccontextmanager
    async def lend(self, credentials: str, kind: Any, broker_name: str = "") -> AsyncIterator[Any]:
        """Lend a fake; it keeps the credentials with each call."""
        yield FakeAdmin(self, credentials)

    async def visit(self, user: ConsoleUser, config: ConsoleConfig, today: datetime.date) -> Visit:
        """Return the means of a request; credentials are the name of the mqmesh user."""
        name = user.credentials
        return Visit(
            user=user,
            rights=UserRights(name, self.access_list, today),
            view=self.view if self.sees_all else ClusterView(problem="not for you"),
            lender=self,
            config=config,
            clock=self.clock,
            readings=self.readings if self.sees_all else None,
            series=self.series if self.sees_all else None,
            sees_all=self.sees_all,
            namesrv_addr=config.namesrv_addr,
            tails=self.tails,
        )


class ConsoleClient(TestClient):
    """A browser without scripts, or a program."""

    def csrf(self, path: str = "/about") -> str:
        """Return the session's token, from a form."""
        found = re.search(r'name="csrf" value="([^"]+)"', self.get(path).text)
        assert found is not None
        return found[1]

    def log_in(self, name: str) -> None:
        """Log in with the password that all users of ``users_of`` have."""
        form = {"name": name, "password": PASSWORD}
        answer = self.post("/login", data=form, follow_redirects=False)
        assert answer.status_code == 303, answer.text

    def act(self, path: str, csrf: str, step: str = "do", **fields: str) -> Any:
        """Send a step of an action."""
        return self.post(path, data={"csrf": csrf, "step": step, **fields})


def users_of(*names: str) -> UsersFile:
    """Return users whose credentials are their names."""
    return UsersFile(user=[new_user(name, PASSWORD, name) for name in names])


def access_list_of(shop_topic: str = "orders") -> AccessList:
    """Return an access list with ``admin``, ``viewer``, and ``shop`` that sends to one topic."""
    rule = Rule([Action.PUB], [shop_topic])
    return AccessList(
        1,
        [
            User("admin", [KEY], UserRole.ADMIN),
            User("viewer", [KEY], UserRole.VIEW),
            User("shop", [KEY], allow=[rule]),
        ],
    )


def open_console(
    world: ConsoleWorld,
    users: UsersFile | None = None,
    *,
    address: str = "http://127.0.0.1:8082",
    **settings: Any,
) -> ConsoleClient:
    """Return a client of a console over a world of fakes."""
    config = ConsoleConfig(**settings)
    console = Console(config, world.clock, users, {"": world})  # type: ignore[dict-item]
    return ConsoleClient(console.app, base_url=address, raise_server_exceptions=True)


@contextmanager
def serve_console(
    world: ConsoleWorld, users: UsersFile | None = None, **settings: Any
) -> Iterator[str]:
    """Serve a console over a world of fakes to real browsers; yields its address."""
    console = Console(ConsoleConfig(**settings), world.clock, users, {"": world})  # type: ignore[dict-item]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        options = uvicorn.Config(console.app, log_config=None, lifespan="off", ws="none")
        server = uvicorn.Server(options)
        thread = threading.Thread(target=server.run, args=([listening],), name="console")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def pages_of(client: ConsoleClient) -> Iterator[str]:
    """Yield the pages that the navigation names."""
    yield from re.findall(r'href="([^"]+)" data-test="nav-', client.get("/").text)
