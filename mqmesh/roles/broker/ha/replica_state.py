"""What a replica knows of itself for ever: who it is, whom it has promised, what it may have lost.

It is on the disk before anything follows from it: a promise before it is answered, an incarnation
before the replica tells anybody what it has. Pure; the shell has the file.

The document is a JSON object of ``version`` and the fields below (also in
``docs/storage-format.md``). Version 1.
"""

from typing import Annotated, Final

import msgspec

from mqmesh.coordination.interface import MOST_REPLICAS, MemberIncarnation
from mqmesh.errors import BrokerNotAvailable, CorruptRecord
from mqmesh.log_identity import MAX_EPOCH

NAME: Final = "replica-state"
VERSION: Final = 1
MAX_INCARNATION: Final = 2**62

_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. The names of its fields are on disk and never change.

    Attributes:
        log_id: Of the log that it has a copy of.
        replica_id: 1 to 64, given once.
        identity: Drawn once; another store with the same ``replica_id`` has another one.
        promised_epoch: It refuses everything of lower epochs.
        incarnation: Another one than before whenever acknowledged records may be gone.
        boot_id: Of the machine's last start that the replica has seen, see ``mqmesh.host``.
    """

    log_id: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    replica_id: Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)]
    identity: _Text
    promised_epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)] = 0
    incarnation: Annotated[int, msgspec.Meta(ge=1, le=MAX_INCARNATION)]
    boot_id: _Text

    @property
    def member(self) -> MemberIncarnation:
        """As a member of an in-sync set."""
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

    def started(self, boot_id: str, *, syncs: bool, was_damaged: bool) -> "ReplicaState":
        """The state after a start of the process; the same one if nothing changed.

        Args:
            boot_id: Of the machine's start. After another one the page cache is gone.
            syncs: Records were on the disk before they were acknowledged (SYNC_FLUSH).
            was_damaged: Records are missing or damaged that were acknowledged, or the store was put
                back from a backup.
        """
        if boot_id == self.boot_id and not was_damaged:
            return self
        has_lost = was_damaged or not syncs
        return msgspec.structs.replace(
            self, boot_id=boot_id, incarnation=self.incarnation + has_lost
        )


def first_state(
    log_id: int, replica_id: int, *, identity: str, boot_id: str, drawn: int
) -> ReplicaState:
    """Of a replica that has none. It may have had one that is lost, with promises that it forgot.

    Args:
        log_id: Of its log.
        replica_id: 1 to 64.
        identity: A new one.
        boot_id: Of the machine's start.
        drawn: A random number, 0 to 2^48 - 1. Incarnations begin there, so that none of a lost
            state comes again.
    """
    return ReplicaState(
        log_id=log_id,
        replica_id=replica_id,
        identity=identity,
        incarnation=(drawn << 12) + 1,
        boot_id=boot_id,
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
