"""Role of a replica that its settings do not say: the promoted master. Pure.

A follower that an administrator has promoted is the master of its group with every later start,
until somebody removes the document and lets it follow again.
"""

from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptRecord
from mqmesh.log_identity import MAX_EPOCH

ROLE_FILE: Final = "replica.json"
DOCUMENT_VERSION: Final = 1


class ReplicaRole(msgspec.Struct, frozen=True):
    """The role of a replica that was promoted.

    Attributes:
        epoch: That it began as the master.
    """

    epoch: Annotated[int, msgspec.Meta(ge=1, le=MAX_EPOCH)]
    version: int = DOCUMENT_VERSION


def decode_role(document: bytes) -> ReplicaRole:
    """Reads the document.

    Raises:
        CorruptRecord: It is none, or of another version.
    """
    try:
        role = msgspec.json.decode(document, type=ReplicaRole)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptRecord(f"{ROLE_FILE} cannot be read: {error}") from error
    if role.version != DOCUMENT_VERSION:
        raise CorruptRecord(
            f"{ROLE_FILE} has version {role.version}; this broker reads {DOCUMENT_VERSION}"
        )
    return role


def encode_role(role: ReplicaRole) -> bytes:
    """Makes the document."""
    return msgspec.json.encode(role)
