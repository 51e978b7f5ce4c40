"""Structs of snapshots: an administrator has a broker make one."""

from typing import Annotated

import msgspec

_Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4_096)]


class CreateSnapshotRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """CREATE_SNAPSHOT: makes a snapshot of the store on the broker's machine, below
    ``snapshot.root_dir``; answered once it is on disk.

    It ends where the log ended when everything else of it was copied. The broker goes on meanwhile.
    See docs/storage-format.md.

    Attributes:
        archive: Archive that takes the snapshot in and deletes it then; the broker keeps it until
            then, as far as there is room. Empty for none: newer ones replace it.

    Errors:
        SYSTEM_BUSY: One is being made.
        DISK_FULL: No room; nothing is left of it.
        SYSTEM_ERROR: It cannot be made; nothing is left of it.
        REQUEST_CODE_NOT_SUPPORTED: The store is not of the backend ``commitlog``.
    """

    archive: Annotated[str, msgspec.Meta(max_length=4_096)] = ""


class SnapshotInfo(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A snapshot that was made.

    Attributes:
        path: Its directory on the broker's machine.
        broker_name: Broker group that it is of.
        start_offset: Commit-log offset where its log begins.
        end_offset: Where it ends.
        messages: In the broker's queues when the end was known, those of system topics too; what
            came in these moments may be counted and not be in it.
        disk_bytes: Size of its files; most of them are shared with the store.
        file_count: Files in it.
        took_ms: How long it took.
    """

    path: str
    broker_name: str
    start_offset: int
    end_offset: int
    messages: int
    disk_bytes: int
    file_count: int
    took_ms: int


class CopyIndexRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """COPY_INDEX: copies all parts of the index that are not sealed for a snapshot, each as it is
    at one moment.

    Attributes:
        directory: Gets a directory for each part that is not sealed.

    Errors:
        DISK_FULL: No room for the copy.
        SYSTEM_ERROR: A part cannot be copied.
    """

    directory: _Path


class CopyIndexResponse(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Answer to COPY_INDEX.

    Attributes:
        parts: Parts that were copied.
    """

    parts: int
