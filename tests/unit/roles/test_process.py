"""Ready line, exit codes, and the order of a role's life."""

from __future__ import annotations

import errno
import io
import os
import signal

import pytest

from mqmesh.errors import ConfigError, DiskFull, StorageError, StoreClosed, StoreLocked
from mqmesh.roles import process
from mqmesh.roles.process import (
    ExitCode,
    Ready,
    StoppedEarly,
    parse_ready,
    report_failure,
    run_role,
)


class FakeLoop:
    """Runs a callback in place of waiting."""

    def __init__(self, on_run=lambda: None):
        self.stopped = False
        self.sources = {}
        self.on_run = on_run

    def add(self, source, handler):
        self.sources[source] = handler

    def remove(self, source):
        del self.sources[source]

    def stop(self):
        self.stopped = True

    def run(self):
        self.on_run()


class FakeRole:
    """A role that notes what is done to it."""

    def __init__(self, fault=None, stop_fault=None):
        self.calls = []
        self.fault = fault
        self.stop_fault = stop_fault

    def start(self):
        self.calls.append("start")
        if self.fault is not None:
            raise self.fault
        return "tcp://127.0.0.1:1"

    def stop(self):
        self.calls.append("stop")
        if self.stop_fault is not None:
            raise self.stop_fault


@pytest.fixture(autouse=True)
def untouched_signals():
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


def test_a_ready_line_reads_back():
    ready = Ready("broker", "broker-a", "tcp://127.0.0.1:10911", 42)
    assert ready.line() == "READY role=broker name=broker-a endpoint=tcp://127.0.0.1:10911 pid=42"
    assert parse_ready(ready.line()) == ready


@pytest.mark.parametrize(
    "path",
    ["/a b/sock", "/a\nb/sock", "/50%25/sock", "/\u00e4\u2028/sock", "/\udcff/sock", "/a pid=1"],
)
def test_a_ready_line_has_any_path(path):
    ready = Ready("schedule", "schedule-broker-a", f"ipc://{path}", 42)
    assert len(ready.line().split()) == 5
    assert parse_ready(ready.line()) == ready


@pytest.mark.parametrize("line", ["", "READY", "READY role=a name=b endpoint=c pid=x", "x READY"])
def test_other_lines_are_no_ready_lines(line):
    assert parse_ready(line) is None


def test_a_role_is_started_announced_and_stopped(capsys):
    role = FakeRole()
    assert run_role("broker", "broker-a", FakeLoop(), role) == ExitCode.OK
    assert role.calls == ["start", "stop"]
    assert parse_ready(capsys.readouterr().out.strip()) == Ready(
        "broker", "broker-a", "tcp://127.0.0.1:1", os.getpid()
    )


def test_a_role_that_is_stopped_while_it_starts_did_not_fail(capsys):
    role = FakeRole(StoppedEarly("recovering"))
    assert run_role("broker", "broker-a", FakeLoop(), role) == ExitCode.OK
    assert role.calls == ["start", "stop"]
    assert capsys.readouterr() == ("", "")


def test_a_store_that_stopped_has_an_exit_code_of_its_own(capsys):
    def on_run():
        raise StoreClosed("the commit log cannot be synced")

    role = FakeRole()
    assert run_role("broker", "broker-a", FakeLoop(on_run), role) == ExitCode.STORE_STOPPED == 3
    assert role.calls == ["start", "stop"]
    assert capsys.readouterr().err == "error: broker-a: the commit log cannot be synced\n"


def test_a_signal_stops_the_loop(capsys):
    loop = FakeLoop(lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert run_role("broker", "broker-a", loop, FakeRole()) == ExitCode.OK
    assert loop.stopped


def test_after_a_first_signal_ctrl_c_kills(capsys):
    loop = FakeLoop(lambda: os.kill(os.getpid(), signal.SIGINT))
    run_role("broker", "broker-a", loop, FakeRole())
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def test_a_role_ends_with_its_supervisor(capsys, monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(process, "PARENT_PIPE", read)
    loop = FakeLoop()

    def on_run():
        handler = loop.sources[read]
        os.write(write, b"noise")
        handler()
        assert not loop.stopped
        os.close(write)
        handler()

    loop.on_run = on_run
    assert run_role("broker", "broker-a", loop, FakeRole(), supervised=True) == ExitCode.OK
    assert loop.stopped
    assert loop.sources == {}
    os.close(read)


@pytest.mark.parametrize(
    ("fault", "code", "line"),
    [
        (ConfigError("x = 1: no"), 2, "error: a: x = 1: no\n"),
        (StoreLocked("open elsewhere"), 2, "error: a: open elsewhere\n"),
        (OSError(errno.EADDRINUSE, "cannot listen"), 2, "error: a: cannot listen\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x"),
            2,
            "error: a: /x: Permission denied\n",
        ),
        (OSError(errno.EIO, "bad disk"), 1, "error: a: bad disk\n"),
        (OSError(errno.ENOSPC, "full"), 2, "error: a: full\n"),
        (DiskFull("no room"), 1, "error: a: no room\n"),
        (StorageError("broken\nlog"), 1, "error: a: broken\\nlog\n"),
    ],
)
def test_a_failed_start_is_told_in_one_line(fault, code, line, capsys):
    role = FakeRole(fault)
    assert run_role("broker", "a", FakeLoop(), role) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line)
    assert role.calls == ["start", "stop"]


def test_a_store_in_a_folder_that_may_not_be_written_is_a_wrong_setting(capsys):
    error = StorageError("/x cannot be opened")
    error.__cause__ = PermissionError(errno.EACCES, "Permission denied")
    assert report_failure("a", error) == ExitCode.USAGE


def test_a_bug_at_the_start_is_told_and_logged(capsys, caplog):
    assert run_role("broker", "a", FakeLoop(), FakeRole(ZeroDivisionError("x"))) == 1
    assert capsys.readouterr().err == "error: a: internal error: ZeroDivisionError: x\n"
    assert caplog.records[-1].exc_info is not None


def test_a_failing_stop_is_no_success(capsys):
    assert run_role("broker", "a", FakeLoop(), FakeRole(stop_fault=OSError("x"))) == 1


def test_a_failing_loop_still_stops_the_role(capsys):
    def fail():
        raise RuntimeError("bug")

    role = FakeRole()
    assert run_role("broker", "a", FakeLoop(fail), role) == ExitCode.FAILED
    assert role.calls == ["start", "stop"]


def test_nobody_who_reads_the_ready_line_means_stop(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(process.sys, "stdout", Gone())
    loop = FakeLoop()
    assert run_role("broker", "a", loop, FakeRole()) == ExitCode.OK
    assert loop.stopped
