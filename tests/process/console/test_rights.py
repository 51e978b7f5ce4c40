"""All kinds of users at all routes of the console: nothing is done without the right to it."""

from __future__ import annotations

import base64
import datetime
import http.client
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from urllib.parse import urlencode, urlsplit

import msgspec
import pytest
from harness.console_scene import ConsoleScene
from harness.patience import until
from harness.rights import (
    ADMIN,
    INTERNAL,
    PUB,
    SUB_GROUP,
    SUB_TOPIC,
    VIEW,
    Caller,
    callers,
)

from mqmesh.console.app import find_routes
from mqmesh.console.page import ConsoleAction, Route
from mqmesh.protocol.commands import Right
from mqmesh.sdk.admin.access import AccessClient
from mqmesh.sdk.admin.group_admin import GroupAdmin
from mqmesh.security.access_list import AccessList, read_access_list, write_access_list
from mqmesh.security.keys import load_credentials, save_credentials

TOPIC, GROUP = "orders", "billing"
ENOUGH = {
    Right.VIEW: {VIEW},
    Right.VIEW_OWN: {VIEW, SUB_TOPIC, SUB_GROUP},
    Right.ADMIN: {ADMIN},
    Right.ADMIN_OWN: {ADMIN, SUB_TOPIC, SUB_GROUP},
    Right.PUB: {PUB},
    Right.SUB: {SUB_TOPIC, SUB_GROUP},
}
"""Rights with one of which a route may do something."""
NOTHING = (b'"possible":false', b'"ok":false', b'"total":0', b"it needs the right")
"""Parts of answers of which nothing was done, or that say which right is missing to see more."""
REFUSED = {400, 403, 404, 409}
SAMPLE = {
    "topic": TOPIC,
    "group": GROUP,
    "queues": 9,
    "body": "x",
    "target": "billing-v3",
    "retry_max_times": 3,
    "to": "the first message",
    "client_id": "c",
    "chart": "messages",
}
"""Arguments of all routes: what is asked would be done, were it allowed."""
TAIL = "/topics/{topic}/tail"
"""It says in its state that it is refused."""


def let_in(scene: ConsoleScene, caller: Caller) -> None:
    own = load_credentials(scene.admin_keys)
    path = scene.data / "security" / f"may-{caller.name}.toml"
    keys = msgspec.structs.replace(
        caller.credentials,
        namesrv_server_key=own.namesrv_server_key,
        namesrv_addr=own.namesrv_addr,
    )
    save_credentials(path, keys)
    scene.let_in(caller.name, path)


@pytest.fixture(scope="module")
def known(scene) -> list[Caller]:
    """All kinds of users, in the access list and at the console."""
    found = [
        one
        for one in callers(TOPIC, GROUP)
        if one.name != "admin" and one.user is not None and not one.namespace
    ]
    today = datetime.datetime.now(datetime.UTC).date()
    with AccessClient(**scene.keys) as access:
        info = access.access_list()
        former = read_access_list(info.text, "test", today)
        now = AccessList(info.version + 1, [*former.user, *(one.user for one in found)])
        assert access.put_access_list(write_access_list(now), info.version) == []
    for one in found:
        let_in(scene, one)
    return found


def ask(scene: ConsoleScene, name: str, route: Route) -> int:
    """Do or see by JSON what a route is for; returns the status."""
    path = re.sub(r"\{(\w+)\}", lambda found: str(SAMPLE.get(found[1], "x")), route.path)
    path = "/api/v1" + (path if path != "/" else "/overview")
    login = base64.b64encode(f"{name}:{scene.passwords[name]}".encode()).decode()
    headers = {"Authorization": f"Basic {login}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(urlsplit(scene.address).netloc, timeout=60)
    try:
        if isinstance(route, ConsoleAction):
            name_of = TOPIC if path.startswith("/api/v1/topics") else GROUP
            connection.request("POST", path, json.dumps(SAMPLE | {"confirm": name_of}), headers)
        else:
            connection.request("GET", f"{path}?{urlencode(SAMPLE)}", None, headers)
        answer = connection.getresponse()
        shown = answer.read()
        is_empty = "/export." in route.path and shown.count(b"\n") <= 1
        is_nothing = is_empty or any(one in shown for one in NOTHING)
        return HTTPStatus.CONFLICT if is_nothing else answer.status
    finally:
        connection.close()


def test_nothing_is_done_or_seen_without_a_right(scene, known):
    routes = [one for one in find_routes() if one.right in ENOUGH and one.path != TAIL]
    about = next(one for one in find_routes() if one.path == "/about")
    with GroupAdmin(**scene.keys) as admin, ThreadPoolExecutor(4) as pool:

        def state():
            return admin.topic_configs(), admin.topic_stats(TOPIC), sorted(_offsets(admin))

        until(lambda: admin.progress(GROUP).lag == 0)  # its members commit now and then
        before = state()
        pairs = [
            (one.name, route)
            for one in known
            for route in routes
            # Processes of the cluster may read all that brokers have.
            if not one.holds & ENOUGH[route.right]
            and (INTERNAL not in one.holds or isinstance(route, ConsoleAction))
        ]
        for one in known:
            until(lambda name=one.name: ask(scene, name, about) == 200)
        statuses = pool.map(lambda pair: ask(scene, *pair), pairs)
        wrong = [
            (name, route.path, status)
            for (name, route), status in zip(pairs, statuses, strict=True)
            if status not in REFUSED
        ]
        assert wrong == []
        assert len(pairs) > 100
        assert state() == before


def _offsets(admin: GroupAdmin) -> Iterator[tuple[str, int, int]]:
    for one in admin.progress(GROUP).queues:
        yield one.progress.topic, one.progress.queue_id, one.progress.consumer_offset
