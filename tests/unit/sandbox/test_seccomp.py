"""The filter of system calls, run here by a small machine of the kernel's kind."""

from __future__ import annotations

import struct

import pytest

from mqmesh.sandbox.seccomp import (
    ALLOW,
    ARCHITECTURES,
    KILL_PROCESS,
    PROT_EXEC,
    REFUSE,
    X32_BIT,
    program,
)

EVERY_NUMBER = range(600)
# What an attacker wants most, by its number on either architecture.
DANGEROUS = {
    "x86_64": {
        "fork": 57,
        "vfork": 58,
        "clone": 56,
        "clone3": 435,
        "execve": 59,
        "execveat": 322,
        "kill": 62,
        "tkill": 200,
        "tgkill": 234,
        "socket": 41,
        "connect": 42,
        "sendto": 44,
        "unlink": 87,
        "ptrace": 101,
        "process_vm_writev": 311,
        "prctl": 157,
        "seccomp": 317,
        "io_uring_setup": 425,
        "dup": 32,
        "ioctl": 16,
        "memfd_create": 319,
        "prlimit64": 302,
    },
    "aarch64": {
        "clone": 220,
        "clone3": 435,
        "execve": 221,
        "kill": 129,
        "tgkill": 131,
        "socket": 198,
        "connect": 203,
        "unlinkat": 35,
        "ptrace": 117,
        "prctl": 167,
        "io_uring_setup": 425,
        "dup": 23,
        "ioctl": 29,
        "prlimit64": 261,
    },
}


def run(code: bytes, audit: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run a classic BPF program as the kernel does; returns its verdict."""
    data = struct.pack("<iIQ6Q", number if number < 2**31 else number - 2**32, audit, 0,
                       *(*arguments, 0, 0, 0, 0, 0, 0)[:6])  # fmt: skip
    lines = list(struct.iter_unpack("<HBBI", code))
    accumulator = at = 0
    while True:
        operation, yes, no, k = lines[at]
        at += 1
        if operation == 0x20:
            accumulator = int.from_bytes(data[k : k + 4], "little")
        elif operation == 0x06:
            return k
        else:
            holds = {
                0x15: accumulator == k,
                0x35: accumulator >= k,
                0x45: bool(accumulator & k),
            }[operation]
            at += yes if holds else no


@pytest.fixture(params=sorted(ARCHITECTURES))
def machine(request):
    """Each architecture with its program."""
    architecture = ARCHITECTURES[request.param]
    return request.param, architecture, program(architecture)


def test_only_calls_of_the_table_are_allowed_whatever_their_arguments(machine):
    _, architecture, code = machine
    known = {
        *architecture.free.values(),
        *architecture.refused.values(),
        architecture.read,
        architecture.write,
        architecture.mmap,
        architecture.mprotect,
    }
    for number in set(EVERY_NUMBER) - known:
        for arguments in ((), (0,), (1,), (2**64 - 1,) * 6):
            assert run(code, architecture.audit, number, arguments) == KILL_PROCESS, number
    for number in architecture.free.values():
        assert run(code, architecture.audit, number, (2**64 - 1,) * 6) == ALLOW


def test_no_dangerous_call_is_allowed(machine):
    name, architecture, code = machine
    for call, number in DANGEROUS[name].items():
        assert run(code, architecture.audit, number) == KILL_PROCESS, call


def test_opening_a_file_is_refused_and_does_not_end_the_process(machine):
    _, architecture, code = machine
    for number in architecture.refused.values():
        assert run(code, architecture.audit, number) == REFUSE


def test_the_pipes_alone_can_be_read_and_written(machine):
    _, architecture, code = machine
    for number, allowed in ((architecture.read, 0), (architecture.write, 1)):
        for descriptor in (0, 1, 2, 3, 2**31, 2**32 - 1):
            verdict = run(code, architecture.audit, number, (descriptor,))
            assert verdict == (ALLOW if descriptor == allowed else KILL_PROCESS)


def test_no_memory_becomes_executable(machine):
    _, architecture, code = machine
    for number in (architecture.mmap, architecture.mprotect):
        for protection in range(8):
            verdict = run(code, architecture.audit, number, (0, 4096, protection))
            assert verdict == (KILL_PROCESS if protection & PROT_EXEC else ALLOW)


def test_another_architecture_or_calling_convention_is_refused(machine):
    name, architecture, code = machine
    for other in ARCHITECTURES.values():
        if other.audit != architecture.audit:
            assert run(code, other.audit, architecture.read, (0,)) == KILL_PROCESS
    assert run(code, 0x4000_0003, architecture.read, (0,)) == KILL_PROCESS  # i386
    if name == "x86_64":
        for number in architecture.free.values():
            assert run(code, architecture.audit, X32_BIT | number) == KILL_PROCESS


def test_numbers_are_those_that_python_knows(machine):
    """No number stands twice, and the programs are short."""
    _, architecture, code = machine
    numbers = [
        *architecture.free.values(),
        *architecture.refused.values(),
        architecture.read,
        architecture.write,
        architecture.mmap,
        architecture.mprotect,
    ]
    assert len(set(numbers)) == len(numbers)
    assert len(code) % 8 == 0
    assert len(code) // 8 < 256
