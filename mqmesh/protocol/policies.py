"""Policies of consumer groups: schedules of retries, dead letters, pauses, rates. Pure."""

import re
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import msgspec

from mqmesh.errors import ConfigError, InvalidArgument
from mqmesh.message import MAX_DELAY_MS, check_topic, is_system_topic
from mqmesh.protocol.groups import GroupConfig
from mqmesh.units import MAX_TIMESTAMP_MS
from mqmesh.user_times import parse_duration

MAX_RETRY_STEPS: Final = 64
MAX_GROWTH: Final = 100.0
MAX_JITTER_PERCENT: Final = 50
MAX_PAUSED_TOPICS: Final = 256
KEEP: Final = "keep"
"""Value of ``dead_letter``: messages go to ``%DLQ%<group>``."""
DROP: Final = "drop"
"""Value of ``dead_letter``: messages are done without a trace but a metric."""
FOREVER_MS: Final = MAX_TIMESTAMP_MS
"""Value of ``paused_until`` of a group that is paused until it is resumed."""

_JITTER = re.compile(r"(?P<rest>.*\S)\s+jitter\s+(?P<percent>\d{1,3})%")
_GROWING = re.compile(r"exp\s+(?P<first>\S+)\s+x(?P<factor>\d+(\.\d+)?)\s+max\s+(?P<max>\S+)")
_MOST_EXPONENT = 64  # MAX_GROWTH to the power of it is a float still
_HASHES = 1 << 32


class RetryDelays(msgspec.Struct, frozen=True):
    """Delays of the retries of a group.

    Attributes:
        steps_ms: Of the first retry, the second, …; the last one is that of all further ones.
        factor: Each delay behind the last step is so many times the one before.
        max_ms: Longest delay, before jitter.
        jitter_percent: A delay is up to so much shorter or longer.
    """

    steps_ms: tuple[int, ...]
    factor: float = 1.0
    max_ms: int = MAX_DELAY_MS
    jitter_percent: int = 0

    def delay_ms(self, times: int, message_id: str) -> int:
        """Return the delay of a retry: the same at each call.

        Args:
            times: Retries of the message before this one, from 0.
            message_id: Its id, or its place, of which jitter is made.
        """
        beyond = min(max(times - len(self.steps_ms) + 1, 0), _MOST_EXPONENT)
        step_ms = self.steps_ms[min(times, len(self.steps_ms) - 1)]
        delay_ms = min(step_ms * self.factor**beyond, self.max_ms)
        if self.jitter_percent:
            # A checksum would be nearly the same for ids that differ in their last digits.
            digest = blake2b(f"{message_id}/{times}".encode(), digest_size=4).digest()
            part = int.from_bytes(digest, "little") / _HASHES * 2 - 1
            delay_ms *= 1 + part * self.jitter_percent / 100
        return min(max(round(delay_ms), 1), MAX_DELAY_MS)


@lru_cache(maxsize=256)
def parse_retry_delays(text: str) -> RetryDelays | None:
    """Read ``retry_delays`` of a group.

    Args:
        text: Delays one behind the other, ``10s 30s 1m 5m``, or growing ones,
            ``exp 1s x2 max 2h``; either may end with ``jitter 20%``. Empty for none.

    Returns:
        None where the group has no delays of its own.

    Raises:
        InvalidArgument: It is none of these.
    """
    if not text:
        return None
    jitter = _JITTER.fullmatch(text)
    percent = int(jitter["percent"]) if jitter else 0
    if percent > MAX_JITTER_PERCENT:
        raise InvalidArgument(
            f"retry_delays {text!r}: jitter {percent}% is over {MAX_JITTER_PERCENT}%"
        )
    rest = jitter["rest"] if jitter else text.strip()
    growing = _GROWING.fullmatch(rest)
    if growing is None:
        words = rest.split() or [text]
        if len(words) > MAX_RETRY_STEPS:
            raise InvalidArgument(
                f"retry_delays has {len(words)} delays; 1 to {MAX_RETRY_STEPS} are allowed"
            )
        return RetryDelays(tuple(_delay_ms(word, text) for word in words), jitter_percent=percent)
    factor = float(growing["factor"])
    if not 1.0 <= factor <= MAX_GROWTH:
        raise InvalidArgument(
            f"retry_delays {text!r}: x{growing['factor']} is not between 1 and {MAX_GROWTH:.0f}"
        )
    first_ms, max_ms = _delay_ms(growing["first"], text), _delay_ms(growing["max"], text)
    if max_ms < first_ms:
        raise InvalidArgument(
            f"retry_delays {text!r}: max {growing['max']} is under the first delay "
            f"{growing['first']}"
        )
    return RetryDelays((first_ms,), factor, max_ms, percent)


def check_group_policies(config: GroupConfig) -> None:
    """Check the policies of a group beyond the bounds of their types.

    Raises:
        InvalidArgument: Names the setting, its value and the allowed ones.
    """
    parse_retry_delays(config.retry_delays)
    _check_dead_letter(config.dead_letter)
    if len(config.paused_topics) > MAX_PAUSED_TOPICS:
        raise InvalidArgument(
            f"paused_topics has {len(config.paused_topics)} topics; {MAX_PAUSED_TOPICS} are allowed"
        )
    for topic in config.paused_topics:
        check_topic(topic)


def paused_until(config: GroupConfig, topic: str) -> int:
    """Return until when a group gets nothing of a topic, wall clock, ms; 0 if it never waits."""
    return max(config.paused_until, config.paused_topics.get(topic, 0))


def paused(config: GroupConfig, until_ms: int, topic: str, now_ms: int) -> GroupConfig:
    """Return the settings of a group that is paused, or goes on again.

    Args:
        config: Before.
        until_ms: Wall clock, ms; 0 to go on.
        topic: Only this one; empty for all, and going on ends the pauses of single topics, too.
        now_ms: Wall clock: pauses of topics that are over by then are left out.
    """
    topics = {name: until for name, until in config.paused_topics.items() if until > now_ms}
    if not topic:
        return msgspec.structs.replace(
            config, paused_until=until_ms, paused_topics=topics if until_ms else {}
        )
    topics.pop(topic, None)
    if until_ms:
        topics[topic] = until_ms
    return msgspec.structs.replace(config, paused_topics=topics)


def _check_dead_letter(value: str) -> None:
    if value in (KEEP, DROP):
        return
    try:
        check_topic(value)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"dead_letter {value[:300]!r}: must be {KEEP}, {DROP} or the name of a topic: {error}"
        ) from error
    if is_system_topic(value):
        raise InvalidArgument(
            f"dead_letter {value!r}: the topic is reserved; name another one, {KEEP} or {DROP}"
        )


def _delay_ms(word: str, text: str) -> int:
    try:
        delay_ms = parse_duration(word, "retry_delays")
    except ConfigError:
        delay_ms = 0
    if not delay_ms:
        raise InvalidArgument(
            f"retry_delays {text!r}: {word!r} is no delay of 1ms to 40 years; write delays like "
            "'10s 30s 1m 5m', or 'exp 1s x2 max 2h', with 'jitter 20%' behind them if you like"
        )
    return delay_ms
