"""State of a replica that is kept for ever: its identity, its promises, what it may have lost.

It is on the disk before anything follows from it: a promise before it is answered, an incarnation
before the replica reports what it has. Pure; the shell has the file.

The document is a JSON object of ``version`` and the fields below (also in
``docs/storage-format.md``). Version 1.
"""

from typing import Annotated, Final

import msgspec

from mqmesh.coordination.interface import MOST_REPLICAS, MemberIncarnation
from mqmesh.errors import BrokerNotAvailable, ConfigError, CorruptRecord
from mqmesh.log_identity import MAX_EPOCH

NAME: Final = "replica-state"
PLACE: Final = "replica-place"
"""An empty file beside it, for ``file_place``."""
VERSION: Final = 1
MAX_INCARNATION: Final = 2**62
DRAWN_BITS: Final = 61
"""Bits of the random numbers that incarnations are made of."""

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. The names of its fields are on disk and never change.

    Attributes:
        log_id: Of the log that it has a copy of.
        replica_id: 1 to 64, given once.
        identity: Drawn once; another store with the same ``replica_id`` has another one.
        promised_epoch: It refuses everything of lower epochs.
        incarnation: Drawn anew whenever acknowledged records may be gone. A number that only grew
            would come again in a store that was put back from a backup.
        boot_id: Of the machine's last start that the replica has seen, see ``mqmesh.host``.
        place: Of its store on the disk, see ``file_place``: a store that was put back from a backup
            is in another one.
    """

    log_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)]
    identity: _Text
    promised_epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)] = 0
    incarnation: Annotated[int, msgspec.Meta(ge=1, le=MAX_INCARNATION)]
    boot_id: _Text
    place: _Text

    @property
    def member(self) -> MemberIncarnation:
        """Replica as a member of an in-sync set."""
        return MemberIncarnation(self.replica_id, self.incarnation)

    def promise(self, epoch: int) -> "ReplicaState":
        """The state in which everything below an epoch is refused; the same one if it is already.

        Raises:
            BrokerNotAvailable: A higher one was promised.
        """
        if epoch < self.promised_epoch:
            raise BrokerNotAvailable(
                f"epoch {epoch} is over for replica {self.replica_id}: it has promised "
                f"{self.promised_epoch}"
            )
        if epoch == self.promised_epoch:
            return self
        return msgspec.structs.replace(self, promised_epoch=epoch)

    def started(self, boot_id: str, place: str, *, syncs: bool, drawn: int) -> "ReplicaState":
        """The state after a start of the process; the same one if nothing changed.

        Args:
            boot_id: Of the machine's start. After another one the page cache is gone.
            place: Of the store. In another one it is a copy, of a time that nobody knows: it lacks
                what came after, and has forgotten what was promised.
            syncs: Records were on the disk before they were acknowledged (SYNC_FLUSH).
            drawn: A random number of ``DRAWN_BITS``.
        """
        if (boot_id, place) == (self.boot_id, self.place):
            return self
        has_lost = place != self.place or not syncs
        now = self.renewed(drawn) if has_lost else self
        return msgspec.structs.replace(now, boot_id=boot_id, place=place)

    def adopted(self, replica_id: int, place: str, *, identity: str) -> "ReplicaState":
        """The state of a replica whose store this is; the same one if it always was.

        Args:
            replica_id: Of the replica, by its settings.
            place: Of its store. In another one it is a copy, which anybody may begin with.
            identity: A new one, for a replica that begins with a copy of another one's store.

        Raises:
            ConfigError: It is another one's store, and no copy.
        """
        if replica_id == self.replica_id:
            return self
        if place == self.place:
            raise ConfigError(
                f"this is the store of replica {self.replica_id}, and broker_id is {replica_id}. "
                f"Begin with a copy of it (store_path_root_dir), or remove {NAME} from it if there "
                f"shall be no replica {self.replica_id} any more"
            )
        return msgspec.structs.replace(self, replica_id=replica_id, identity=identity)

    def renewed(self, drawn: int) -> "ReplicaState":
        """The state of a replica that has lost records, with a random number of ``DRAWN_BITS``."""
        return msgspec.structs.replace(self, incarnation=drawn + 1)


def first_state(
    log_id: int, replica_id: int, *, identity: str, boot_id: str, place: str, drawn: int
) -> ReplicaState:
    """Return a state for a replica that has none. It may have lost one, with promises in it.

    Args:
        log_id: Of its log.
        replica_id: 1 to 64.
        identity: A new one.
        boot_id: Of the machine's start.
        place: Of its store.
        drawn: A random number of ``DRAWN_BITS``, for an incarnation that is none of a lost state.
    """
    return ReplicaState(
        log_id=log_id,
        replica_id=replica_id,
        identity=identity,
        incarnation=drawn + 1,
        boot_id=boot_id,
        place=place,
    )


class _Document(msgspec.Struct, frozen=True):
    version: int
    replica: msgspec.Raw


def encode_replica_state(state: ReplicaState) -> bytes:
    """The document."""
    return msgspec.json.encode(_Document(VERSION, msgspec.Raw(msgspec.json.encode(state))))


def decode_replica_state(document: bytes) -> ReplicaState:
    """Reads the document.

    Raises:
        CorruptRecord: It is none, or of another version.
    """
    try:
        found = msgspec.json.decode(document, type=_Document)
        if found.version != VERSION:
            raise CorruptRecord(f"{NAME} has version {found.version}; this program reads {VERSION}")
        return msgspec.json.decode(found.replica, type=ReplicaState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"{NAME} cannot be decoded: {error}") from error
