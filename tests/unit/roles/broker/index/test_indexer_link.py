"""The broker's side of its index process, without a process."""

from __future__ import annotations

import signal

import pytest

from mqmesh.errors import (
    BrokerNotAvailable,
    EndpointUnreachable,
    RequestTimeout,
    SystemBusy,
    TopicNotFound,
)
from mqmesh.metrics import MetricBoard, Readings
from mqmesh.protocol.command import Command, decode_header, encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.queries import AdvanceIndexRequest, IndexProgress
from mqmesh.roles.broker.config import BrokerConfig
from mqmesh.roles.broker.index.index_status import INDEX_PROCESS_METRICS, INDEX_STATE
from mqmesh.roles.broker.index.indexer_link import (
    HANG_MS,
    IDLE_MS,
    REFUSED_MS,
    START_DELAY_MS,
    TICK_MS,
    IndexerLink,
    IndexLag,
    LogExtent,
    indexer_arguments,
)
from mqmesh.roles.store_metrics import INDEX_METRICS
from mqmesh.testing.clock import ManualClock


class Process:
    def __init__(self, suspect: bool) -> None:
        self.suspect = suspect
        self.pid = 1234
        self.code: int | None = None
        self.asked = self.killed = self.stopped = False

    def exit_code(self):
        return self.code

    def ask_to_stop(self):
        self.asked = True

    def kill(self):
        self.killed = True
        self.code = -signal.SIGKILL

    def stop(self):
        self.stopped = True


class Client:
    """Keeps what was asked until a test answers it."""

    def __init__(self) -> None:
        self.connected = True
        self.asked: list[tuple[int, bytes, object]] = []
        self.told: list[AdvanceIndexRequest] = []
        self.closed = False

    def request(self, code, on_done, *, header=b"", timeout_ms=0):
        self.asked.append((code, header, on_done))

    def oneway(self, code, *, header=b""):
        assert code == RequestCode.ADVANCE_INDEX
        self.told.append(decode_header(AdvanceIndexRequest, header))

    def close(self):
        self.closed = True

    def answer(self, answer):
        _, _, on_done = self.asked.pop(0)
        on_done(answer)


class Stage:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.processes: list[Process] = []
        self.client = Client()
        self.extent: LogExtent | None = LogExtent(9, 0, 0)
        self.refuse_start = False
        self.link = IndexerLink(
            start_process=self._start,
            connect=lambda: self.client,
            look=lambda: self.extent,
            clock=self.clock,
            max_queries=2,
            query_timeout_ms=2_000,
        )

    def _start(self, suspect: bool) -> Process:
        if self.refuse_start:
            raise OSError("no more processes")
        self.processes.append(Process(suspect))
        return self.processes[-1]

    def grow(self, visible: int) -> None:
        self.extent = LogExtent(9, 0, visible)

    def tick(self, after_ms: int = TICK_MS) -> None:
        self.clock.advance(after_ms)
        self.link.tick()

    def metrics(self, name: str) -> object:
        board = MetricBoard()
        board.add((INDEX_STATE, *INDEX_PROCESS_METRICS), self.link.status)
        board.add(INDEX_METRICS, lambda: self.link.status().progress)
        return Readings(board.read())[f"index_{name}"]


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def running(stage: Stage) -> Stage:
    stage.tick(START_DELAY_MS)
    stage.client.answer(progress(0))
    return stage


def progress(through: int, **fields) -> Command:
    header = memoryview(encode_header(IndexProgress(through, **fields)))
    return Command(0, 1, 1, header, memoryview(b""))


def test_the_process_is_started_a_moment_after_the_broker(stage):
    stage.tick(START_DELAY_MS - 1)
    assert stage.processes == []
    stage.tick(1)
    (process,) = stage.processes
    assert not process.suspect
    (asked,) = stage.client.asked
    assert asked[0] == RequestCode.ADVANCE_INDEX


def test_it_says_whether_it_is_behind(running):
    assert not running.link.is_behind
    running.grow(1000)
    running.tick()
    assert running.link.is_behind
    running.client.answer(progress(1000))
    running.tick()
    assert not running.link.is_behind


def test_it_is_told_how_far_the_log_goes_one_question_at_a_time(running):
    running.grow(1000)
    running.tick()
    running.tick()
    ((_, header, _),) = running.client.asked
    assert decode_header(AdvanceIndexRequest, header) == AdvanceIndexRequest(9, 1000, 0)
    running.client.answer(progress(400))
    running.tick()
    assert len(running.client.asked) == 1, "it is behind, so it is asked again"
    running.client.answer(progress(1000))
    running.tick()
    assert running.client.asked == []
    running.tick(IDLE_MS)
    assert len(running.client.asked) == 1


def test_lag_is_told_in_bytes_and_in_time(running):
    running.grow(1000)
    running.tick()
    running.tick(700)
    assert (running.metrics("lag_bytes"), running.metrics("lag_ms")) == (1000, 700)
    running.client.answer(progress(1000, segments=3, sealed=2, queries=5, mismatches=1))
    assert (running.metrics("lag_bytes"), running.metrics("lag_ms")) == (0, 0)
    assert running.metrics("sealed_segments") == 2
    assert running.metrics("state") == "running"


def test_a_process_that_is_held_up_says_why(running):
    running.tick(IDLE_MS)
    running.client.answer(progress(0, waiting="the disk is full"))
    assert running.metrics("state") == "waiting: the disk is full"


def test_a_process_that_died_is_started_again_later_and_later(running):
    delays = []
    for number in range(1, 5):
        running.processes[-1].code = 1
        running.tick()
        assert running.metrics("state") == "down"
        waited = 0
        while len(running.processes) == number:
            running.tick()
            waited += TICK_MS
        delays.append(waited)
    assert delays == sorted(delays)
    assert delays[-1] > delays[0]
    assert running.metrics("starts_total") == 5


@pytest.mark.parametrize(
    ("code", "suspect"),
    [
        (-signal.SIGBUS, True),
        (-signal.SIGSEGV, True),
        (-signal.SIGABRT, True),
        (-signal.SIGKILL, False),
        (1, False),
        (0, False),
    ],
)
def test_after_a_fault_the_index_is_checked(running, code, suspect):
    running.processes[-1].code = code
    running.tick()
    running.tick(10_000)
    assert running.processes[-1].suspect is suspect
    running.processes[-1].code = 1
    running.tick()
    running.tick(10_000)
    assert not running.processes[-1].suspect, "once is enough"


def test_a_process_that_hangs_is_killed_and_what_it_left_checked(running):
    running.tick(IDLE_MS)
    running.clock.advance(HANG_MS)
    running.client.answer(RequestTimeout("no answer"))
    assert running.processes[-1].killed
    running.tick()
    running.tick(10_000)
    assert running.processes[-1].suspect


def test_a_connection_that_broke_kills_nobody(running):
    running.tick(IDLE_MS)
    running.client.answer(EndpointUnreachable("it broke"))
    assert not running.processes[-1].killed
    running.tick(IDLE_MS)
    assert len(running.client.asked) == 1


def test_a_process_that_refuses_is_left_alone_for_a_while(running, caplog):
    running.tick(IDLE_MS)
    running.client.answer(BrokerNotAvailable("the log cannot be read"))
    running.grow(1000)
    running.tick()
    assert running.client.asked == []
    assert "the log cannot be read" in caplog.text
    running.tick(REFUSED_MS)
    assert len(running.client.asked) == 1


def test_a_process_that_cannot_be_started_is_tried_again(stage):
    stage.refuse_start = True
    stage.tick(START_DELAY_MS)
    stage.refuse_start = False
    stage.tick()
    assert stage.processes == []
    stage.tick(1_000)
    assert len(stage.processes) == 1


def test_a_query_is_passed_on_behind_the_news_of_the_log(running):
    running.grow(500)
    answers: list[object] = []
    running.link.query(RequestCode.QUERY_MESSAGE, b"as it came", answers.append)
    assert [told.visible_offset for told in running.client.told] == [500]
    ((code, header, _),) = running.client.asked
    assert (code, header) == (RequestCode.QUERY_MESSAGE, b"as it came")
    answer = progress(1)
    running.client.answer(answer)
    assert answers == [answer]


def test_a_query_whose_process_dies_is_told_so(running):
    answers: list[object] = []
    running.link.query(RequestCode.QUERY_MESSAGE, b"", answers.append)
    running.client.answer(EndpointUnreachable("it broke"))
    running.link.query(RequestCode.QUERY_MESSAGE, b"", answers.append)
    running.client.answer(TopicNotFound("what the process said"))
    assert [type(answer) for answer in answers] == [BrokerNotAvailable, TopicNotFound]


def test_queries_are_bounded(running):
    for _ in range(2):
        running.link.query(RequestCode.QUERY_MESSAGE, b"", lambda answer: None)
    with pytest.raises(SystemBusy, match="max_queries"):
        running.link.query(RequestCode.QUERY_MESSAGE, b"", lambda answer: None)
    running.client.answer(progress(0))
    running.link.query(RequestCode.QUERY_MESSAGE, b"", lambda answer: None)
    assert running.metrics("query_refusals_total") == 1


def test_a_query_waits_for_a_process_that_starts_soon_and_for_no_other(running):
    for _ in range(6):
        running.processes[-1].code = 1
        running.tick()
        running.tick(30_000)
    running.processes[-1].code = 1
    running.tick()
    with pytest.raises(BrokerNotAvailable):
        running.link.query(RequestCode.QUERY_MESSAGE, b"", lambda answer: None)


def test_closing_ends_the_process_and_the_connection(running):
    running.link.ask_to_stop()
    assert running.processes[-1].asked
    running.link.close()
    assert running.processes[-1].stopped
    assert running.client.closed
    running.link.close()


def test_without_a_store_nothing_is_told(running):
    running.extent = None
    running.tick(IDLE_MS)
    assert running.client.asked == []
    with pytest.raises(BrokerNotAvailable):
        running.link.query(RequestCode.QUERY_MESSAGE, b"", lambda answer: None)


def test_lag_counts_from_the_oldest_message_however_many_came_since():
    lag = IndexLag()
    for number in range(10_000):
        lag.note(number * 10, number)
    assert lag.lag_ms(10_000) == 10_000
    lag.reached(5_000)
    assert 0 < lag.lag_ms(10_000) <= 9_500
    lag.reached(99_990)
    assert lag.lag_ms(10_000) == 0


def test_the_command_line_carries_all_settings(tmp_path):
    from mqmesh.config import load_config
    from mqmesh.roles.indexer.config import IndexerConfig
    from mqmesh.storage.index.config import IndexConfig

    config = BrokerConfig(index=IndexConfig(live_map_size=1 << 20, niceness=0, max_queries=7))
    arguments = indexer_arguments(config, tmp_path, "ipc:///tmp/a b=c", suspect=True)
    assert arguments[0] == "indexer"
    overrides = [arguments[n + 1] for n, one in enumerate(arguments) if one == "--set"]
    assert load_config(IndexerConfig, None, None, overrides) == IndexerConfig(
        broker_name="broker-a",
        store_path_root_dir=str(tmp_path),
        endpoint="ipc:///tmp/a b=c",
        suspect=True,
        disk_reserve_bytes=2 * config.storage.disk_reserve_bytes,
        index=config.index,
    )
