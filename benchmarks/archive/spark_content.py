"""Has Spark count and hash the orders of a snapshot: ``python spark_content.py SNAPSHOT``.

Prints the number, the hash, and the seconds of the session's start and of the query.
"""

import json
import sys
import time
from typing import Final

from figures import HASH_DIGITS
from orders import TOPIC

from mqmesh.spark.session import session

_PLACE: Final = "encode(format_string('%d/%d/', commitlog_offset, ordinal), 'UTF-8')"
_DIGITS: Final = f"substring(md5(concat({_PLACE}, body)), 1, {HASH_DIGITS})"
HASH: Final = f"bit_xor(cast(conv({_DIGITS}, 16, 10) AS bigint))"


def main(path: str) -> None:
    """Reads the snapshot."""
    began = time.monotonic()
    spark = session()
    started = time.monotonic()
    rows = spark.read.format("mqmesh").option("topics", TOPIC).load(path)
    found = rows.selectExpr("count(*)", HASH).collect()[0]
    ended = time.monotonic()
    spark.stop()
    print(json.dumps([found[0], found[1], started - began, ended - started]))


if __name__ == "__main__":
    main(sys.argv[1])
