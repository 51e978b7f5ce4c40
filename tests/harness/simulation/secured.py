"""Seeds with security on: users, and strangers that try to get something in.

Every process has a key of its own and the rights that it needs, and no more. The strangers: one
without a key, one with an unknown key, one who is disabled, and one who may read and not send.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Final

from harness.simulation.books import ORDER, PULL, PUSH, TOPICS
from mqmesh.security.access_list import AccessList, Action, Rule, User, UserRole
from mqmesh.security.guard import Guard
from mqmesh.security.keys import KEY_CHARACTERS, Credentials, KeyRing
from mqmesh.transport.endpoints import endpoint_of
from mqmesh.transport.simulated.node import SimulatedClock

if TYPE_CHECKING:
    from harness.simulation.world import World

NAMESRV: Final = "namesrv"
ADMINISTRATORS: Final = frozenset({"admin", "administrator", "operator"})
NOBODY, UNKNOWN, DISABLED, READER = "nobody", "unknown", "disabled", "reader"
STRANGERS: Final = (NOBODY, UNKNOWN, DISABLED, READER)
TOPIC_ACTIONS: Final = [Action.PUB, Action.SUB]


class Access:
    """Keys and the access list of a world.

    Args:
        world: World of the processes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        topics, groups = list(TOPICS), [PUSH, ORDER, PULL]
        self._users = [
            User(NAMESRV, [key_of(NAMESRV)], UserRole.SERVICE),
            User("admin", [key_of("admin")], UserRole.ADMIN),
            User(
                "client",
                [key_of("client")],
                allow=[Rule(TOPIC_ACTIONS, topics), Rule([Action.SUB], groups=groups)],
            ),
            User(DISABLED, [key_of(DISABLED)], UserRole.ADMIN, enabled=False),
            User(READER, [key_of(READER)], allow=[Rule([Action.SUB], topics)]),
        ]

    def add_broker(self, place: str, broker_name: str) -> None:
        """Adds the user of a group's replica, before anything is started."""
        self._users.append(User(place, [key_of(place)], UserRole.BROKER, brokers=[broker_name]))

    def add_schedule(self, name: str) -> None:
        """Adds the user of a schedule service."""
        self._users.append(User(name, [key_of(name)], UserRole.SERVICE))

    def ring(self, process: str) -> KeyRing | None:
        """Returns the keys of a process; None for a process without keys."""
        if process == NOBODY:
            return None
        known = {user.name for user in self._users} | set(STRANGERS)
        other = "admin" if process in ADMINISTRATORS else "client"
        user = self._server(process) or (process if process in known else other)
        own = Credentials(
            user=user,
            public_key=key_of(user),
            secret_key=key_of("secret"),
            namesrv_server_key=key_of(NAMESRV),
        )
        if self._server(process) is None:
            return KeyRing(own, *own.namesrv_keys)
        ring = KeyRing(own, own.public_key)
        for address in self._world.common_addresses():
            ring.learn(endpoint_of(address), *own.namesrv_keys)
        return ring

    def guard(self, process: str, clock: SimulatedClock) -> Guard | None:
        """Returns the guard of a role; None for clients."""
        if self._server(process) is None:
            return None

        def today() -> datetime.date:
            return datetime.datetime.fromtimestamp(clock.wall_ms() / 1_000, datetime.UTC).date()

        return Guard(AccessList(1, self._users), today)

    def _server(self, process: str) -> str | None:
        """Returns the user that a role is; None for clients."""
        if process == "coordinator" or process.startswith("namesrv-"):
            return NAMESRV
        roles = (UserRole.BROKER, UserRole.SERVICE)
        return process if any(u.name == process and u.role in roles for u in self._users) else None


def key_of(user: str) -> str:
    """Returns the key of a user; keys are names here."""
    return user.ljust(KEY_CHARACTERS, ".")
