"""``archive.toml`` of an archive: topics that it leaves out, and how long it keeps others."""

from pathlib import Path
from typing import Annotated, Final

import msgspec

from mqmesh.config import load_config
from mqmesh.units import MIB

from .selection import fits

NAME: Final = "archive.toml"
_Days = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Topic = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class ArchiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of an archive.

    Attributes:
        leave_out: Topics that are not taken in: names, or beginnings with ``*`` behind.
        expire_days: Days for which messages of a topic are kept, 1 to 100,000, by its name or its
            beginning with ``*`` behind; the longest that fits counts. Others are kept.
        change_data_feed: Have Delta Lake keep which messages were added and deleted, for readers of
            changes. An ingest turns it on; it is turned off by Delta Lake's own means.
        file_bytes: Size of the files that ``compact`` makes, 1 MiB to 4 GiB.
    """

    leave_out: Annotated[list[_Topic], msgspec.Meta(max_length=10_000)] = []
    expire_days: dict[_Topic, _Days] = {}
    change_data_feed: bool = False
    file_bytes: Annotated[int, msgspec.Meta(ge=MIB, le=4096 * MIB)] = 256 * MIB

    def days_of(self, topic: str) -> int | None:
        """Days for which messages of a topic are kept; None for ever."""
        wanted = [name for name in self.expire_days if fits(topic, name)]
        return self.expire_days[max(wanted, key=len)] if wanted else None


def load_settings(archive: str) -> ArchiveConfig:
    """Reads the settings of an archive, defaults where it has none, or is not on this machine.

    Raises:
        ConfigError: The file is wrong.
    """
    path = None if "://" in archive else Path(archive) / NAME
    return load_config(ArchiveConfig, path if path is not None and path.is_file() else None)
