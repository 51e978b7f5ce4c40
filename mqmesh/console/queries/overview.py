"""First page, and the readings of charts."""

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


async def overview(visit: Visit, arguments: NoArguments) -> ClusterView:
    """Return the last look at the cluster."""
    return visit.view


async def series(visit: Visit, arguments: ChartArguments) -> SeriesData:
    """Return the points of a chart."""
    book = visit.series or SeriesBook()
    if arguments.chart == "messages":
        of_topic = (arguments.topic,) if arguments.topic else ()
        lines = [
            ("in", ("rocketmq_messages_in_total", *of_topic)),
            ("out", ("rocketmq_messages_out_total", *of_topic)),
        ]
    elif arguments.chart == "lag":
        of_group = (arguments.group,) if arguments.group else ()
        lines = [("lag", ("rocketmq_consumer_lag_messages", *of_group))]
    else:
        disks = visit.readings.disks if visit.readings else {}
        lines = [(node, ("mqmesh_store_disk_used_ratio", node)) for node in sorted(disks)]
    return book.data(lines, day=arguments.span == "day")
