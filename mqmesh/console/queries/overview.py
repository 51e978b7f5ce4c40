"""First page, and the figures of charts."""

from typing import Literal

import msgspec

from mqmesh.console.cluster_view import ClusterView
from mqmesh.console.page import NoArguments, Text, Visit
from mqmesh.console.series import SeriesBook, SeriesData


class ChartArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a chart.

    Attributes:
        chart: ``messages``: in and out a second, of a topic if it is named; ``lag``: messages not
            done, of a group if it is named; ``disk``: used share of each broker's disk.
        topic: Of ``messages``.
        group: Of ``lag``.
        span: The last hour, or the last day.
    """

    chart: Literal["messages", "lag", "disk"]
    topic: Text = ""
    group: Text = ""
    span: Literal["hour", "day"] = "hour"


async def overview(visit: Visit, asked: NoArguments) -> ClusterView:
    """Return the last look at the cluster."""
    return visit.view


async def series(visit: Visit, asked: ChartArguments) -> SeriesData:
    """Return the points of a chart."""
    book = visit.series or SeriesBook()
    if asked.chart == "messages":
        of_topic = (asked.topic,) if asked.topic else ()
        lines = [
            ("in", ("rocketmq_messages_in_total", *of_topic)),
            ("out", ("rocketmq_messages_out_total", *of_topic)),
        ]
    elif asked.chart == "lag":
        of_group = (asked.group,) if asked.group else ()
        lines = [("lag", ("rocketmq_consumer_lag_messages", *of_group))]
    else:
        disks = visit.figures.disks if visit.figures else {}
        lines = [(node, ("mqmesh_store_disk_used_ratio", node)) for node in sorted(disks)]
    return book.data(lines, day=asked.span == "day")
