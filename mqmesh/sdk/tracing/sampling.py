"""Choice of traced messages: the same ones at producers and consumers.

A message's value is a fraction: BLAKE2b of its producer's id, plus its sequence times the golden
ratio, modulo 1. It is traced when the value is below the rate, so those of a lower rate are among
those of a higher one. A hash of each message id would cost 0.7 us, more than sending a message does
(0.2 to 0.5 us). This way the messages in between cost nothing: it is known where the next chosen
one stands. And the golden ratio falls in step with no period that senders may have.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

_MODULUS: Final = 1 << 64
_STEP: Final = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio; makes the same choice at all clients, so it never changes."""
MAX_PRODUCERS: Final = 65_536
"""Producers whose hash is remembered."""


class Sampler:
    """Sampler that chooses a share of all messages.

    Args:
        rate: Above 0, at most 1.
    """

    def __init__(self, rate: float) -> None:
        self._below = below = min(max(round(rate * _MODULUS), 1), _MODULUS)
        self._phases: dict[int, int] = {}
        # By producer: no message from the first sequence on is chosen before the second one, whose
        # value is the third number.
        self._next: dict[int, tuple[int, int, int]] = {}
        # From one chosen message to the next there are three distances: one that adds to the
        # value, one that takes from it, and both together.
        self._up = 1 + _steps(_STEP, below)
        self._added = self._up * _STEP % _MODULUS
        self._down = _first(_STEP, _MODULUS, _MODULUS - below + 1, _MODULUS - 1)
        self._taken = -self._down * _STEP % _MODULUS

    def wants(self, producer_id: int, sequence: int) -> bool:
        """Return True for a message that is traced."""
        return (self._phase(producer_id) + sequence * _STEP) % _MODULUS < self._below

    def chosen(self, producer_id: int, first_sequence: int, count: int) -> Sequence[int]:
        """Return the positions of traced ones of consecutive messages, from 0 to ``count - 1``."""
        below = self._below
        if below == _MODULUS:
            return range(count)
        value = (self._phase(producer_id) + first_sequence * _STEP) % _MODULUS
        if count == 1:
            return (0,) if value < below else ()
        # Mostly it goes on where it ended the last time, before a message that is known already.
        begin, sequence, next_value = self._next.get(producer_id, (0, -1, 0))
        if begin <= first_sequence <= sequence:
            position, value = sequence - first_sequence, next_value
        else:
            position = _steps(value, below)
            value = (value + position * _STEP) % _MODULUS
        found = []
        while position < count:
            found.append(position)
            can_rise, can_fall = value + self._added < below, value >= self._taken
            if can_rise and (self._up < self._down or not can_fall):
                position, value = position + self._up, value + self._added
            elif can_fall:
                position, value = position + self._down, value - self._taken
            else:
                position += self._up + self._down
                value += self._added - self._taken
        self._next[producer_id] = first_sequence + count, first_sequence + position, value
        return found

    def _phase(self, producer_id: int) -> int:
        phase = self._phases.get(producer_id)
        if phase is None:
            if len(self._phases) >= MAX_PRODUCERS:
                self._phases.clear()
                self._next.clear()
            digest = hashlib.blake2b(producer_id.to_bytes(8, "big"), digest_size=8).digest()
            phase = self._phases[producer_id] = int.from_bytes(digest, "big")
        return phase


def _steps(value: int, below: int) -> int:
    """Return the number of steps from a value to the first one below ``below``, 0 if it is."""
    if value < below:
        return 0
    low = _MODULUS - value
    return _first(_STEP, _MODULUS, low, low + below - 1)


def _first(step: int, modulus: int, low: int, high: int) -> int:
    """Return the smallest n >= 0 whose ``n * step % modulus`` is within bounds; there is one."""
    if low == 0:
        return 0
    if 2 * step > modulus:
        step, low, high = modulus - step, modulus - high, modulus - low
    n = -(-low // step)
    if n * step <= high:
        return n
    # Some multiple of the modulus further on; which, is the same question with smaller numbers.
    turns = _first(modulus % step, step, -high % step, -low % step)
    return -(-(low + modulus * turns) // step)
