"""Views of tables of keys and values."""

import base64

import msgspec

from mqmesh.sdk.tables.entries import KvEntry


class KvWriteView(msgspec.Struct, frozen=True):
    """A write to a table.

    Attributes:
        table: Name of the table.
        key: Key that was written, or deleted.
        revision: Its revision since.
    """

    table: str
    key: str
    revision: int


class KvEntryView(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of a key.

    Attributes:
        key: Key.
        revision: Revision.
        stored_ms: When it was stored, ms since 1970.
        operation: PUT, DEL or EXPIRE.
        expires_ms: When the value expires, ms since 1970; 0 for never. Of a tombstone, when it
            goes, or 0.
        value: Text; None if the value is not UTF-8, and of a tombstone.
        value_base64: The value that is not UTF-8.
    """

    key: str
    revision: int
    stored_ms: int
    operation: str
    expires_ms: int
    value: str | None
    value_base64: str | None

    @property
    def shown(self) -> str:
        """The value for people; "" for none."""
        return self.value if self.value is not None else self.value_base64 or ""


def entry_view(entry: KvEntry) -> KvEntryView:
    """Make the view of an entry."""
    text: str | None = None
    binary: str | None = None
    if not entry.is_deleted:
        try:
            text = entry.value.decode()
        except UnicodeDecodeError:
            binary = base64.b64encode(entry.value).decode()
    return KvEntryView(
        key=entry.key,
        revision=entry.revision,
        stored_ms=entry.stored_ms,
        operation=entry.operation.value,
        expires_ms=entry.expires_ms,
        value=text,
        value_base64=binary,
    )
