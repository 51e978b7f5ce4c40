"""All routes: each has a right, needs a session, and turns errors into sentences."""

from __future__ import annotations

import re

import pytest
from harness.console import ConsoleWorld, open_console, users_of

from mqmesh.console.app import find_routes
from mqmesh.console.page import ConsoleAction, ConsoleDownload, ConsolePage
from mqmesh.errors import NoPermission, RequestTimeout

RIGHTS = {
    "/": "view",
    "/about": "none",
    "/access": "view",
    "/access/audit": "admin",
    "/access/check": "view",
    "/access/users/{name}": "view",
    "/access/users/{name}/add-key": "admin",
    "/access/users/{name}/change": "admin",
    "/access/users/{name}/delete": "admin",
    "/access/users/{name}/delete-rule": "admin",
    "/access/users/{name}/remove-key": "admin",
    "/access/users/{name}/rule": "admin",
    "/api": "none",
    "/archive": "view",
    "/archive/find": "SUB",
    "/clients": "view",
    "/cluster": "view",
    "/cluster/export": "view",
    "/cluster/import": "admin",
    "/cluster/probe": "admin",
    "/cluster/{broker_name}/change": "admin",
    "/cluster/{broker_name}/drain": "admin",
    "/cluster/{broker_name}/pause": "admin",
    "/cluster/{broker_name}/resume": "admin",
    "/cluster/{broker_name}/settings": "view",
    "/cluster/{broker_name}/switch-over": "admin",
    "/cluster/{broker_name}/undrain": "admin",
    "/dead-letters": "view",
    "/dead-letters/{group}": "admin or SUB",
    "/dead-letters/{group}/export.csv": "admin or SUB",
    "/dead-letters/{group}/export.jsonl": "admin or SUB",
    "/dead-letters/{group}/purge": "admin",
    "/dead-letters/{group}/resend": "admin or SUB",
    "/delayed": "admin",
    "/delayed/{message_id}/cancel": "PUB",
    "/gateway": "view",
    "/groups": "view",
    "/groups/{group}": "view or SUB",
    "/groups/{group}/clone": "admin",
    "/groups/{group}/delete": "admin",
    "/groups/{group}/member": "admin",
    "/groups/{group}/pause": "admin",
    "/groups/{group}/reset": "admin or SUB",
    "/groups/{group}/resume": "admin",
    "/groups/{group}/settings": "admin",
    "/groups/{group}/skip": "admin or SUB",
    "/kv": "view",
    "/kv/delete": "admin",
    "/kv/put": "admin",
    "/messages": "SUB",
    "/messages/{message_id}": "SUB",
    "/messages/{message_id}/body": "SUB",
    "/messages/{message_id}/hand-to": "admin",
    "/namesrv/change": "admin",
    "/namesrv/settings": "view",
    "/new/group": "admin",
    "/new/snapshot": "admin",
    "/new/topic": "admin",
    "/new/user": "admin",
    "/series": "view",
    "/tables": "view",
    "/tables/{topic}": "SUB",
    "/tables/{topic}/key": "SUB",
    "/topics": "view",
    "/topics/{topic}": "view",
    "/topics/{topic}/delete": "admin",
    "/topics/{topic}/send": "PUB",
    "/topics/{topic}/settings": "admin",
    "/topics/{topic}/tail": "SUB",
    "/transactions": "view",
    "/transactions/{message_id}": "admin",
    "/transactions/{message_id}/commit": "admin",
    "/transactions/{message_id}/rollback": "admin",
}
"""Right of each route: a route without a row fails."""

ROUTES = find_routes()
PAGES = [one for one in ROUTES if isinstance(one, ConsolePage)]
ACTIONS = [one for one in ROUTES if isinstance(one, ConsoleAction)]


def path_of(route):
    return re.sub(r"\{.*?\}", "x", route.path)


def test_each_route_has_the_right_that_the_table_says():
    assert {one.path: one.right.value for one in ROUTES} == RIGHTS


def test_no_route_is_taken_by_another_one():
    paths = [one.path for one in ROUTES]
    assert len(paths) == len(set(paths))


def test_titles_name_arguments_of_the_path_only():
    for route in ROUTES:
        named = set(re.findall(r"\{(\w+)\}", route.path))
        assert set(re.findall(r"\{(\w+)\}", route.title)) <= named
        assert named <= set(route.arguments.__struct_fields__)


@pytest.mark.parametrize("route", ROUTES, ids=lambda one: one.path)
def test_nobody_gets_in_without_a_session(route):
    world = ConsoleWorld()
    client = open_console(world, users_of("admin"))
    answer = client.get(path_of(route), follow_redirects=False)
    if getattr(route, "template", "x") or isinstance(route, ConsoleAction):
        assert answer.status_code == 303
        assert answer.headers["location"].startswith("/login?next=")
    api = "/overview" if route.path == "/" else path_of(route)
    assert client.get("/api/v1" + api).status_code in (401, 405)
    assert world.calls == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda one: one.path)
@pytest.mark.parametrize(
    ("failure", "status"), [(NoPermission("not for you"), 403), (RequestTimeout("silence"), 504)]
)
def test_an_error_of_the_cluster_is_a_sentence(route, failure, status):
    world = ConsoleWorld()
    world.failure, world.sees_all = failure, status != 403
    client = open_console(world)
    answer = client.get(path_of(route), params=SAMPLE.get(route.path, {}))
    if world.calls and not isinstance(route, ConsoleAction):
        assert answer.status_code == status
        assert str(failure) in answer.text
    assert answer.status_code != 500


SAMPLE = {"/series": {"chart": "messages"}, "/groups/{group}/member": {"client_id": "c"}}


@pytest.mark.parametrize("route", ACTIONS, ids=lambda one: one.path)
def test_a_console_that_only_shows_refuses_each_action(route):
    world = ConsoleWorld()
    client = open_console(world, read_only=True)
    assert client.get(path_of(route)).status_code == 403
    assert client.post(path_of(route), data={"step": "do"}).status_code == 403
    answer = client.post("/api/v1" + path_of(route), json={})
    assert answer.status_code == 403
    assert "read_only" in answer.json()["error"]
    assert world.calls == []


@pytest.mark.parametrize("route", ACTIONS, ids=lambda one: one.path)
def test_an_action_without_the_token_of_the_session_is_refused(route):
    world = ConsoleWorld()
    client = open_console(world)
    for form in ({"step": "do"}, {"step": "do", "csrf": "of another session"}):
        answer = client.post(path_of(route), data=form)
        assert answer.status_code == 403
    assert world.calls == []


@pytest.mark.parametrize("route", PAGES, ids=lambda one: one.path)
def test_only_the_whole_cluster_s_users_get_what_the_console_itself_saw(route):
    if route.needs_view:
        world = ConsoleWorld()
        world.sees_all = False
        answer = open_console(world).get(path_of(route), params=SAMPLE.get(route.path, {}))
        assert answer.status_code in (403, 404)


def test_downloads_have_a_fixed_name():
    for one in ROUTES:
        if isinstance(one, ConsoleDownload):
            assert re.fullmatch(r"[a-z0-9.-]+", one.filename)
