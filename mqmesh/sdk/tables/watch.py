"""Watch of a table: what its keys have, and then each change."""

from collections.abc import Callable, Iterable, Iterator

from mqmesh.batch.delayed_batch import expires_ms
from mqmesh.batch.record_batch import check_stored, decode_messages
from mqmesh.protocol.command import Command, decode_header
from mqmesh.protocol.pulling import PullResponse, PullStatus
from mqmesh.protocol.tables import KvOperation
from mqmesh.sdk.tables.entries import KvEntry, entry_of

Pages = Iterable[tuple[int, list[KvEntry]]]


class TableWatch:
    """Watch of the keys of a table that have a prefix.

    Args:
        prefix: "" for all.
        read: Returns the pages of ``KeyValue.read_pages`` that have keys with revisions above one,
            tombstones among them; without values where the second argument is True.
        pull: Returns the answer of a pull from an offset on, in an epoch of the broker's log.
    """

    def __init__(
        self, prefix: str, read: Callable[[int, bool], Pages], pull: Callable[[int, int], Command]
    ) -> None:
        self._prefix = prefix
        self._read = read
        self._pull = pull
        self._at = self._epoch = 0
        # Keys that the reader knows with a value; when the log is gone, others are deleted.
        self._known: set[str] = set()

    def changes(self, *, include_current: bool) -> Iterator[KvEntry]:
        """Yield entries, without an end.

        Args:
            include_current: Begin with what the keys have now, in their order; else what is written
                from now on.
        """
        for one in self._catch_up(0, keys_only=not include_current):
            if include_current and not one.is_deleted:
                yield one
        while True:
            yield from self._next()

    def _catch_up(self, since: int, *, keys_only: bool = False) -> Iterator[KvEntry]:
        """Yield what has changed since a revision, without the log."""
        revision = -1
        for at, entries in self._read(since, keys_only):
            if revision < 0:
                revision = self._at = at  # of the first page: what comes meanwhile is pulled
            for one in entries:
                if one.revision <= revision:
                    yield self._note(one)
                else:
                    # It may have had a value before.
                    self._known.add(one.key)

    def _next(self) -> Iterator[KvEntry]:
        answer = self._pull(self._at, self._epoch)
        facts = decode_header(PullResponse, answer.header)
        self._epoch = facts.epoch
        status = facts.status
        if status == PullStatus.FOUND:
            yield from self._decoded(answer)
        elif status == PullStatus.NO_MATCHED_MSG:
            self._at = max(self._at, facts.next_queue_offset)
        elif status != PullStatus.NO_NEW_MSG:
            # The log is gone there, or others stand there now.
            known = self._known
            self._known = set()
            yield from self._catch_up(0)
            for key in sorted(known - self._known):
                yield KvEntry(key, b"", self._at, 0, KvOperation.DEL)

    def _decoded(self, answer: Command) -> Iterator[KvEntry]:
        body, place = answer.body, 0
        while place < len(body):
            header = check_stored(body, place)
            due_ms = expires_ms(body[place : place + header.total_size], header)
            for message in decode_messages(body, header, position=place):
                if message.queue_offset < self._at:
                    continue
                entry = entry_of(message, due_ms)
                if entry is not None and entry.key.startswith(self._prefix):
                    yield self._note(entry)
            self._at = int(header.next_queue_offset)
            place += header.total_size

    def _note(self, entry: KvEntry) -> KvEntry:
        if entry.is_deleted:
            self._known.discard(entry.key)
        else:
            self._known.add(entry.key)
        return entry
