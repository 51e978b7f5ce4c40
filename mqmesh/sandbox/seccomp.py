"""Which system calls a confined worker may make: the table, and the program for the kernel.

Pure: ``confinement.py`` installs the filter that is made here. Every call that is not in the table
ends the process at once, but for ``open``, which is refused: Python itself tries to show
the line of a syntax error. Where an argument matters, it is looked at: ``read`` and
``write`` are for the two pipes only, and no memory may become executable any more.
"""

import struct
from typing import Final

import msgspec

KILL_PROCESS: Final = 0x8000_0000
ALLOW: Final = 0x7FFF_0000
REFUSE: Final = 0x0005_000D
"""The call fails with EACCES."""

PROT_EXEC: Final = 4
X32_BIT: Final = 0x4000_0000
"""On x86-64, numbers from here on are those of another calling convention."""

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_JUMP_SET = 0x45
_RETURN = 0x06

_OFFSET_NUMBER = 0
_OFFSET_ARCHITECTURE = 4
_OFFSET_ARGUMENTS = 16

_INSTRUCTION = struct.Struct("<HBBI")


class Architecture(msgspec.Struct, frozen=True):
    """Numbers of the system calls that a worker needs, on one kind of processor.

    Attributes:
        audit: The kernel's number of the architecture (``AUDIT_ARCH_…``).
        free: Calls allowed with any arguments, by name.
        refused: Calls that fail, by name.
        read, write: Allowed on descriptors 0 and 1 alone.
        mmap, mprotect: Allowed without ``PROT_EXEC``.
        has_x32: A second range of numbers exists, and is refused.
    """

    audit: int
    free: dict[str, int]
    refused: dict[str, int]
    read: int
    write: int
    mmap: int
    mprotect: int
    has_x32: bool = False


ARCHITECTURES: Final[dict[str, Architecture]] = {
    "x86_64": Architecture(
        audit=0xC000_003E,
        free={
            "munmap": 11,
            "brk": 12,
            "rt_sigreturn": 15,
            "mremap": 25,
            "madvise": 28,
            "exit": 60,
            "gettimeofday": 96,
            "time": 201,
            "futex": 202,
            "restart_syscall": 219,
            "clock_gettime": 228,
            "exit_group": 231,
            "getrandom": 318,
        },
        refused={"open": 2, "openat": 257},
        read=0,
        write=1,
        mmap=9,
        mprotect=10,
        has_x32=True,
    ),
    "aarch64": Architecture(
        audit=0xC000_00B7,
        free={
            "exit": 93,
            "exit_group": 94,
            "futex": 98,
            "clock_gettime": 113,
            "restart_syscall": 128,
            "rt_sigreturn": 139,
            "gettimeofday": 169,
            "brk": 214,
            "munmap": 215,
            "mremap": 216,
            "madvise": 233,
            "getrandom": 278,
        },
        refused={"openat": 56},
        read=63,
        write=64,
        mmap=222,
        mprotect=226,
    ),
}
"""Numbers by ``platform.machine()``. They are the kernel's and never change."""


def program(architecture: Architecture) -> bytes:
    """Makes the filter of system calls, for ``prctl(PR_SET_SECCOMP)``.

    Returns:
        Layout: array of ``struct sock_filter``, little endian.
    """
    code = [
        (_LOAD, 0, 0, _OFFSET_ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture.audit),
        (_RETURN, 0, 0, KILL_PROCESS),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
    ]
    if architecture.has_x32:
        code += [(_JUMP_GREATER_EQUAL, 0, 1, X32_BIT), (_RETURN, 0, 0, KILL_PROCESS)]
    for number in architecture.free.values():
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, ALLOW)]
    for number in architecture.refused.values():
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, REFUSE)]
    for number, descriptor in ((architecture.read, 0), (architecture.write, 1)):
        code += _if_argument(number, 0, (_JUMP_EQUAL, 0, 1, descriptor))
    for number in (architecture.mmap, architecture.mprotect):
        code += _if_argument(number, 2, (_JUMP_SET, 1, 0, PROT_EXEC))
    code.append((_RETURN, 0, 0, KILL_PROCESS))
    return b"".join(_INSTRUCTION.pack(*one) for one in code)


def _if_argument(
    number: int, argument: int, test: tuple[int, int, int, int]
) -> list[tuple[int, int, int, int]]:
    """Allows a call when the test of its argument's lower half goes on to the next line."""
    return [
        (_JUMP_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * argument),
        test,
        (_RETURN, 0, 0, ALLOW),
        (_RETURN, 0, 0, KILL_PROCESS),
    ]
