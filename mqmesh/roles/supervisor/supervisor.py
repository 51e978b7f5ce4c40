"""`mqmesh up`: starts the processes of a cluster, watches, restarts and stops them.

It knows command lines and names, not what the roles do. Every process is spawned with
a pipe as standard input, whose end of file means that the supervisor is gone, and in a
session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone, which
then stops the processes in order.
"""

import os
import selectors
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Final
from urllib.parse import quote

import msgspec

from mqmesh.clock import Clock, SystemClock
from mqmesh.logs import LogFormat, LogObject, json_line, text_line
from mqmesh.roles.process import ExitCode, Ready, parse_ready
from mqmesh.roles.supervisor.log_lines import LineParser, LineReader, LogLine, RotatedFile
from mqmesh.roles.supervisor.restart_policy import (
    RestartAction,
    RestartPolicy,
    StopPlan,
    describe_exit,
)
from mqmesh.roles.supervisor.run_file import (
    LOOK_AGAIN,
    RoleEntry,
    RunRecord,
    read_down,
    remove_record,
    write_down,
    write_record,
)

MAX_WAIT_MS: Final = 1_000
SLOW_START_MS: Final = 10_000
"""A process that is not ready after this is mentioned, once a start."""
STOP_ALONE_MS: Final = 5_000
"""A process that is stopped alone has so long: a master hands its lead over first."""
COMPLETE_TIMEOUT_MS: Final = 5_000
COMPLETE_PAUSE_MS: Final = 20
OWN_NAME: Final = "mqmesh"


class RoleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A process to keep running.

    Attributes:
        role: ``namesrv``, ``broker``, …
        name: Name of the instance, unique in the cluster.
        argv: Command line.
        endpoint: Endpoint at which it is expected to listen.
        stop_stage: Lower stages are stopped first.
        server_key: Public key that it proves to clients; "" where nothing is encrypted.
    """

    role: str
    name: str
    argv: list[str]
    endpoint: str = ""
    stop_stage: int = 0
    server_key: str = ""


class _Child:
    """A process and what is known about it."""

    def __init__(self, spec: RoleSpec, log: RotatedFile) -> None:
        self.spec = spec
        self.log = log
        self.policy = RestartPolicy()
        self.parser = LineParser(spec.name)
        self.process: subprocess.Popen[bytes] | None = None
        self.readers: list[LineReader] = []
        self.endpoint = spec.endpoint
        self.state = "waiting"
        self.started_ms = 0
        self.started_wall_ms = 0
        self.start_due_ms = 0
        self.kill_due_ms: int | None = None
        self.is_wanted = True
        self.starts = 0
        self.exits: Counter[str] = Counter()
        self.is_slow = False
        self.last_error = ""

    def entry(self) -> RoleEntry:
        return RoleEntry(
            role=self.spec.role,
            name=self.spec.name,
            pid=self.process.pid if self.process else 0,
            endpoint=self.endpoint,
            state=self.state,
            started_ms=self.started_wall_ms,
            restarts=max(self.starts - 1, 0),
            exits=dict(self.exits),
            argv=self.spec.argv,
            server_key=self.spec.server_key,
        )


class Supervisor:
    """Supervisor that keeps the processes of a cluster running until it is stopped.

    Args:
        specs: The processes; all are started at once.
        folder: Data folder; the caller holds its lock.
        namesrv: Name servers, for the record.
        ready_note: Second half of the sentence that says the cluster is ready.
        say: Called with every line of the common log stream.
        is_complete: Asked, once all processes serve, until it says that they know of each
            other; only then is the cluster ready. It may take some 100 ms.
        on_death: Called with the name and the process id of each process that did not end well,
            once it is reaped.
        clock: Source of time.

    Attributes:
        failure: Reason why ``run`` had to give up, "" when it had not.
    """

    def __init__(
        self,
        specs: Sequence[RoleSpec],
        folder: Path,
        *,
        namesrv: str = "",
        ready_note: str = "",
        log_format: LogFormat = "text",
        say: Callable[[LogLine], None],
        is_complete: Callable[[], bool] = lambda: True,
        on_death: Callable[[str, int], None] = lambda name, pid: None,
        clock: Clock | None = None,
    ) -> None:
        self.failure = ""
        self._folder = folder
        self._namesrv = namesrv
        self._ready_note = ready_note
        self._log_format = log_format
        self._say_line = say
        self._clock = clock or SystemClock()
        self._own_log = RotatedFile(folder / "logs" / f"{OWN_NAME}.log")
        self._children = [_Child(spec, self._log_of(spec.name)) for spec in specs]
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._stop_plan: StopPlan | None = None
        self._exit_code = int(ExitCode.OK)
        self._began_ms = 0
        self._began_wall_ms = 0
        self._is_complete = is_complete
        self._on_death = on_death
        self._all_serve_since_ms: int | None = None
        self._was_ready = False

    def run(self) -> int:
        """Starts everything and stays until it is stopped; call it in the main thread.

        Returns:
            An ``ExitCode``.
        """
        self._began_ms = self._clock.monotonic_ms()
        self._began_wall_ms = self._clock.wall_ms()
        restore = self._catch_signals()
        try:
            write_down(self._folder, ())
            for child in self._children:
                self._start(child)
            while self._stop_plan is None or self._alive():
                self._turn()
        finally:
            self._abandon()
            restore()
            self._selector.close()
            with suppress(OSError):
                remove_record(self._folder)
            self._own_log.close()
        return self._exit_code

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_ms() / 1_000):
            key.data()
        self._take_signals()
        now_ms = self._clock.monotonic_ms()
        for child in self._children:
            self._look_after(child, now_ms)
        if self._stop_plan is not None:
            self._carry_on_stopping(self._stop_plan, now_ms)
        elif not self._was_ready:
            self._look_whether_ready(now_ms)

    def _look_whether_ready(self, now_ms: int) -> None:
        if any(child.state != "running" for child in self._children):
            self._all_serve_since_ms = None
            return
        if self._all_serve_since_ms is None:
            self._all_serve_since_ms = now_ms
        if self._is_complete():
            self._was_ready = True
            seconds = (self._clock.monotonic_ms() - self._began_ms) / 1_000
            self._say("INFO", f"cluster is ready in {seconds:.2f} s; {self._ready_note}")
        elif now_ms - self._all_serve_since_ms >= COMPLETE_TIMEOUT_MS:
            self._was_ready = True
            self._say(
                "WARNING", "all processes serve, but not every broker is known at a name server"
            )

    def _wait_ms(self) -> int:
        now_ms = self._clock.monotonic_ms()
        if self._stop_plan is not None:
            return min(self._stop_plan.wait_ms(now_ms), MAX_WAIT_MS)
        if self._all_serve_since_ms is not None and not self._was_ready:
            return COMPLETE_PAUSE_MS
        due = [
            child.start_due_ms - now_ms
            for child in self._children
            if child.is_wanted and not child.process
        ]
        due += [one.kill_due_ms - now_ms for one in self._children if one.kill_due_ms is not None]
        return max(0, min([*due, MAX_WAIT_MS]))

    def _look_after(self, child: _Child, now_ms: int) -> None:
        if child.process is None:
            if self._stop_plan is None and child.is_wanted and child.start_due_ms <= now_ms:
                self._start(child)
            return
        if child.kill_due_ms is not None and now_ms >= child.kill_due_ms:
            child.kill_due_ms = None
            self._say("WARNING", f"{child.spec.name} has not stopped in time; killing it")
            self._send(child, signal.SIGKILL)
        if _has_ended(child.process):
            self._on_exit(child, child.process.wait(), now_ms)
        elif child.state == "starting" and not child.is_slow:
            if now_ms - child.started_ms >= SLOW_START_MS:
                child.is_slow = True
                self._say("WARNING", f"{child.spec.name} is not ready yet; see its log")

    def _start(self, child: _Child) -> None:
        now_ms = self._clock.monotonic_ms()
        child.started_ms = now_ms
        child.started_wall_ms = self._clock.wall_ms()
        child.starts += 1
        child.is_slow = False
        child.state = "starting"
        child.policy.on_started(now_ms)
        try:
            child.process = subprocess.Popen(
                child.spec.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            child.last_error = f"cannot be started: {error}"
            self._on_exit(child, ExitCode.FAILED, now_ms)
            return
        assert child.process.stdout is not None
        assert child.process.stderr is not None
        child.readers = [
            LineReader(pipe.fileno()) for pipe in (child.process.stdout, child.process.stderr)
        ]
        for reader in child.readers:
            self._selector.register(
                reader.descriptor, selectors.EVENT_READ, self._reading(child, reader)
            )
        self._record()

    def _reading(self, child: _Child, reader: LineReader) -> Callable[[], None]:
        def read() -> None:
            self._take_lines(child, reader.read())
            if not reader.is_open:
                self._selector.unregister(reader.descriptor)

        return read

    def _take_lines(self, child: _Child, lines: Sequence[str]) -> None:
        for line in lines:
            ready = parse_ready(line)
            if ready is not None:
                self._on_ready(child, ready)
                continue
            child.log.write(line)
            if line.startswith("error: "):
                child.last_error = line.removeprefix("error: ")  # reported with the exit
            else:
                self._say_line(child.parser.parse(line, self._now()))

    def _on_ready(self, child: _Child, ready: Ready) -> None:
        child.state = "running"
        child.endpoint = ready.endpoint
        child.policy.on_ready()
        seconds = (self._clock.monotonic_ms() - child.started_ms) / 1_000
        self._say(
            "INFO",
            f"{ready.role} {ready.name} is ready at {ready.endpoint} "
            f"(process {ready.pid}, {seconds:.2f} s)",
        )
        self._record()

    def _on_exit(self, child: _Child, exit_code: int, now_ms: int) -> None:
        pid = child.process.pid if child.process is not None else 0
        self._release(child)
        if pid and exit_code != ExitCode.OK:
            self._on_death(child.spec.name, pid)
        if self._stop_plan is not None:
            child.state = "stopped"
            return
        name = child.spec.name
        if not child.is_wanted:
            child.state, child.kill_due_ms = "stopped", None
            self._say("INFO", f"{name} is down until `mqmesh restart {name}`")
            self._record()
            return
        if child.kill_due_ms is not None:
            # It was stopped, and is wanted again by now.
            child.kill_due_ms, child.state, child.start_due_ms = None, "waiting", now_ms
            return
        reason = describe_exit(exit_code)
        child.exits[reason] += 1
        decision = child.policy.on_exit(exit_code, now_ms)
        if decision.action is RestartAction.GIVE_UP:
            child.state = "stopped"
            self.failure = child.last_error or f"{name}: {reason}"
            self._exit_code = ExitCode.USAGE
            self._stop(f"{name} cannot be started; stopping")
            return
        child.state = "waiting"
        child.start_due_ms = now_ms + decision.delay_ms
        why = f" ({child.last_error})" if child.last_error else ""
        self._say(
            "WARNING",
            f"{name} ended: {reason}{why}; starting it again in {decision.delay_ms / 1_000:g} s",
        )
        if decision.is_crash_loop:
            self._say(
                "ERROR",
                f"{name} is in a crash loop: {decision.quick_deaths} quick deaths in a row; "
                f"see {self._log_path(name)}",
            )
        child.last_error = ""
        self._record()

    def _look_who_is_wanted(self) -> None:
        """Stops and starts single processes as administrators have requested."""
        down, now_ms = read_down(self._folder), self._clock.monotonic_ms()
        for child in self._children:
            was_wanted, child.is_wanted = child.is_wanted, child.spec.name not in down
            if was_wanted and not child.is_wanted:
                self._say("INFO", f"{child.spec.name} is stopped: somebody wants it down")
                child.state = "stopped" if child.process is None else "stopping"
                if child.process is not None and child.kill_due_ms is None:
                    child.kill_due_ms = now_ms + STOP_ALONE_MS
                    self._send(child, signal.SIGTERM)
            elif child.is_wanted and not was_wanted and child.process is None:
                child.state, child.start_due_ms = "waiting", now_ms
        self._record()

    def _release(self, child: _Child) -> None:
        """Reads what the process wrote last, and closes its pipes."""
        for reader in child.readers:
            if reader.is_open:
                self._take_lines(child, reader.read_all())
                self._selector.unregister(reader.descriptor)
        child.readers = []
        if child.process is not None:
            for pipe in (child.process.stdin, child.process.stdout, child.process.stderr):
                assert pipe is not None
                pipe.close()
        child.process = None
        child.log.close()

    def _catch_signals(self) -> Callable[[], None]:
        read, write = os.pipe()
        for descriptor in (read, write):
            os.set_blocking(descriptor, False)
        self._selector.register(read, selectors.EVENT_READ, lambda: os.read(read, 4_096))
        former_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        former = {one: signal.signal(one, note) for one in (signal.SIGCHLD, LOOK_AGAIN)}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # A process that ignores SIGHUP is to outlive the terminal.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                former[number] = signal.signal(number, note)

        def restore() -> None:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_wakeup)
            os.close(read)
            os.close(write)

        return restore

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == LOOK_AGAIN and self._stop_plan is None:
                self._look_who_is_wanted()
            if number in (signal.SIGCHLD, LOOK_AGAIN):
                continue
            if self._stop_plan is None:
                self._stop(f"{signal.Signals(number).name}: stopping")
            elif number == signal.SIGINT:
                self._say("WARNING", "SIGINT again: killing what is left")
                for child in self._alive():
                    self._send(child, signal.SIGKILL)

    def _stop(self, reason: str) -> None:
        self._say("INFO", reason)
        stages = {child.spec.name: child.spec.stop_stage for child in self._children}
        self._stop_plan = StopPlan(stages, self._clock.monotonic_ms())
        for child in self._alive():
            child.state = "stopping"
        self._record()

    def _carry_on_stopping(self, plan: StopPlan, now_ms: int) -> None:
        alive = {child.spec.name: child for child in self._alive()}
        ask, kill = plan.next(alive, now_ms)
        for name in ask:
            self._send(alive[name], signal.SIGTERM)
        for name in kill:
            self._say("WARNING", f"{name} has not stopped in time; killing it")
            self._send(alive[name], signal.SIGKILL)
        if not alive:
            seconds = (now_ms - plan.began_ms) / 1_000
            self._say("INFO", f"everything has stopped in {seconds:.2f} s")

    def _abandon(self) -> None:
        """Leaves nothing behind, also when this process fails."""
        for child in self._alive():
            self._send(child, signal.SIGKILL)
            if child.process is not None:
                os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
                _end_helpers(child.process.pid)
                child.process.wait()
            self._release(child)

    def _send(self, child: _Child, number: signal.Signals) -> None:
        if child.process is not None:
            child.process.send_signal(number)

    def _alive(self) -> list[_Child]:
        return [child for child in self._children if child.process is not None]

    def _record(self) -> None:
        record = RunRecord(
            pid=os.getpid(),
            started_ms=self._began_wall_ms,
            namesrv=self._namesrv,
            roles=[child.entry() for child in self._children],
        )
        try:
            write_record(self._folder, record)
        except OSError as error:
            self._say("WARNING", f"the run file cannot be written: {error.strerror or error}")

    def _say(self, level: str, text: str) -> None:
        now = self._now()
        if self._log_format == "json":
            raw = json_line(LogObject(now, level, __name__, text, "supervisor", OWN_NAME))
        else:
            raw = text_line(now, level, OWN_NAME, text)
        self._own_log.write(raw)
        self._say_line(LogLine(now, OWN_NAME, level, text, raw))

    def _now(self) -> str:
        moment = datetime.fromtimestamp(self._clock.wall_ms() / 1_000, UTC)
        return moment.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

    def _log_path(self, name: str) -> Path:
        # A broker's name may hold characters that a path must not.
        return self._folder / "logs" / f"{quote(name, safe='')}.log"

    def _log_of(self, name: str) -> RotatedFile:
        return RotatedFile(self._log_path(name))


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Returns True if a process has ended; if so, nothing of it is left behind."""
    # Not collected yet, so that its number cannot be a stranger's.
    if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        return False
    _end_helpers(process.pid)
    return True


def _end_helpers(pid: int) -> None:
    """Ends what a dead process had started, such as a broker's index process."""
    # Every child leads a group of its own. They end by themselves, but not at once, and must
    # not be in the way of the next start.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def python_argv(*arguments: str) -> list[str]:
    """Return the command line of a mqmesh process on the same Python.

    ``-P`` keeps the current folder out of the import path: nothing that lies there may be
    imported in place of mqmesh or the standard library.
    """
    return [sys.executable, "-P", "-m", "mqmesh.cli", *arguments]
