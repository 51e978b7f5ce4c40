"""Jobs on a broker itself: its state, statistics and settings, and what may be cleaned up."""

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from mqmesh.errors import BrokerError
from mqmesh.metrics import MetricReading, Readings
from mqmesh.protocol.admin import (
    CleanRequest,
    CleanResult,
    ConfigChanges,
    ConfigEntries,
    GetConfigRequest,
    RuntimeInfo,
    RuntimeInfoRequest,
    UpdateConfigRequest,
)
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.remoting.admin_bodies import StatsBody, StatsItemBody, TableBody
from mqmesh.protocol.remoting.codes import VERSION, RemotingCode
from mqmesh.roles.gateway.admin.jobs import Job, JobAnswer, JobHandler
from mqmesh.roles.gateway.admin.settings import (
    encode_properties,
    mqmesh_settings,
    parse_properties,
    rocketmq_settings,
)
from mqmesh.version import VERSION as MQMESH_VERSION

_STATS: Final = {
    "TOPIC_PUT_NUMS": ("topic_put_messages_per_s", "topic_put_messages_today"),
    "GROUP_GET_NUMS": ("group_get_messages_per_s", "group_get_messages_today"),
}
"""Metrics of RocketMQ's statistics: a second, and today."""
_POOLS: Final = ("send", "pull", "litePull", "query", "ack")


class BrokerJobs:
    """Jobs on the broker itself that RocketMQ's brokers do.

    Args:
        wall_ms: Wall clock.
    """

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms

    def jobs(self) -> Mapping[int, JobHandler]:
        """Return the jobs by request code."""
        return {
            RemotingCode.GET_BROKER_RUNTIME_INFO: self._state,
            RemotingCode.VIEW_BROKER_STATS_DATA: self._stats,
            RemotingCode.GET_BROKER_CONFIG: self._settings,
            RemotingCode.UPDATE_BROKER_CONFIG: self._change_settings,
            RemotingCode.DELETE_EXPIRED_COMMITLOG: self._clean,
            RemotingCode.CLEAN_EXPIRED_CONSUMEQUEUE: _nothing_to_clean,
            RemotingCode.CLEAN_UNUSED_TOPIC: _nothing_to_clean,
        }

    async def _state(self, job: Job) -> JobAnswer:
        return JobAnswer(TableBody(runtime_table(await _read_metrics(job), self._wall_ms())))

    async def _stats(self, job: Job) -> JobAnswer:
        name, key = job.text("statsName"), job.text("statsKey")
        per_s, today = _STATS.get(name, ("", ""))
        labels = tuple(key.split("@"))
        if not per_s or len(labels) != (2 if name == "GROUP_GET_NUMS" else 1):
            raise BrokerError(
                f"The stats <{name}> <{key}> not exist; of mqmesh's brokers there are "
                f"{' and '.join(_STATS)}, and `mqmesh metrics` has more"
            )
        readings = await _read_metrics(job)
        rate, count = (readings.number(one, *labels, default=0) for one in (per_s, today))
        return JobAnswer(
            StatsBody(
                StatsItemBody(int(rate * 60), rate), StatsItemBody(), StatsItemBody(int(count))
            )
        )

    async def _settings(self, job: Job) -> JobAnswer:
        entries = (await _read_settings(job)).entries
        values = {one.key: _text(msgspec.json.decode(one.value)) for one in entries}
        return JobAnswer(encode_properties(rocketmq_settings(values)), {"version": "{}"})

    async def _change_settings(self, job: Job) -> JobAnswer:
        wanted = parse_properties(job.request.body)
        settings = mqmesh_settings(wanted, (await _read_settings(job)).entries)
        code = RequestCode.UPDATE_BROKER_CONFIG
        await job.ask(code, UpdateConfigRequest(settings), ConfigChanges)
        return JobAnswer()

    async def _clean(self, job: Job) -> JobAnswer:
        await job.ask(RequestCode.DELETE_EXPIRED_COMMITLOG, CleanRequest(), CleanResult)
        return JobAnswer()


async def _nothing_to_clean(job: Job) -> JobAnswer:
    """Answer that all is clean: mqmesh keeps no queues of topics that are gone."""
    return JobAnswer()


async def _read_settings(job: Job) -> ConfigEntries:
    return await job.ask(RequestCode.GET_BROKER_CONFIG, GetConfigRequest(), ConfigEntries)


async def _read_metrics(job: Job) -> Readings:
    found: list[MetricReading] = []
    header = RuntimeInfoRequest()
    while True:
        page = await job.ask(RequestCode.GET_BROKER_RUNTIME_INFO, header, RuntimeInfo)
        if header.listing and page.listing != header.listing:
            found = []  # the broker has forgotten the place, and began anew
        found += page.metrics
        if page.next_place < 0:
            return Readings(found)
        header = RuntimeInfoRequest(page.listing, page.next_place)


def runtime_table(readings: Readings, wall_ms: int) -> dict[str, str]:
    """Return the state of a broker by RocketMQ's names of 4 and 5.

    Args:
        readings: Metrics of the broker. Values that mqmesh does not have, such as those of thread
            pools, are 0: nothing waits there.
        wall_ms: Wall clock.
    """

    def number(name: str) -> float:
        return readings.number(name, default=0)

    def three(value: float) -> str:
        return " ".join([f"{value:.2f}"] * 3)  # of the last ten seconds, one and ten minutes

    table = {
        "brokerActive": "true",
        "brokerVersion": str(VERSION),
        "brokerVersionDesc": f"mqmesh {MQMESH_VERSION}",
        "bootTimestamp": f"{wall_ms - number('uptime_ms'):.0f}",
        "runtime": f"{number('uptime_ms') / 1_000:.0f} s",
        "putMessageTimesTotal": f"{number('put_messages_total'):.0f}",
        "putMessageSizeTotal": f"{number('put_bytes_total'):.0f}",
        "putMessageAverageSize": str(
            number("put_bytes_total") / max(number("put_messages_total"), 1)
        ),
        "commitLogMinOffset": f"{number('store_min_commitlog_offset'):.0f}",
        "commitLogMaxOffset": f"{number('store_max_commitlog_offset'):.0f}",
        "commitLogDiskRatio": str(number("store_disk_used_percent") / 100),
        "consumeQueueDiskRatio": str(number("store_disk_used_percent") / 100),
        "earliestMessageTimeStamp": f"{number('store_oldest_timestamp'):.0f}",
        "dispatchBehindBytes": f"{number('index_lag_bytes'):.0f}",
        "remainHowManyDataToFlush": f"{number('store_flush_behind_bytes'):.0f} B",
        "putTps": three(number("put_messages_per_s")),
        "timerOffsetBehind": f"{max(number('schedule_pending'), 0):.0f}",
        "timerEnqueueTps": "0.0",
        "timerDequeueTps": "0.0",
    }
    for name in "getFoundTps", "getTotalTps", "getTransferedTps", "getTransferredTps":
        table[name] = three(number("get_messages_per_s"))
    table["getMissTps"] = three(0)
    for way, metric in ("Put", "put_messages"), ("Get", "get_messages"):
        # Tools show their differences: the messages of yesterday, and those of today.
        yesterday = number(f"{metric}_yesterday")
        table |= {
            f"msg{way}TotalYesterdayMorning": "0",
            f"msg{way}TotalTodayMorning": f"{yesterday:.0f}",
            f"msg{way}TotalTodayNow": f"{yesterday + number(f'{metric}_today'):.0f}",
        }
    for pool in _POOLS:
        table |= dict.fromkeys(
            (f"{pool}ThreadPoolQueueSize", f"{pool}ThreadPoolQueueHeadWaitTimeMills"), "0"
        )
        table[f"{pool}ThreadPoolQueueCapacity"] = "10000"
    zeros = ("pageCacheLockTimeMills", "timerReadBehind", "timerCongestNum")
    table |= dict.fromkeys((*zeros, "remainTransientStoreBufferNumbs"), "0")
    return table


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ";".join(map(str, value))
    return str(value)
