"""A driver that tests kill: streams a topic into a Delta table and into another topic.

usage: live_job.py NAMESRV FOLDER [MASTER]
It prints a line for each batch, and ends when all that was there at its start has arrived.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mqmesh.spark.session import session

MOST = "700"
"""Messages of a batch, so that there are some to be killed in."""


def main(namesrv: str, folder: str, master: str = "") -> None:
    """Runs both queries until the topic's end."""
    extra = {}
    if master:
        extra = {
            "spark.cores.max": "2",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
        }
    spark = session(master=master, memory="512m", cores=2, is_short=True, extra=extra)
    source = (
        spark.readStream.format("mqmesh")
        .option("namesrv", namesrv)
        .option("subscribe", "orders")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", MOST)
        .load()
    )
    root = Path(folder)
    table = (
        source.writeStream.format("delta")
        .option("checkpointLocation", str(root / "checkpoint-table"))
        .start(str(root / "table"))
    )
    topic = (
        source.writeStream.format("mqmesh")
        .option("namesrv", namesrv)
        .option("topic", "copies")
        .option("checkpointLocation", str(root / "checkpoint-topic"))
        .start()
    )
    print("STARTED", flush=True)
    while True:
        for query in (table, topic):
            query.processAllAvailable()
        print("ALL", flush=True)
        if sys.stdin.readline().strip() != "more":
            break
    for query in (table, topic):
        query.stop()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
