"""Clients that may not send in seeds with security on, and try again and again."""

import itertools
from typing import Final

from harness.simulation.books import PLAIN, Books, body_of
from harness.simulation.load import Client
from harness.simulation.secured import READER
from harness.simulation.world import World
from mqmesh.errors import AuthenticationFailed, MQMeshError, NoPermission
from mqmesh.message import Message
from mqmesh.sdk.producer.producer import Producer
from mqmesh.sdk.producer.send_result import SendFuture
from mqmesh.transport.simulated.node import NodeKilled

EVERY_MS: Final = 2_000
"""Interval of a stranger's tries."""
PATIENCE_MS: Final = 1_000


class Stranger(Client):
    """One of ``secured.STRANGERS``; arguments as for ``Client``.

    Attributes:
        refused: Number of times that it was refused.
        wrong: Sends that got in; empty when all is well.
    """

    def __init__(self, world: World, books: Books, name: str) -> None:
        super().__init__(world, books, name)
        self.refused = 0
        self.wrong: list[str] = []
        self._numbers = itertools.count()

    def make(self) -> Producer:
        """Makes the client."""
        return Producer(
            "strangers",
            client=self.world.client_options(),
            transport=self.transport,
            send_msg_timeout_ms=PATIENCE_MS,
        )

    def begin(self) -> None:
        """Tries."""
        self.later(EVERY_MS, self._try)

    def stop(self) -> None:
        """Ends the client."""
        self.transport.node.kill()
        self.abandon()

    def _try(self) -> None:
        message = Message(PLAIN, body_of(self.name, next(self._numbers)))
        try:
            future = self.api.send_async(message)
        except NodeKilled:
            return
        except MQMeshError as error:
            self._note(error)
        else:
            future.add_done_callback(self._outcome)
        self.later(EVERY_MS, self._try)

    def _outcome(self, future: SendFuture) -> None:
        error = future.exception()
        if isinstance(error, MQMeshError):
            self._note(error)
        else:
            self.wrong.append(f"S1: {self.name} sent a message: {error or future.result()}")

    def _note(self, error: MQMeshError) -> None:
        expected = NoPermission if self.name == READER else AuthenticationFailed
        self.refused += isinstance(error, expected)
