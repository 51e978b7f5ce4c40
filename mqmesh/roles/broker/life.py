"""Which life of a broker this is: what its generations and lock tokens begin with. Pure.

Consumers compare generations, and the broker compares lock tokens, with those of earlier
lives, so each life must begin above all that an earlier one gave out, whatever the clock
says. So lives are counted, in a document that is saved before anybody is served. The count
is at least the seconds of the clock: where the document was lost, or is an old one that came
with a restored store, it goes on from there.
"""

from typing import Annotated, Final

import msgspec

from mqmesh.errors import CorruptRecord

LIFE_FILE: Final = "life.json"
DOCUMENT_VERSION: Final = 1
MAX_LIFE: Final = (1 << 31) - 2
MAX_CLOCK_S: Final = 2_100_000_000
"""A clock beyond it, in the year 2036, counts for nothing, so that lives do not run out."""


class _LifeDocument(msgspec.Struct, frozen=True):
    version: int
    life: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIFE)]


def next_life(document: bytes | None, wall_ms: int) -> int:
    """The number of the life that begins.

    Args:
        document: What ``dump_life`` wrote in the one before, None if there is nothing.
        wall_ms: Wall clock.

    Returns:
        1 to ``MAX_LIFE``.

    Raises:
        CorruptRecord: The document cannot be read, or lives have run out.
    """
    before = 0
    if document is not None:
        try:
            noted = msgspec.json.decode(document, type=_LifeDocument)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptRecord(f"{LIFE_FILE} cannot be read: {error}") from error
        if noted.version != DOCUMENT_VERSION:
            raise CorruptRecord(
                f"{LIFE_FILE} has version {noted.version}; this broker reads {DOCUMENT_VERSION}"
            )
        before = noted.life
    if before >= MAX_LIFE:
        raise CorruptRecord(f"{LIFE_FILE} counts {before} lives; there are {MAX_LIFE} at most")
    seconds = wall_ms // 1_000
    return max(before + 1, seconds if seconds < MAX_CLOCK_S else 0)


def dump_life(life: int) -> bytes:
    """The document about a life."""
    return msgspec.json.encode(_LifeDocument(DOCUMENT_VERSION, life))


def first_number(life: int) -> int:
    """Below all generations and tokens of a life, and above those of earlier ones."""
    return life << 32
