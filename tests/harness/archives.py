"""Checks of an archive's tables without Spark, version by version."""

import pyarrow as pa
from deltalake import DeltaTable

PLACE = ["broker", "store_id", "commitlog_offset", "ordinal"]
"""Columns that make a message one for all time."""


class EachOnce:
    """Looks at each version of an archive's tables once, when it is new.

    Attributes:
        rows: Messages of the newest version that was looked at.
    """

    def __init__(self, archive: str) -> None:
        """Looks at nothing yet."""
        self.archive = archive
        self.rows = 0
        self._looked_at = {"messages": -1, "keys": -1}

    def look(self) -> int:
        """Fails if a version has a message or a key twice, or fewer messages than the one before.

        Returns:
            Messages of the newest version.
        """
        for version in self._new("messages"):
            count = _count(version, PLACE)
            assert count >= self.rows, version.version()
            self.rows = count
        for version in self._new("keys"):
            _count(version, [*PLACE, "key"])
        return self.rows

    def check_keys(self) -> None:
        """Fails if the table of keys does not have those of the messages, and no others."""
        wanted = {
            (*[row[name] for name in PLACE], key)
            for row in self._newest("messages", [*PLACE, "keys"]).to_pylist()
            for key in row["keys"]
        }
        found = {
            tuple(row[name] for name in [*PLACE, "key"])
            for row in self._newest("keys", [*PLACE, "key"]).to_pylist()
        }
        assert found == wanted

    def _new(self, name: str) -> list[DeltaTable]:
        place = f"{self.archive}/{name}"
        if not DeltaTable.is_deltatable(place):
            return []
        newest = DeltaTable(place).version()
        versions = range(self._looked_at[name] + 1, newest + 1)
        self._looked_at[name] = newest
        return [DeltaTable(place, version=version) for version in versions]

    def _newest(self, name: str, columns: list[str]) -> pa.Table:
        return DeltaTable(f"{self.archive}/{name}").to_pyarrow_table(columns=columns)


def _count(version: DeltaTable, columns: list[str]) -> int:
    rows = version.to_pyarrow_table(columns=columns)
    different = rows.group_by(columns).aggregate([]).num_rows
    assert rows.num_rows == different, (version.table_uri, version.version())
    return int(rows.num_rows)
