"""A disk with bad sectors: a file of a FUSE mount, for a loop device; parts of it cannot be read.

Run as a process of its own: ``bad_disk.py <file that backs it> <mount point>``. It says ``ready``
when it is mounted. Each line that it reads, ``<start> <end>``, makes a stretch bad and is answered
with ``done``; ``good`` makes all of it good again. It ends when it is unmounted.

Only what the kernel asks of one file is understood (``linux/fuse.h``, version 7.31).
"""

import ctypes
import errno
import os
import stat
import struct
import sys
import threading

LOOKUP, FORGET, GETATTR, OPEN, READ, WRITE, RELEASE, FSYNC = 1, 2, 3, 14, 15, 16, 18, 20
FLUSH, INIT, DESTROY, BATCH_FORGET, FALLOCATE = 25, 26, 38, 42, 43
ROOT, DISK = 1, 2
NAME = b"disk"
FOREVER_S = 3_600
DIRECT_IO = 1  # what was read is asked for again: nothing in between remembers it
MOST_BYTES = 1 << 20

REQUEST = struct.Struct("<IIQQ16x")
ANSWER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<QQQ36xIIIIIII")
INIT_ANSWER = struct.Struct("<IIIIHHII36x")


class BadDisk:
    """The file system."""

    def __init__(self, backing: str, mount_point: str) -> None:
        self._file = os.open(backing, os.O_RDWR)
        self._size = os.fstat(self._file).st_size
        self._fuse = os.open("/dev/fuse", os.O_RDWR)
        self.bad: list[tuple[int, int]] = []
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"bad_disk", mount_point.encode(), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "cannot be mounted")

    def serve(self) -> None:
        """Answers until it is unmounted."""
        while True:
            try:
                request = os.read(self._fuse, MOST_BYTES + 4_096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, code, number, node = REQUEST.unpack_from(request)
            if code in (FORGET, BATCH_FORGET):
                continue
            try:
                data, problem = self._answer(code, node, request[REQUEST.size :]), 0
            except OSError as error:
                data, problem = b"", error.errno or errno.EIO
            os.write(self._fuse, ANSWER.pack(ANSWER.size + len(data), -problem, number) + data)
            if code == DESTROY:
                return

    def _answer(self, code: int, node: int, body: bytes) -> bytes:
        if code == INIT:
            return INIT_ANSWER.pack(7, 31, 0, 0, 12, 10, MOST_BYTES, 1)
        if code == LOOKUP and body.rstrip(b"\0") == NAME:
            return struct.pack("<QQQQ8x", DISK, 0, FOREVER_S, FOREVER_S) + self._attributes(DISK)
        if code == GETATTR:
            return struct.pack("<Q8x", FOREVER_S) + self._attributes(node)
        if code == OPEN:
            return struct.pack("<QI4x", 1, DIRECT_IO)
        if code in (READ, WRITE):
            start, size = struct.unpack_from("<8xQI", body)
            if code == WRITE:
                return struct.pack("<I4x", os.pwrite(self._file, body[40 : 40 + size], start))
            if any(start < end and first < start + size for first, end in self.bad):
                raise OSError(errno.EIO, "a bad sector")
            return os.pread(self._file, size, start)
        if code in (RELEASE, FLUSH, FSYNC, FALLOCATE, DESTROY):
            return b""
        raise OSError(errno.ENOENT if code == LOOKUP else errno.ENOSYS, "not understood")

    def _attributes(self, node: int) -> bytes:
        size = self._size if node == DISK else 0
        mode = stat.S_IFREG | 0o600 if node == DISK else stat.S_IFDIR | 0o755
        return ATTRIBUTES.pack(node, size, size // 512, mode, 1, 0, 0, 0, 4_096, 0)


def main(backing: str, mount_point: str) -> None:
    """Mounts it, and obeys."""
    disk = BadDisk(backing, mount_point)
    threading.Thread(target=disk.serve).start()
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "good\n":
            disk.bad = []
        else:
            start, end = map(int, line.split())
            disk.bad = [*disk.bad, (start, end)]
        print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
