"""Offsets that groups committed at a follower while its master was gone. Pure but for the document.

The follower keeps them, and hands them to the master of the group's offsets: the one that comes
back, or itself when it is promoted. There the larger offset wins, unless the group was moved since.
A document keeps them over the follower's death; its fields stand in ``docs/storage-format.md``.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptRecord, InvalidArgument, MQMeshError, SystemBusy
from mqmesh.protocol.command import EMPTY_REPLY, Reply
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.replication import MOST_HELD_COMMITS, HandOverCommitsRequest, HeldCommit
from mqmesh.protocol.request import Request
from mqmesh.roles.broker.core import Core
from mqmesh.roles.broker.feature import Feature
from mqmesh.roles.broker.group_state.committed_offsets import CommittedOffsets
from mqmesh.roles.broker.group_state.moved_offsets import OffsetResets
from mqmesh.roles.broker.topic_state.topic_table import TopicTable
from mqmesh.roles.dispatch import Handler
from mqmesh.roles.document_saver import MakeSaver, Read
from mqmesh.storage.interface import replicable
from mqmesh.units import QueueOffset

HELD_FILE: Final = "held-commits.json"
DOCUMENT_VERSION: Final = 1

_Key = tuple[str, str, int]

_log = logging.getLogger(__name__)


class HeldDocument(msgspec.Struct, frozen=True):
    """Document of held commits.

    Attributes:
        store_id: Of the log that their offsets are of.
        commits: In no order.
        version: Of the document.
    """

    store_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    commits: list[HeldCommit]
    version: int = DOCUMENT_VERSION


def decode_held(document: bytes) -> HeldDocument:
    """Reads the document.

    Raises:
        CorruptRecord: It is none, or of another version.
    """
    try:
        held = msgspec.json.decode(document, type=HeldDocument)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{HELD_FILE} cannot be read: {error}") from error
    if held.version != DOCUMENT_VERSION:
        raise CorruptRecord(
            f"{HELD_FILE} has version {held.version}; this broker reads {DOCUMENT_VERSION}"
        )
    return held


class HeldCommits:
    """Held commits of one follower.

    Args:
        document: Saved document of held commits; None if there is none.

    Attributes:
        store_id: Of the log that they are of.
    """

    def __init__(self, document: HeldDocument | None = None) -> None:
        self.store_id = 0 if document is None else document.store_id
        commits = () if document is None else document.commits
        self._commits: dict[_Key, HeldCommit] = {_key(one): one for one in commits}

    def __len__(self) -> int:
        return len(self._commits)

    def document(self) -> bytes:
        """All of them, to be kept."""
        return msgspec.json.encode(HeldDocument(self.store_id, list(self._commits.values())))

    def hold(self, commit: HeldCommit) -> None:
        """A group committed here; what it was known to have committed before its first time here
        stays."""
        before = self._commits.get(_key(commit))
        if before is not None:
            commit = msgspec.structs.replace(commit, known_offset=before.known_offset)
        self._commits[_key(commit)] = commit

    def begin(self, store_id: int, offsets: CommittedOffsets) -> None:
        """The log was read, perhaps again, or is another one; groups go on where they came here.

        Args:
            store_id: Of the log.
            offsets: Committed offsets, by the log.
        """
        if store_id != self.store_id:
            _log.error(
                "%d offsets that groups committed here count no more: they are of another log",
                len(self._commits),
            )
            self._commits.clear()
        for key, one in self._commits.items():
            # The end of the log may have been cut, and offsets of the group with it.
            known = min(one.known_offset, offsets.query(*key))
            self._commits[key] = msgspec.structs.replace(one, known_offset=known)
        self.apply(offsets)

    def apply(self, offsets: CommittedOffsets) -> None:
        """Has groups go on here where they came here, if the log does not know better."""
        for key, one in self._commits.items():
            if offsets.query(*key) < one.queue_offset:
                try:
                    offsets.commit(*key, QueueOffset(one.queue_offset))
                except SystemBusy as error:
                    _log.error("an offset that a group committed here is not shown: %s", error)

    def some(self) -> list[HeldCommit]:
        """Return as many held commits as one request may hand over."""
        return list(self._commits.values())[:MOST_HELD_COMMITS]

    def forget(self, commits: Iterable[HeldCommit]) -> None:
        """These were handed over."""
        for one in commits:
            if self._commits.get(_key(one)) == one:
                del self._commits[_key(one)]


class HandedOverCommitsFeature(Feature):
    """Offsets that groups committed at a follower, handed over to this master."""

    def __init__(
        self, core: Core, topics: TopicTable, offsets: CommittedOffsets, resets: OffsetResets
    ) -> None:
        self._core = core
        self._settings = core.settings
        self._store = core.store
        self._state = core.state
        self._topics = topics
        self._offsets = offsets
        self._resets = resets

    def commands(self) -> Mapping[RequestCode, Handler]:
        """Implement ``Feature.commands``."""
        return {RequestCode.HAND_OVER_COMMITS: self.hand_over_commits}

    def take_held_commits(self, commits: Sequence[HeldCommit]) -> int:
        """Take over commits of a follower, for groups that are not further and were not reset.

        Args:
            commits: Commits that the follower held.

        Returns:
            Number of offsets that moved.
        """
        moved = 0
        for one in commits:
            group, topic, queue_id = key = _key(one)
            config = self._topics.get(topic)
            if config is None or queue_id >= config.queue_count:
                continue  # it was deleted since
            at = self._offsets.query(*key)
            if at < one.known_offset or self._resets.was_moved(*key):
                _log.info("group %s was moved in %s, queue %d, since", group, topic, queue_id)
                continue
            offset = min(one.queue_offset, self._store.queue_bounds(topic, queue_id)[1])
            if 0 < one.epoch < self._store.epoch():
                # Other messages may stand by now behind where the log lost its end.
                cut = self._store.cut_offset(topic, queue_id, one.epoch)
                offset = offset if cut is None else min(offset, cut)
            if offset > at:
                self._offsets.commit(group, topic, queue_id, QueueOffset(offset))
                moved += 1
        return moved

    def take_own_commits(self, read: Read, make_saver: MakeSaver) -> None:
        """Takes over the commits that this master held as a follower, and forgets them once saved.

        Raises:
            CorruptRecord: The held commits cannot be read.
        """
        document = read(HELD_FILE)
        held = HeldDocument(0, []) if document is None else decode_held(document)
        if not held.commits:
            return
        if held.store_id == replicable(self._store).identity().store_id:
            moved = self.take_held_commits(held.commits)
            _log.warning("%d offsets that groups committed at this follower count", moved)
        saver = make_saver(HELD_FILE, HeldCommits().document)

        def on_saved(error: MQMeshError | None) -> None:
            if error is None:
                saver.save()

        self._state.save(on_saved)

    def hand_over_commits(self, request: Request, given: HandOverCommitsRequest) -> Reply | None:
        """A follower gives what groups committed there; answered once that is in the log."""
        config, store_id = self._settings.now, replicable(self._store).identity().store_id
        if (given.broker_name, given.store_id) != (config.broker_name, store_id):
            raise InvalidArgument(
                f"this is {config.broker_name!r}, log {store_id:#010x}, and not "
                f"{given.broker_name!r}, log {given.store_id:#010x}"
            )
        moved = self.take_held_commits(given.commits)
        if not moved:
            return EMPTY_REPLY
        _log.warning("%d offsets that groups committed at a follower count here, too", moved)
        self._core.reply_when_saved(request, EMPTY_REPLY)
        return None


def _key(one: HeldCommit) -> _Key:
    return one.group, one.topic, one.queue_id
