"""Confinement: how a worker locks itself in, rung by rung, before it looks at foreign code.

Each rung holds where the one above it should give way: no descriptors but two pipes,
an own user, own namespaces (network, mounts, names, semaphores) with an empty root,
Landlock, limits of the kernel, no new privileges, and last the filter of system calls.
Linux alone has most of them; the worker reports to its owner which ones hold.
"""

import ctypes
import os
import platform
import resource
import signal
from contextlib import suppress
from typing import Final

import msgspec

from mqmesh.sandbox.seccomp import ARCHITECTURES, program

NOBODY: Final = 65_534
"""User and group of a worker whose owner is root."""
NICENESS: Final = 5
"""Brokers and filter servers come first; not so low that a busy machine makes filters late."""

_CLONE_NEWNS = 0x0002_0000
_CLONE_NEWUTS = 0x0400_0000
_CLONE_NEWIPC = 0x0800_0000
_CLONE_NEWUSER = 0x1000_0000
_CLONE_NEWNET = 0x4000_0000
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNET

_MS_RDONLY_NOSUID_NODEV_NOEXEC = 1 | 2 | 4 | 8
_MS_PRIVATE_REC = 1 << 18 | 16_384

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

_CAPABILITY_VERSION_3 = 0x2008_0522
# The same on every architecture that has Landlock.
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_RESTRICT_SELF = 446
_LANDLOCK_ALL_OF_ABI_1 = (1 << 13) - 1
_FIRST_SPARE_DESCRIPTOR = 2
_INSTRUCTION_BYTES = 8


class Limits(msgspec.Struct, frozen=True):
    """Limits that the kernel enforces for a worker.

    Attributes:
        memory_bytes: Address space.
        cpu_s: Seconds of processor time in its life.
    """

    memory_bytes: int
    cpu_s: int


class ConfinementFailed(Exception):
    """Raised when a rung that must hold does not."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def confine(limits: Limits) -> list[str]:
    """Locks this process in, for ever; all that it will need must be imported before.

    Returns:
        The rungs that hold, by name; ``seccomp`` is among them where the platform has it.

    Raises:
        ConfinementFailed: A rung that every platform has does not hold.
    """
    os.closerange(_FIRST_SPARE_DESCRIPTOR, os.sysconf("SC_OPEN_MAX"))
    os.nice(NICENESS)
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = _enter_namespaces(libc, _NAMESPACES) if os.geteuid() == 0 else []
    rungs = [*spaces, *_become_nobody()]
    if not spaces:
        # A user who is not root, or root without its powers, may do it within a user namespace.
        rungs += _enter_namespaces(libc, _CLONE_NEWUSER | _NAMESPACES)
    if _enter_landlock(libc):
        rungs.append("landlock")
    if _drop_capabilities(libc):
        rungs.append("no-capabilities")
    _set_limits(limits)
    rungs.append("rlimits")
    if _prctl(libc, _PR_SET_DUMPABLE, 0) and _prctl(libc, _PR_SET_PDEATHSIG, signal.SIGKILL):
        rungs.append("dies-with-owner")
    if _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1):
        rungs.append("no-new-privileges")
    if _enter_seccomp(libc):
        rungs.append("seccomp")
    return rungs


def _enter_namespaces(libc: ctypes.CDLL, flags: int) -> list[str]:
    if libc.unshare(flags) != 0:
        return []
    rungs = ["namespaces"]
    # No other process sees mounts that are made from here on.
    if (
        libc.mount(None, b"/", None, _MS_PRIVATE_REC, None) == 0
        and libc.mount(b"none", b"/tmp", b"tmpfs", _MS_RDONLY_NOSUID_NODEV_NOEXEC, b"size=4k") == 0
    ):
        with suppress(OSError):
            os.chroot("/tmp")
            os.chdir("/")
            rungs.append("empty-root")
    return rungs


def _become_nobody() -> list[str]:
    if os.geteuid() != 0:
        return []
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError as error:
        raise ConfinementFailed(
            f"the worker cannot become another user than root: {error}"
        ) from error
    return ["own-user"]


def _enter_landlock(libc: ctypes.CDLL) -> bool:
    handled = ctypes.c_uint64(_LANDLOCK_ALL_OF_ABI_1)
    ruleset = libc.syscall(
        ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET), ctypes.byref(handled), ctypes.c_size_t(8), 0
    )
    if ruleset < 0 or not _prctl(libc, _PR_SET_NO_NEW_PRIVS, 1):
        return False
    held = libc.syscall(ctypes.c_long(_SYS_LANDLOCK_RESTRICT_SELF), ruleset, 0) == 0
    os.close(ruleset)
    return bool(held)


def _drop_capabilities(libc: ctypes.CDLL) -> bool:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    return bool(libc.capset(header, nothing) == 0)


def _set_limits(limits: Limits) -> None:
    wanted = {
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),  # SIGXCPU says more than SIGKILL
        resource.RLIMIT_NOFILE: (0, 0),
        resource.RLIMIT_NPROC: (0, 0),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
    }
    try:
        for which, both in wanted.items():
            resource.setrlimit(which, both)
    except (OSError, ValueError) as error:
        raise ConfinementFailed(f"a limit of the kernel cannot be set: {error}") from error


def _enter_seccomp(libc: ctypes.CDLL) -> bool:
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return False
    code = program(architecture)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_program = _Program(
        len(code) // _INSTRUCTION_BYTES, ctypes.cast(buffer, ctypes.c_void_p).value
    )
    return _prctl(libc, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_program))


def _prctl(libc: ctypes.CDLL, option: int, argument: int, pointer: object = 0) -> bool:
    given = pointer if pointer else ctypes.c_ulong(0)
    nothing = ctypes.c_ulong(0)
    return bool(libc.prctl(option, ctypes.c_ulong(argument), given, nothing, nothing) == 0)
