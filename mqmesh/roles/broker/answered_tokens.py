"""Answers to requests that may come again because the answer did not arrive. Pure."""

from collections import OrderedDict
from typing import Final

from mqmesh.protocol.retries import SendBackResponse

MAX_TOKENS: Final = 8_192


class AnsweredTokens:
    """Answers to requests that may come again because the answer did not arrive.

    Args:
        most: How many are remembered.
    """

    def __init__(self, most: int = MAX_TOKENS) -> None:
        self._most = most
        self._answers: OrderedDict[tuple[str, int], SendBackResponse] = OrderedDict()

    def get(self, group: str, token: int) -> SendBackResponse | None:
        """What was answered under a token; 0 stands for none."""
        return self._answers.get((group, token)) if token else None

    def note(self, group: str, token: int, answer: SendBackResponse) -> None:
        """Remembers an answer."""
        if not token:
            return
        self._answers[group, token] = answer
        if len(self._answers) > self._most:
            self._answers.popitem(last=False)
