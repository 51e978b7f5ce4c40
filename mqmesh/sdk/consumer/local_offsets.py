"""Offsets of a broadcasting consumer: each member has its own, in a file."""

import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Annotated, Final

import msgspec

from mqmesh.errors import ConfigError
from mqmesh.message import MessageQueue
from mqmesh.private_files import APPEND, make_folder, open_private
from mqmesh.sdk.consumer.offset_store import OffsetStore, OnCommitted, OnFetched

DOCUMENT_VERSION: Final = 2

_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _LocalOffsetsDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    group: str
    instance_name: str
    offsets: list[tuple[str, str, int, _Offset, _Epoch]]


class LocalOffsets(OffsetStore):
    """Offsets in a JSON file, replaced as a whole, so that a crash leaves the old or the new one.

    Args:
        folder: Folder of the file; made if it is not there.
        group: Consumer group.
        instance_name: Distinguishes the members on one machine, across restarts.
    """

    def __init__(self, folder: Path, group: str, instance_name: str) -> None:
        self.claiming = False
        self.epochs = {}
        self.processing = set()
        # Names never become paths.
        digest = hashlib.blake2b(f"{group}\0{instance_name}".encode(), digest_size=16).hexdigest()
        self._path = folder / f"{digest}.json"
        self._group = group
        self._instance_name = instance_name
        self._offsets: dict[MessageQueue, int] = {}
        self._lock: IO[bytes] | None = None

    def open(self) -> None:
        """Loads the offsets.

        Raises:
            ConfigError: Another consumer uses the file, or it cannot be read. It is never
                silently begun anew.
        """
        try:
            make_folder(self._path.parent)
            self._lock = os.fdopen(open_private(str(self._path.with_suffix(".lock")), APPEND), "ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"another consumer of group {self._group!r} runs under instance_name "
                f"{self._instance_name!r}; with BROADCASTING each needs its own"
            ) from None
        except OSError as error:
            self.close()
            raise ConfigError(f"offsets_dir: {error}") from error
        try:
            document = msgspec.json.decode(data, type=_LocalOffsetsDocument)
            if document.version != DOCUMENT_VERSION:
                raise msgspec.ValidationError(f"version {document.version} is unknown")
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            self.close()
            raise ConfigError(f"offsets in {self._path} cannot be read: {error}") from error
        self._offsets = {
            MessageQueue(topic, broker_name, queue_id): offset
            for topic, broker_name, queue_id, offset, _ in document.offsets
        }
        # A broker may have lost messages while this client was not connected to it.
        self.epochs = {
            MessageQueue(topic, broker_name, queue_id): epoch
            for topic, broker_name, queue_id, _, epoch in document.offsets
        }

    def close(self) -> None:
        """Lets others use the file."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def fetch(self, broker_name: str, queues: list[MessageQueue], on_done: OnFetched) -> None:
        on_done({queue: self._offsets.get(queue, -1) for queue in queues})

    def claim(self, broker_name: str, queues: list[MessageQueue], on_done: OnFetched) -> None:
        self.fetch(broker_name, queues, on_done)

    def release(self, queues: list[MessageQueue]) -> None:
        """Release nothing: all members read all queues."""

    def commit(self, offsets: Mapping[MessageQueue, int], on_done: OnCommitted) -> None:
        before = dict(self._offsets)
        self._offsets.update(offsets)
        if self._offsets == before:
            on_done(None)
            return
        try:
            self._save()
        except OSError as error:
            self._offsets = before
            on_done(ConfigError(f"offsets cannot be saved: {error}"))
        else:
            on_done(None)

    def known(self, queue: MessageQueue) -> int:
        raise AssertionError("broadcasting consumers commit nothing at brokers")

    def note_processed(self, queue: MessageQueue, offset: int) -> None:
        raise AssertionError("broadcasting consumers commit nothing at brokers")

    def forget(self, queue: MessageQueue) -> None:
        """Forget nothing: no other member reads our file."""

    def forget_broker(self, broker_name: str) -> None:
        """Forget nothing: brokers do not know the offsets."""

    def _save(self) -> None:
        document = _LocalOffsetsDocument(
            DOCUMENT_VERSION,
            self._group,
            self._instance_name,
            [
                (q.topic, q.broker_name, q.queue_id, at, self.epochs.get(q, 0))
                for q, at in sorted(self._offsets.items())
            ],
        )
        fresh = self._path.with_suffix(".new")
        with open(fresh, "wb", opener=open_private) as file:
            file.write(msgspec.json.encode(document))
            file.flush()
            os.fdatasync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
