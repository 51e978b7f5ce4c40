"""Counts and hashes what ``mqmesh store dump`` prints, as ``spark_content.py`` has Spark do it."""

import hashlib
import subprocess
from collections.abc import Iterable
from pathlib import Path
from time import monotonic

import msgspec
from commands import MQMESH, Failed
from figures import HASH_DIGITS, Content
from orders import TOPIC


class _Line(msgspec.Struct):
    commitlog_offset: int
    ordinal: int
    body: str


def dumped(store: Path) -> Content:
    """Return the orders in a dump of the store of a directory."""
    began = monotonic()
    command = [MQMESH, "store", "dump", str(store), "--topic", TOPIC, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=store.parent) as process:
        assert process.stdout is not None
        count, hashed = hash_lines(process.stdout)
    if process.returncode:
        raise Failed(f"{' '.join(command)} ended with {process.returncode}; its error stands above")
    return Content(count, hashed, monotonic() - began)


def hash_lines(lines: Iterable[bytes]) -> tuple[int, int]:
    """Number of messages, and a hash over their places and bodies, in no order."""
    decoder = msgspec.json.Decoder(_Line)
    count = hashed = 0
    for line in lines:
        one = decoder.decode(line)
        text = f"{one.commitlog_offset}/{one.ordinal}/{one.body}"
        hashed ^= int(hashlib.md5(text.encode()).hexdigest()[:HASH_DIGITS], 16)
        count += 1
    return count, hashed
