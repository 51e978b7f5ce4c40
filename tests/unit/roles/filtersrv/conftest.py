"""Filter servers without a process: workers that answer when a test says so."""

from __future__ import annotations

import msgspec
import pytest

from mqmesh.roles.filtersrv.config import FiltersrvConfig
from mqmesh.roles.filtersrv.filter_runner import FilterRunner
from mqmesh.roles.filtersrv.worker_places import WorkerPlaces
from mqmesh.sandbox.frames import Answer, Status
from mqmesh.testing.clock import ManualClock


class FakeWorker:
    """A worker that a test speaks for."""

    pid = 4711

    def __init__(self, source, on_answer, on_death):
        self.source = source
        self.questions: list[tuple[list, int, int]] = []
        self.closed = False
        self._on_answer = on_answer
        self._on_death = on_death

    def ask(self, parts, messages, deadline_ms):
        """Note a question."""
        self.questions.append((parts, messages, deadline_ms))

    def close(self):
        """Note the end."""
        self.closed = True

    def ready(self):
        """It has loaded its filter."""
        self.says(Status.READY, msgspec.msgpack.encode(["rlimits", "seccomp"]))

    def says(self, status, body):
        """It answers."""
        self._on_answer(Answer(status, body))

    def dies(self, reason="it crashed (SIGSEGV)"):
        """Its process is gone."""
        self._on_death(reason)


class Stage:
    """Runners with fake workers and a clock turned by hand."""

    def __init__(self):
        self.clock = ManualClock()
        self.workers: list[FakeWorker] = []
        self.fails_to_start: OSError | None = None
        self.places: WorkerPlaces | None = None

    def config(self, **settings):
        """Settings of a filter server that may run."""
        return FiltersrvConfig(enable=True, **settings)

    def start(self, source, on_answer, on_death):
        """Start a fake worker."""
        if self.fails_to_start is not None:
            raise self.fails_to_start
        self.workers.append(FakeWorker(source, on_answer, on_death))
        return self.workers[-1]

    def runner(self, group="audit", filter_id="f" * 32, source="src", *, user="", **settings):
        """A runner."""
        config = self.config(**settings)
        places = WorkerPlaces(config, self.clock) if self.places is None else self.places
        return FilterRunner(
            group,
            filter_id,
            source,
            config,
            self.start,
            places,
            self.clock,
            user=user or f"group {group}",
        )

    def room(self, **settings):
        """Have all runners from now on share the places of these settings."""
        self.places = WorkerPlaces(self.config(**settings), self.clock)


@pytest.fixture
def stage():
    """A stage."""
    return Stage()
