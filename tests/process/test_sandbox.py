"""Foreign code in a real confined worker: what it can do, and what ends it."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from harness.stopwatch import Stopwatch

from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.sandbox.frames import Answer, Setup, Status
from mqmesh.sandbox.worker_process import WorkerProcess
from mqmesh.transport.zmq.loop import EventLoop

MIB = 1024 * 1024
PATIENCE_S = 50.0

# Past the builtins that a filter is given: any class that Python itself defined knows its module.
PRELUDE = """
def module(name):
    for c in object.__subclasses__():
        if c.__name__ == "_wrap_close":
            return c.__init__.__globals__["sys"].modules[name]
os = module("os")
"""

# Name, source, and what the owner is told.
HOSTILE = {
    "reads a file": (
        "def match(m): return len(os.read(os.open('/etc/passwd', 0), 9)) > 0",
        "PermissionError",
    ),
    "writes a file": (
        "def match(m): return os.open('/tmp/{mark}', os.O_CREAT | os.O_WRONLY) > 0",
        "PermissionError",
    ),
    "lists a folder": ("def match(m): return len(os.listdir('/')) > 0", "PermissionError"),
    "removes a file": ("def match(m): return os.unlink('{victim}') is None", "SIGSYS"),
    "opens a socket": (
        ("def match(m):\n"
        " libc = module('ctypes').CDLL(None)\n"
        " return libc.socket(2, 1, 0) > 0"),
        "SIGSYS",
    ),
    "forks": ("def match(m): return os.fork() > 0", "SIGSYS"),
    "runs a program": ("def match(m): return os.system('touch {victim}.2') == 0", "SIGSYS"),
    "replaces itself": (
        "def match(m): os.execv('/bin/sh', ['sh', '-c', 'touch {victim}.2'])",
        "SIGSYS",
    ),
    "takes memory": ("def match(m): return len(bytes(4 << 30)) > 0", "MemoryError"),
    "takes memory bit by bit": (
        "kept = []\ndef match(m):\n while True: kept.append(bytes(1 << 16))",
        "MemoryError",
    ),
    "never ends": ("def match(m):\n while True: pass", "no answer within"),
    "never ends in C": (
        "import re\ndef match(m): return re.match('(a+)+$', 'a' * 64 + 'b') is None",
        "no answer within",
    ),
    "is slow by design": (
        "def match(m):\n for _ in range(3_000_000): pass\n return True",
        "no answer within",
    ),
    "sleeps": ("def match(m): module('time').sleep(60); return True", "SIGSYS"),
    "recurses": ("def f(): return f()\ndef match(m): return f()", "RecursionError"),
    "overflows the stack of C": (
        ("def match(m):\n"
        " x = ()\n"
        " for _ in range(10**6): x = (x,)\n"
        " return hash(x) == 0"),
        "SIGSEGV",
    ),
    "kills its owner": ("def match(m): return os.kill(os.getppid(), 9) is None", "SIGSYS"),
    "kills everybody": ("def match(m): return os.kill(-1, 9) is None", "SIGSYS"),
    "floods its pipe": (
        "def match(m):\n while True: os.write(1, bytes(1 << 16))",
        "rules of its pipe",
    ),
    "forges an answer": (
        ("import struct\n"
        "def match(m):\n"
        " os.write(1, struct.pack('<IQB', 10, 1234, 1) + bytes(10)); return True"),
        "another question",
    ),
    "closes its pipes": ("def match(m): os.close(1); return True", "SIGSYS"),
    "starts threads": (
        ("def match(m):\n"
        " while True: module('_thread').start_new_thread(len, ('',))"),
        "SIGSYS",
    ),
    "ends its process": ("def match(m): os._exit(0)", "exit code 0"),
    "raises what stops programs": ("def match(m): raise SystemExit", "SystemExit"),
    "undoes its limits": (
        "def match(m): return module('resource').setrlimit(7, (9, 9)) is None",
        "SIGSYS",
    ),
    "makes code of bytes": (
        ("def match(m):\n"
        " libc = module('ctypes').CDLL(None)\n"
        " return libc.mprotect(0, 4096, 7) == 0"),
        "SIGSYS",
    ),
}  # fmt: skip


class Owner:
    """An event loop with one worker, turned by hand."""

    def __init__(self, source: str, **limits) -> None:
        self.loop = EventLoop()
        self.heard: list[Answer | str] = []
        settings = {"memory_bytes": 256 * MIB, "cpu_s": 60, "require_seccomp": True, **limits}
        self.worker = WorkerProcess(
            self.loop,
            Setup(source, broker_name="broker-a", **settings),
            deadline_ms=10_000,
            on_answer=self.heard.append,
            on_death=self.heard.append,
        )

    def next(self) -> Answer | str:
        """Waits for an answer, or the reason of the worker's death."""
        until = time.monotonic() + PATIENCE_S
        while not self.heard:
            assert time.monotonic() < until, "waited in vain"
            self.loop.tick(20)
        return self.heard.pop(0)

    def ask(self, batch: bytes, messages: int, deadline_ms: int = 10_000) -> Answer | str:
        self.worker.ask([batch], messages, deadline_ms)
        return self.next()

    def close(self) -> None:
        self.worker.close()
        assert self.loop.callback_failures == 0
        self.loop.close()


@pytest.fixture
def own():
    """Makes owners; closed at the end."""
    owners: list[Owner] = []

    def make(source: str, **limits) -> Owner:
        owners.append(Owner(source, **limits))
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()


def batch_of(count: int, size: int = 10, **fields) -> bytes:
    """A batch of messages 0, 1, 2, …"""
    return encode_batch(
        [Message("t", b"%0*d" % (size, number), **fields) for number in range(count)],
        topic="t",
        queue_id=0,
        producer_id=1,
        first_sequence=1,
        born_timestamp=1,
    )


def test_a_filter_matches(own):
    owner = own("def match(m): return int(m.body) % 3 == 0")
    ready = owner.next()
    assert ready.status is Status.READY
    for _ in range(3):
        assert owner.ask(batch_of(10), 10) == Answer(Status.MATCHED, b"\1\0\0\1\0\0\1\0\0\1")


def test_several_batches_larger_than_a_pipe_are_one_question(own):
    owner = own("def match(m): return m.body.endswith(b'7')")
    owner.next()
    one = batch_of(500, size=4_000)
    answer = owner.ask(one + one, 1_000)
    assert answer == Answer(Status.MATCHED, (b"\0" * 7 + b"\1" + b"\0" * 2) * 100)


def test_the_rungs_that_every_linux_has_hold(own):
    ready = own("def match(m): return True").next()
    rungs = msgspec.msgpack.decode(ready.body, type=list[str])
    assert {"rlimits", "dies-with-owner", "no-new-privileges", "seccomp"} <= set(rungs)
    if os.geteuid() == 0:
        assert "own-user" in rungs


def test_a_worker_has_no_environment_and_no_descriptors_but_two_pipes(own):
    with socket.create_server(("127.0.0.1", 0)):
        owner = own("def match(m): return True")
        owner.next()
        process = psutil.Process(owner.worker.pid)
        assert process.cmdline()[1:] == ["-I", "-B", "-m", "mqmesh.sandbox.worker"]
        assert Path(f"/proc/{owner.worker.pid}/environ").read_bytes() == b""
        found = {
            int(link.name): os.readlink(link)
            for link in Path(f"/proc/{owner.worker.pid}/fd").iterdir()
        }
        assert set(found) == {0, 1}
        assert all(target.startswith("pipe:") for target in found.values())


def test_a_worker_ends_with_its_owners_pipe(own):
    owner = own("def match(m): return True")
    owner.next()
    process = psutil.Process(owner.worker.pid)
    owner.worker.close()
    assert not psutil.pid_exists(owner.worker.pid) or not process.is_running()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def match(m)", "SyntaxError"),
        ("x = 1", "no function match"),
        ("def match(m):\n  '\\d'\n  return 1 is 1\n1 / 0", "ZeroDivisionError"),
        ("import socket", "may import"),
    ],
)
def test_a_filter_that_cannot_be_loaded_says_why(own, source, reason):
    answer = own(source).next()
    assert answer.status is Status.FAILED
    assert reason in answer.body.decode()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_filter_is_contained(own, tmp_path, name):
    source, reason = HOSTILE[name]
    victim = tmp_path / "victim"
    victim.write_text("here")
    mark = f"mqmesh-mark-{os.getpid()}"
    source = source.replace("{victim}", str(victim)).replace("{mark}", mark)
    owner = own(PRELUDE + source)
    ready = owner.next()
    assert ready.status is Status.READY

    # Only who does not end by himself is waited for.
    deadline_ms = 700 if reason == "no answer within" else 10_000
    began = time.monotonic()
    heard = owner.ask(batch_of(50), 50, deadline_ms)
    took_s = time.monotonic() - began

    text = heard if isinstance(heard, str) else heard.body.decode(errors="replace")
    assert isinstance(heard, str) or heard.status is Status.FAILED
    assert reason in text
    assert took_s < deadline_ms / 1_000 + 2
    assert victim.read_text() == "here"
    assert [one.name for one in tmp_path.iterdir()] == ["victim"]
    assert not Path("/tmp", mark).exists()
    if isinstance(heard, str):
        assert not psutil.pid_exists(owner.worker.pid)


def test_a_filter_that_forges_its_own_answer_lies_to_itself_alone(own):
    # It can find the nonce in its own process; what it gains is what it may say anyway.
    source = (
        "import struct\n"
        "told = []\n"
        "def match(m):\n"
        " f = module('sys')._getframe()\n"
        " while 'nonce' not in f.f_locals: f = f.f_back\n"
        " if not told:\n"
        "  told.append(os.write(1, struct.pack('<IQB', 3, f.f_locals['nonce'], 1) + bytes(3)))\n"
        " return True"
    )
    owner = own(PRELUDE + source)
    owner.next()
    assert owner.ask(batch_of(3), 3) in (
        Answer(Status.MATCHED, b"\0\0\0"),
        "it broke the rules of its pipe: more than an answer",
    )
    assert not owner.worker.is_busy
    if psutil.pid_exists(owner.worker.pid):
        assert owner.next() == "it spoke without being asked"
    assert not psutil.pid_exists(owner.worker.pid)


def test_a_filter_that_lost_its_way_while_loading_is_ended_in_time():
    loop = EventLoop()
    heard: list[Answer | str] = []
    setup = Setup("while True: pass", 256 * MIB, 60, True, "b")
    worker = WorkerProcess(
        loop, setup, deadline_ms=1_000, on_answer=heard.append, on_death=heard.append
    )
    watch = Stopwatch()
    while not heard:
        loop.tick(20)
    assert watch.seconds < 5
    assert heard == ["no answer within 1000 ms"]
    worker.close()
    loop.close()


def test_a_worker_without_memory_ends_so_that_a_fresh_one_may_go_on(own):
    owner = own("kept = []\ndef match(m):\n kept.append(bytes(1 << 20)); return True")
    owner.next()
    answer = owner.ask(batch_of(500), 500)
    assert b"MemoryError" in answer.body
    assert "used up its memory" in owner.next()


def test_processor_time_is_limited_by_the_kernel_too(own):
    owner = own("def match(m):\n while True: pass", cpu_s=1)
    owner.next()
    assert "SIGXCPU" in owner.ask(batch_of(1), 1, 50_000)


def test_what_one_worker_does_leaves_others_alone(own):
    good = own("def match(m): return int(m.body) < 5")
    good.next()
    bad = own("def match(m):\n while True: pass")
    bad.next()
    bad.worker.ask([batch_of(5)], 5, 5_000)
    times = []
    for _ in itertools.repeat(None, 20):
        began = time.monotonic()
        assert good.ask(batch_of(10), 10) == Answer(Status.MATCHED, b"\1" * 5 + b"\0" * 5)
        times.append(time.monotonic() - began)
    assert sorted(times)[10] < 2.0
