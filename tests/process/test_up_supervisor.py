"""The supervisor with small programs as its children."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from harness.commands import wait_until_gone

from mqmesh.roles.supervisor import supervisor
from mqmesh.roles.supervisor.run_file import LOOK_AGAIN, read_record, write_down
from mqmesh.roles.supervisor.supervisor import RoleSpec, Supervisor

READY = (
    "print(f'READY role=toy name={sys.argv[1]} endpoint=tcp://x:1 pid={os.getpid()}', flush=True)"
)
SERVE = f"import os, sys, signal\n{READY}\nsys.stdin.read()"
STUBBORN = f"import os, sys, signal\nsignal.signal(15, signal.SIG_IGN)\n{READY}\nsignal.pause()"


class Scene:
    """A supervisor whose lines are kept, and which is stopped when a line comes."""

    def __init__(self, folder):
        self.folder = folder
        self.lines = []
        self.triggers = []
        self.supervisor = None

    def on_line(self, part, action):
        self.triggers.append((part, action))

    def say(self, line):
        self.lines.append(line)
        for trigger in list(self.triggers):
            if trigger[0] in line.text:
                self.triggers.remove(trigger)
                trigger[1]()

    def run(self, *programs, stages=None, **options):
        specs = [
            RoleSpec(
                role="toy",
                name=f"toy-{number}",
                argv=[sys.executable, "-c", program, f"toy-{number}"],
                stop_stage=stages[number] if stages else 0,
            )
            for number, program in enumerate(programs)
        ]
        self.supervisor = Supervisor(specs, self.folder, say=self.say, **options)
        return self.supervisor.run()

    def texts(self, name="mqmesh"):
        return [line.text for line in self.lines if line.name == name]

    def wants_down(self, *names):
        write_down(self.folder, names)
        os.kill(os.getpid(), LOOK_AGAIN)

    def stop(self, number=signal.SIGTERM):
        os.kill(os.getpid(), number)


@pytest.fixture
def scene(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGCHLD)]
    yield Scene(tmp_path)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGCHLD)] == before


def test_everything_is_started_and_stopped(scene):
    scene.on_line("cluster is ready", scene.stop)
    assert scene.run(SERVE, SERVE, ready_note="well") == 0
    texts = scene.texts()
    assert [text.split(" (")[0] for text in sorted(texts[:2])] == [
        "toy toy-0 is ready at tcp://x:1",
        "toy toy-1 is ready at tcp://x:1",
    ]
    assert texts[2].endswith("; well")
    assert texts[3] == "SIGTERM: stopping"
    assert texts[-1].startswith("everything has stopped in ")
    assert read_record(scene.folder) is None


def test_the_cluster_is_ready_when_its_parts_know_each_other(scene):
    asked = []

    def is_complete():
        asked.append(1)
        return len(asked) == 3

    scene.on_line("cluster is ready", scene.stop)
    scene.run(SERVE, is_complete=is_complete)
    assert len(asked) == 3


def test_the_lines_of_a_child_come_with_their_level_and_go_to_its_log(scene):
    program = (
        "import os, sys\n"
        "print('2026-01-01T12:00:00.000Z WARNING a.b: careful', file=sys.stderr)\n"
        "print('| ValueError: x', file=sys.stderr)\n"
        "print('from a library', file=sys.stderr)\n"
        f"{SERVE}"
    )
    scene.on_line("cluster is ready", scene.stop)
    scene.run(program)
    assert [(one.level, one.text) for one in scene.lines if one.name == "toy-0"] == [
        ("WARNING", "a.b: careful"),
        ("WARNING", "| ValueError: x"),
        ("ERROR", "from a library"),
    ]
    log = (scene.folder / "logs" / "toy-0.log").read_text().splitlines()
    assert log == [
        "2026-01-01T12:00:00.000Z WARNING a.b: careful",
        "| ValueError: x",
        "from a library",
    ]


def test_last_words_are_not_lost(scene):
    program = "import sys; sys.stderr.write('x' * 100_000 + chr(10) + 'last words'); sys.exit(1)"
    scene.on_line("starting it again", scene.stop)
    scene.run(program)
    assert scene.texts("toy-0")[-1] == "last words"


def test_a_crash_loop_is_slowed_down_and_reported(scene):
    scene.on_line("crash loop", scene.stop)
    began = time.monotonic()
    assert scene.run("raise SystemExit(1)") == 0
    assert time.monotonic() - began >= 3.0  # 0.2 + 0.4 + 0.8 + 1.6
    delays = [text.rpartition(" in ")[2] for text in scene.texts() if "starting it again" in text]
    assert delays == ["0.2 s", "0.4 s", "0.8 s", "1.6 s", "3.2 s"]
    assert any("5 quick deaths in a row; see" in text for text in scene.texts())


def test_the_reason_of_a_failed_start_is_told_with_it(scene):
    program = "import sys; print('error: toy-0: no luck', file=sys.stderr); sys.exit(1)"
    scene.on_line("starting it again", scene.stop)
    scene.run(program)
    assert scene.texts()[0] == (
        "toy-0 ended: exit code 1 (toy-0: no luck); starting it again in 0.2 s"
    )


def test_a_wrong_configuration_stops_everything(scene):
    program = "import sys; print('error: toy-1: port taken', file=sys.stderr); sys.exit(2)"
    assert scene.run(SERVE, program) == 2
    assert scene.supervisor.failure == "toy-1: port taken"
    assert not any("port taken" in line.text for line in scene.lines)


def test_a_program_that_is_not_there_is_tried_again(scene):
    scene.on_line("starting it again", scene.stop)
    spec = RoleSpec(role="toy", name="toy", argv=["/nowhere/program"])
    supervisor = Supervisor([spec], scene.folder, say=scene.say)
    assert supervisor.run() == 0
    assert "cannot be started: [Errno 2]" in scene.texts()[0]


def test_later_stages_wait_for_earlier_ones(scene):
    program = SERVE.replace("signal\n", "signal\nsignal.signal(15, lambda *a: sys.exit(0))\n", 1)
    ending = f"import atexit, sys\natexit.register(lambda: print('bye', flush=True))\n{program}"
    scene.on_line("cluster is ready", scene.stop)
    scene.run(ending, ending, ending, stages=[1, 0, 1])
    byes = [line.name for line in scene.lines if line.text == "bye"]
    assert byes[0] == "toy-1"
    assert sorted(byes) == ["toy-0", "toy-1", "toy-2"]


def test_who_does_not_stop_is_killed_in_time(scene):
    scene.on_line("cluster is ready", scene.stop)
    assert scene.run(STUBBORN, SERVE, stages=[0, 1]) == 0
    texts = scene.texts()
    assert "toy-0 has not stopped in time; killing it" in texts
    assert float(texts[-1].split()[-2]) < 2.0


def test_a_second_ctrl_c_kills_at_once(scene):
    scene.on_line("cluster is ready", lambda: scene.stop(signal.SIGINT))
    scene.on_line("SIGINT: stopping", lambda: scene.stop(signal.SIGINT))
    scene.run(STUBBORN)
    texts = scene.texts()
    assert "SIGINT again: killing what is left" in texts
    assert float(texts[-1].split()[-2]) < 1.0


def test_what_a_dead_child_had_started_is_ended_with_it(scene):
    program = (
        "import subprocess, sys\n"
        "helper = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print('helper', helper.pid, file=sys.stderr)\n"
        "raise SystemExit(1)"
    )
    scene.on_line("starting it again", scene.stop)
    scene.run(program)
    (text,) = scene.texts("toy-0")
    assert wait_until_gone([int(text.split()[1])], 5.0) == []


def test_a_flood_of_lines_stops_nobody_from_stopping(scene):
    program = f"import os, sys\n{READY}\nwhile True: print('x' * 200, file=sys.stderr)"
    scene.on_line("cluster is ready", scene.stop)
    assert scene.run(program, SERVE) == 0
    assert float(scene.texts()[-1].split()[-2]) < 2.0


def test_nothing_is_left_when_the_supervisor_itself_fails(scene):
    def fail():
        raise RuntimeError("bug")

    pids = []
    scene.on_line("is ready at", lambda: pids.append(read_record(scene.folder).roles[0].pid))
    with pytest.raises(RuntimeError, match="bug"):
        scene.run(STUBBORN, is_complete=fail)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_deaths_are_told_once_the_process_is_reaped(scene):
    deaths = []
    scene.on_line("toy-0 ended", scene.stop)
    killed = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    scene.run(killed, SERVE, on_death=lambda name, pid: deaths.append((name, pid)))
    assert deaths[0][0] == "toy-0"
    with pytest.raises(ProcessLookupError):
        os.kill(deaths[0][1], 0)


def test_one_process_is_stopped_alone_and_started_again(scene):
    states = []

    def is_down():
        states.extend(one.state for one in read_record(scene.folder).roles)
        scene.on_line("toy toy-0 is ready", scene.stop)
        scene.wants_down()

    scene.on_line("cluster is ready", lambda: scene.wants_down("toy-0"))
    scene.on_line("toy-0 is down until `mqmesh restart toy-0`", is_down)
    assert scene.run(SERVE, SERVE) == 0
    assert len(states) == 2
    assert states[1] == "running"
    texts = scene.texts()
    assert not any("killed" in text or "toy-1 is stopped" in text for text in texts)


def test_one_that_does_not_stop_alone_is_killed(scene, monkeypatch):
    monkeypatch.setattr(supervisor, "STOP_ALONE_MS", 50)
    scene.on_line("cluster is ready", lambda: scene.wants_down("toy-0"))
    scene.on_line("toy-0 is down", scene.stop)
    assert scene.run(STUBBORN, SERVE) == 0
    assert "toy-0 has not stopped in time; killing it" in scene.texts()


def test_a_start_of_the_cluster_starts_everything(scene):
    write_down(scene.folder, ["toy-0"])
    scene.on_line("cluster is ready", scene.stop)
    assert scene.run(SERVE, SERVE) == 0
