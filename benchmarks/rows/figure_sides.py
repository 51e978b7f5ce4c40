"""Sides of the rows about figures: what it costs a broker to tell them."""

import re
import time
from typing import Final
from urllib.request import urlopen

import msgspec

from mqmesh.batch.record_batch import encode_batch
from mqmesh.message import Message
from mqmesh.producer_key import producer_id_of
from mqmesh.protocol.admin import UpdateTopicRequest
from mqmesh.protocol.command import encode_header
from mqmesh.protocol.commands import RequestCode
from mqmesh.protocol.messaging import encode_send
from mqmesh.protocol.pulling import PullRequest, QueueOffsetEntry, UpdateConsumerOffsetRequest
from mqmesh.protocol.route import TopicConfig
from mqmesh.transport.zmq import sockets
from mqmesh.transport.zmq.channel import BlockingChannel
from rows.processes import Child, Crew
from rows.sides import Cluster, Conditions, Load, Sample, new_crew

SCRAPES: Final = 5
_KEY: Final = b"key of benchmark"
_ASK_MS: Final = 10_000
_MANY_GROUPS: Final = "auto_groups_per_minute=100000"
_LONGEST: Final = re.compile(r'^mqmesh_command_longest_seconds{.*request_code="(\w+)"} (\S+)$')


def product_scrape(topics: int, conditions: Conditions) -> Sample:
    """An exporter tells of a broker whose topics have a message, and a group that got it.

    The value is what the longest turn of the broker's loop took for that, in ms.
    """
    count = conditions.count(topics)
    with new_crew(conditions) as crew:
        cluster = Cluster(crew, Load(messages=1), conditions, [_MANY_GROUPS])
        _fill(cluster, count)
        exporter, page = _exporter(crew, cluster)
        walls_ms, used_s = [], []
        for _ in range(SCRAPES):
            before, began = exporter.usage().cpu_s, time.monotonic()
            text = _scrape(page)
            walls_ms.append((time.monotonic() - began) * 1_000)
            used_s.append(exporter.usage().cpu_s - before)
        longest = _longest_ms(text)
        told = [longest[code] for code in ("get_broker_runtime_info", "get_groups_progress")]
        sample = Sample(value=max(told), message_count=count)
        sample.extra["figures_ms"], sample.extra["progress_ms"] = told
        sample.extra["scrape_ms"] = sorted(walls_ms)[SCRAPES // 2]
        sample.extra["exporter_cpu_s"] = sorted(used_s)[SCRAPES // 2]
        sample.extra["series"] = sum(not line.startswith("#") for line in text.splitlines())
        return cluster.memory(sample)


def _fill(cluster: Cluster, count: int) -> None:
    """A topic of four queues with a message, a group that got it, and an offset, so many times."""
    context = sockets.new_context()
    channel = BlockingChannel(context, f"tcp://{cluster.endpoint}")

    def ask(code: RequestCode, header: msgspec.Struct | bytes, *body: bytes) -> None:
        data = header if isinstance(header, bytes) else encode_header(header)
        channel.request(code, *body, header=data, timeout_ms=_ASK_MS)

    for number in range(count):
        topic, group = f"topic-{number}", f"group-{number}"
        ask(RequestCode.UPDATE_AND_CREATE_TOPIC, UpdateTopicRequest(TopicConfig(topic)))
        batch = encode_batch(
            [Message(topic, bytes(128))],
            topic=topic,
            queue_id=0,
            producer_id=producer_id_of(_KEY),
            first_sequence=number,
            born_timestamp=1,
        )
        ask(RequestCode.SEND_MESSAGE, encode_send(_ASK_MS, 1, _KEY), batch)
        ask(RequestCode.PULL_MESSAGE, PullRequest(group, topic, 0, 0))
        done = [QueueOffsetEntry(topic, 0, 0)]
        ask(RequestCode.UPDATE_CONSUMER_OFFSET, UpdateConsumerOffsetRequest(group, "bench", done))
    channel.close()
    context.destroy(linger=0)


def _exporter(crew: Crew, cluster: Cluster) -> tuple[Child, str]:
    settings = [f'namesrv_addr=["{cluster.namesrv}"]', "listen_port=0", "min_interval_ms=0"]
    return crew.role("exporter", settings)


def _scrape(page: str) -> str:
    with urlopen(page) as answer:
        text: str = answer.read().decode()
    return text


def _longest_ms(text: str) -> dict[str, float]:
    found = filter(None, map(_LONGEST.match, text.splitlines()))
    return {one[1]: float(one[2]) * 1_000 for one in found}
