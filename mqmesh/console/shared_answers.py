"""Answers that many tabs share: equal questions within a short time cost one request."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Final

import msgspec

from mqmesh.clock import Clock

MAX_ANSWERS: Final = 256
"""Answers that are kept; further ones are not shared."""


class _Answer(msgspec.Struct):
    answer: asyncio.Future[Any]
    until_ms: int


class SharedAnswers:
    """Answers by question; of one event loop.

    Args:
        clock: Source of time.
        keep_ms: How long an answer counts as fresh, from the question on.
    """

    def __init__(self, clock: Clock, keep_ms: int) -> None:
        self._clock = clock
        self._keep_ms = keep_ms
        self._answers: dict[Hashable, _Answer] = {}

    def forget(self) -> None:
        """Forget all answers: something was changed."""
        self._answers.clear()

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Return a fresh answer, or get one; other callers wait meanwhile for the same answer.

        Args:
            key: Question and user.
            ask: Gets the answer.
        """
        now_ms = self._clock.monotonic_ms()
        known = self._answers.get(key)
        if known is None or known.until_ms <= now_ms:
            old = [one for one, answer in self._answers.items() if answer.until_ms <= now_ms]
            for one in old:
                del self._answers[one]
            known = _Answer(asyncio.ensure_future(ask()), now_ms + self._keep_ms)
            if len(self._answers) < MAX_ANSWERS:
                self._answers[key] = known
        # One tab that is closed must not take the answer from the others.
        return await asyncio.shield(known.answer)
