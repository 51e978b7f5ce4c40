"""The form of log lines, and a log that nobody reads."""

from __future__ import annotations

import json
import logging
import os

import pytest

from mqmesh import logs
from mqmesh.errors import ConfigError
from mqmesh.logs import (
    JsonFormatter,
    LineFormatter,
    LogObject,
    PipeHandler,
    configure_logging,
    cut_line,
    split_line,
)


@pytest.fixture
def untouched_logging():
    root = logging.getLogger()
    handlers, level, raising = list(root.handlers), root.level, logging.raiseExceptions
    root.handlers.clear()
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raising


@pytest.fixture
def pipe():
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read, write
    os.close(read)
    os.close(write)


def record(message, *args, exc_info=None):
    made = logging.LogRecord("a.b", logging.INFO, "f.py", 1, message, args, exc_info)
    made.created = 1_767_225_600.1234
    return made


def test_a_line_has_time_level_logger_and_text():
    line = LineFormatter().format(record("took %d ms", 5))
    assert line == "2026-01-01T00:00:00.123Z INFO a.b: took 5 ms"
    assert split_line(line) == LogObject("2026-01-01T00:00:00.123Z", "INFO", "a.b", "took 5 ms")


def test_in_json_an_event_is_told_apart_from_its_values():
    line = JsonFormatter("broker", "broker-a").format(record("%s took %d ms", "queue 3", 5))
    assert json.loads(line) == {
        "time": "2026-01-01T00:00:00.123Z",
        "level": "INFO",
        "logger": "a.b",
        "text": "queue 3 took 5 ms",
        "role": "broker",
        "name": "broker-a",
        "event": "%s took %d ms",
        "values": ["queue 3", 5],
    }


def test_named_values_keep_their_names():
    made = split_line(JsonFormatter("broker", "a").format(record("%(n)d lost", {"n": 7})))
    assert made.values == {"n": 7}
    assert made.text == "7 lost"


@pytest.mark.parametrize("value", [2**70, float("nan"), b"\xff", None, "\ud800", "\x9b2J\u2028\n"])
def test_whatever_is_logged_is_one_line_of_json(value):
    line = JsonFormatter("broker", "a").format(record("saw %s", value))
    assert len(line.splitlines()) == 1
    assert "\x9b" not in line
    assert json.loads(line)["text"].startswith("saw ")
    assert split_line(line).event == "saw %s"


@pytest.mark.parametrize("form", ["text", "json"])
def test_nobody_moves_a_terminal_by_a_text_that_is_logged(form):
    text = "a\x1b[2J\x07\x9b\x85\u2028\u202e\u2066\u200f\ufeff\U000e0041b\nERROR forged"
    formatter = LineFormatter() if form == "text" else JsonFormatter("broker", "a")
    line = formatter.format(record("client %s came", text))
    assert line.isprintable()
    if form == "json":
        assert json.loads(line)["values"] == [text]


def test_an_object_has_room_in_a_pipe_however_long_its_text_and_traceback_are():
    try:
        raise ValueError("€" * 9_000 + "the end")
    except ValueError as error:
        made = record("%s", "\x1b" * 9_000, exc_info=(ValueError, error, None))
    line = JsonFormatter("broker", "a").format(made)
    assert len(line.encode()) < logs.LINE_BYTES
    assert cut_line(line) == line.encode() + b"\n"
    event = split_line(line)
    assert event.traceback.endswith("the end")
    assert event.text.endswith("(cut)")


def test_a_dropped_line_is_told_in_the_form_of_the_others(pipe):
    read, write = pipe
    handler = PipeHandler(write)
    handler.setFormatter(JsonFormatter("broker", "a"))
    while not handler.dropped:
        handler.emit(record("x" * 1_000))
    while _read(read):
        continue
    handler.emit(record("again"))
    first, second = map(split_line, _read(read).splitlines())
    assert first.text.endswith("log lines were dropped")
    assert second.text == "again"


@pytest.mark.parametrize(
    "text", ["", "{", '{"time": 1}', "no log line", "2026 INFO a: b", "Traceback (most recent"]
)
def test_another_form_is_no_log_line(text):
    assert split_line(text) is None


def test_a_clever_name_forges_no_line():
    line = LineFormatter().format(
        record("topic %s", "a\n2026-01-01T00:00:00Z INFO x: \x1b[2J\u2028b")
    )
    assert "\n" not in line
    assert line.endswith(r"topic a\n2026-01-01T00:00:00Z INFO x: \x1b[2J\u2028b")


def test_a_traceback_follows_in_marked_lines():
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        text = LineFormatter().format(record("oh", exc_info=(ValueError, error, None)))
    assert text.splitlines()[1:] == ["| ValueError: first", "| second"]


def test_a_long_line_is_cut_between_characters():
    data = cut_line("€" * 4_000)
    assert len(data) <= 4_096
    assert data.decode().endswith("€ … (cut)\n")


def test_a_pipe_that_is_not_read_costs_lines_and_no_time(pipe):
    read, write = pipe
    handler = PipeHandler(write)
    handler.setFormatter(LineFormatter())
    for _ in range(1_000):
        handler.emit(record("x" * 1_000))
    assert handler.dropped > 900
    while _read(read):
        continue
    handler.emit(record("again"))
    lines = _read(read).splitlines()
    assert handler.dropped == 0
    assert lines[0].endswith("log lines were dropped")
    assert lines[1].endswith("INFO a.b: again")


def test_a_pipe_without_a_reader_is_no_error():
    read, write = os.pipe()
    os.close(read)
    handler = PipeHandler(write)
    handler.emit(record("x"))
    os.close(write)
    assert handler.dropped == 1


def test_a_record_that_cannot_be_formatted_harms_nobody(pipe, untouched_logging):
    logging.raiseExceptions = False
    PipeHandler(pipe[1]).emit(record("%d", "no number"))
    assert _read(pipe[0]) == ""


def test_a_log_file_is_made_with_its_folder(tmp_path, untouched_logging):
    path = tmp_path / "logs" / "broker.log"
    configure_logging("broker", "DEBUG", path)
    logging.getLogger("mqmesh.x").info("hello")
    assert path.read_text().splitlines()[-1].endswith("INFO mqmesh.x: hello")


def test_a_second_setup_replaces_the_first(tmp_path, untouched_logging):
    configure_logging("a", "INFO", tmp_path / "a.log")
    configure_logging("b", "WARNING", tmp_path / "b.log")
    assert len(untouched_logging.handlers) == 1
    assert untouched_logging.level == logging.WARNING


def test_without_a_file_the_log_goes_to_standard_error(untouched_logging, capsys):
    configure_logging("broker")
    logging.getLogger("mqmesh.x").info("hello")
    logging.getLogger("mqmesh.x").debug("not wanted")
    assert capsys.readouterr().err.endswith("INFO mqmesh.x: hello\n")


def test_under_a_supervisor_the_log_goes_to_its_pipe(pipe, untouched_logging, monkeypatch):
    with os.fdopen(os.dup(pipe[1]), "w") as stderr:
        monkeypatch.setattr(logs.sys, "stderr", stderr)
        configure_logging("broker", supervised=True)
        logging.getLogger("mqmesh.x").info("hello")
    assert _read(pipe[0]).endswith("INFO mqmesh.x: hello\n")


def test_an_unknown_level_is_refused():
    with pytest.raises(ConfigError, match="'LOUD' is none of DEBUG, INFO"):
        configure_logging("broker", "LOUD")


def test_a_file_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"a\.log: (File exists|Not a directory)"):
        configure_logging("broker", "INFO", tmp_path / "file" / "a.log")


def _read(descriptor):
    try:
        return os.read(descriptor, 1 << 20).decode()
    except BlockingIOError:
        return ""
