"""Large clusters and many tabs: pages stay small, and brokers are asked once."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from harness.console import ConsoleWorld, open_console

from mqmesh.console.cluster_view import ClusterReadings, GroupLag
from mqmesh.protocol.groups import GroupConfig, GroupSummary
from mqmesh.protocol.route import TopicConfig

TOPICS, GROUPS = 10_000, 1_000
ROWS = 50
FIRST_PAGE_S = 1.0
TABS = 50
TICK = {"HX-Request": "true", "HX-Target": "live"}


@pytest.fixture(scope="module")
def world():
    topics = [TopicConfig(f"topic-{number:05}", 8, 8) for number in range(TOPICS)]
    groups = [
        GroupSummary(GroupConfig(f"group-{number:04}"), members=1, lag=number, topics=["topic-1"])
        for number in range(GROUPS)
    ]
    lags = [GroupLag(one.config.group, one.lag, 1_000, 1, 0.0) for one in groups]
    rates = {one.topic: 1.0 for one in topics}
    answers = {"topic_configs": {"broker-a": topics}, "groups": {"broker-a": groups}}
    return ConsoleWorld(answers, readings=ClusterReadings(rates, rates, lags, {}))


@pytest.mark.parametrize(
    ("path", "total", "first"),
    [("topics", TOPICS, "topic-00049"), ("groups", GROUPS, "group-0049")],
)
def test_tables_come_by_pages_within_a_second(world, path, total, first):
    client = open_console(world)
    client.get(f"/{path}")  # templates are compiled
    world.clock.advance(10_000)
    began = time.process_time()
    asked = {"sort": f"-{path[:-1]}", "page": total // ROWS}
    page = client.get(f"/{path}", params=asked).text
    assert time.process_time() - began < FIRST_PAGE_S
    assert page.count(f'<tr data-test="{path[:-1]}-') == ROWS
    assert f'<tr data-test="{path[:-1]}-{first}"' in page
    assert f"page {total // ROWS} of {total // ROWS}" in page
    assert len(page) < 100_000


def test_fifty_tabs_ask_no_more_than_one(world):
    client = open_console(world)

    def asked(tabs: int) -> Counter[str]:
        world.clock.advance(10_000)
        world.calls.clear()
        for _ in range(tabs):
            client.cookies.clear()  # each has a session of its own
            for path in ("/", "/topics", "/groups"):
                assert client.get(path, headers=TICK).status_code == 200
        return Counter(method for _, method, _, _ in world.calls)

    assert asked(TABS) == asked(1) == {"topic_configs": 1, "groups": 1}
