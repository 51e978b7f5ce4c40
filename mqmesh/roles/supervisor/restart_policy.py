"""Restarts of processes that died: when; and in which order processes are stopped.

Pure: events and the time go in, decisions come out.
"""

import enum
import signal
from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from mqmesh.roles.process import ExitCode

FIRST_DELAY_MS: Final = 200
MAX_DELAY_MS: Final = 30_000
STABLE_MS: Final = 60_000
"""A process that lived so long after its start owes nothing to its former deaths."""
CRASH_LOOP_DEATHS: Final = 5
"""Number of quick deaths in a row that is reported as a crash loop, and each so many more."""

STAGE_MS: Final = 1_000
"""Time after which the last stage must stop, whether or not the stages before it are gone."""
KILL_MS: Final = 1_500
"""Time after which a process that has not stopped is killed; so everything is gone in under 2 s."""


class RestartAction(enum.Enum):
    """Actions on a death."""

    RESTART = "restart"
    GIVE_UP = "give up"
    """Starting again cannot help: the configuration is wrong."""


class RestartDecision(msgspec.Struct, frozen=True):
    """Decision about a death.

    Attributes:
        action: See ``RestartAction``.
        delay_ms: Wait so long before starting again.
        quick_deaths: Deaths in a row, this one included, without a stable life between.
        is_crash_loop: True if a crash loop is to be reported now.
    """

    action: RestartAction
    delay_ms: int = 0
    quick_deaths: int = 0
    is_crash_loop: bool = False


class RestartPolicy:
    """Policy on the deaths of one process.

    The delay doubles from ``FIRST_DELAY_MS`` to ``MAX_DELAY_MS``, and begins anew after
    ``STABLE_MS`` of life. A process that says ``ExitCode.USAGE`` before it was ever ready
    has a wrong configuration. Later the same configuration has worked, so that the reason
    may pass, for example a port that is taken for a moment.
    """

    def __init__(self) -> None:
        self._started_ms = 0
        self._was_ready = False
        self._quick_deaths = 0

    def on_started(self, now_ms: int) -> None:
        """Takes note that the process was started."""
        self._started_ms = now_ms

    def on_ready(self) -> None:
        """Takes note that the process serves."""
        self._was_ready = True

    def on_exit(self, exit_code: int, now_ms: int) -> RestartDecision:
        """Decides about a process that ended without a request.

        Args:
            exit_code: Exit code of the process; minus the signal's number when one killed it.
            now_ms: Monotonic clock.
        """
        if exit_code == ExitCode.USAGE and not self._was_ready:
            return RestartDecision(RestartAction.GIVE_UP)
        if now_ms - self._started_ms >= STABLE_MS:
            self._quick_deaths = 0
        self._quick_deaths += 1
        # The exponent is bounded, because 2**deaths would grow for ever.
        delay_ms = min(FIRST_DELAY_MS << min(self._quick_deaths - 1, 16), MAX_DELAY_MS)
        is_crash_loop = self._quick_deaths % CRASH_LOOP_DEATHS == 0
        return RestartDecision(RestartAction.RESTART, delay_ms, self._quick_deaths, is_crash_loop)


class StopPlan:
    """Plan of a stop of all processes: the order of the requests, and the time of kills.

    Args:
        stages: Stage by name: all of stage 0 get the request first, the next stage when they are
            gone, but no stage later than ``STAGE_MS``.
        now_ms: Time at which the stop began, monotonic clock.
    """

    def __init__(self, stages: Mapping[str, int], now_ms: int) -> None:
        self._stages = dict(stages)
        self.began_ms = now_ms
        self._stopping: set[str] = set()
        self._killed: set[str] = set()
        self._steps = max(self._stages.values(), default=0)

    def next(self, alive: Collection[str], now_ms: int) -> tuple[list[str], list[str]]:
        """Return the processes to ask to stop now, and those to kill now; each is named once.

        Args:
            alive: Processes that have not ended yet.
            now_ms: Monotonic clock.
        """
        elapsed_ms = now_ms - self.began_ms
        first = min((self._stages[name] for name in alive), default=0)
        due = [name for name in self._stages if name in alive and self._is_due(name, elapsed_ms)]
        ask = [
            name
            for name in self._stages
            if name in alive
            and name not in self._stopping
            and (name in due or self._stages[name] == first)
        ]
        self._stopping.update(ask)
        kill = [name for name in alive if elapsed_ms >= KILL_MS and name not in self._killed]
        self._killed.update(kill)
        return ask, kill

    def _is_due(self, name: str, elapsed_ms: int) -> bool:
        return elapsed_ms * self._steps >= STAGE_MS * self._stages[name]

    def wait_ms(self, now_ms: int) -> int:
        """Return how long to wait at most before asking ``next`` again."""
        elapsed_ms = now_ms - self.began_ms
        moments = [STAGE_MS * step // max(self._steps, 1) for step in range(1, self._steps + 1)]
        later = [moment - elapsed_ms for moment in [*moments, KILL_MS] if moment > elapsed_ms]
        return max(1, min(later, default=KILL_MS))


def describe_exit(exit_code: int) -> str:
    """Return an exit code in words: ``exit code 1``, ``killed by SIGKILL``."""
    if exit_code == ExitCode.STORE_STOPPED:
        return f"its store has stopped (exit code {exit_code:d})"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
