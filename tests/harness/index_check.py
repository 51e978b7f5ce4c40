"""Opens stores with their index and compares the index with the log: for crash tests.

Run as ``python -m harness.index_check [--suspect] DIRECTORY…``; it prints the
name of each directory whose index is right. A damaged environment may end the
process by a signal, which is why this is one.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.indexed_store import IndexedStore


def check(directory: Path, *, suspect: bool) -> None:
    """Brings an index up to its log, then asks it for every key and id there is.

    Args:
        directory: The store's.
        suspect: The process that used the index before died by a fault.
    """
    indexed = IndexedStore(directory, suspect=suspect)
    try:
        # First as it is: lookups shall notice damage.
        indexed.tell()
        for message in indexed.scan()[:20]:
            for key in message.keys:
                indexed.by_key(key, message.info.topic)
        indexed.catch_up()
        for _ in range(2):
            # Parts found damaged by a search are made anew; then all must be right.
            discarded = indexed.index.discarded
            try:
                indexed.check()
            except AssertionError:
                if indexed.index.discarded == discarded:
                    raise
            else:
                if indexed.index.discarded == discarded:
                    return
            indexed.catch_up()
        indexed.check()
    finally:
        indexed.close()


def main(arguments: Sequence[str]) -> int:
    """Checks all directories of the command line; returns the exit code."""
    suspect = "--suspect" in arguments
    for name in arguments:
        if not name.startswith("--"):
            check(Path(name), suspect=suspect)
            sys.stdout.write(f"{name}\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
