"""The gate: hosts, origins, sessions, logins, sizes, clusters, proxies."""

from __future__ import annotations

import base64
import re

import pytest
from harness.console import PASSWORD, ConsoleWorld, access_list_of, open_console, users_of

from mqmesh.console.users import UsersFile


@pytest.fixture(scope="module")
def users():
    return users_of("admin", "viewer")


def basic(name, password=PASSWORD):
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8082", "", "127.0.0.1.evil.example"]
)
def test_another_host_is_refused(host):
    answer = open_console(ConsoleWorld()).get("/", headers={"Host": host})
    assert answer.status_code == 400
    assert "hosts" in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:8082", "localhost:8082", "[::1]:8082", "mq.example"])
def test_own_names_are_known(host):
    client = open_console(ConsoleWorld(), hosts=["mq.example"])
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_change_from_another_site_is_refused(headers):
    world = ConsoleWorld()
    client = open_console(world)
    csrf = client.csrf("/new/topic")
    assert client.post("/new/topic", data={"csrf": csrf}, headers=headers).status_code == 403
    assert world.calls == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://127.0.0.1:8082", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "null", "Sec-Fetch-Site": "same-origin"},
    ],
)
def test_a_change_of_our_own_pages_is_taken(headers):
    client = open_console(ConsoleWorld())
    csrf = client.csrf("/new/topic")
    assert client.post("/new/topic", data={"csrf": csrf}, headers=headers).status_code == 400


def test_a_program_must_name_json():
    client = open_console(ConsoleWorld())
    path = "/api/v1/topics/orders/delete"
    assert (
        client.post(path, content="{}", headers={"Content-Type": "text/plain"}).status_code == 403
    )
    assert (
        client.post(path, content="no", headers={"Content-Type": "application/json"})
        .json()["error"]
        .startswith("the body is no JSON object")
    )


def test_a_large_body_is_refused_however_it_is_sent():
    client = open_console(ConsoleWorld())
    csrf = client.csrf("/new/topic")
    large = "x" * (1 << 20)
    assert client.act("/new/topic", csrf, topic=large).status_code == 413

    def parts():
        for _ in range(20):
            yield b"x" * (1 << 16)

    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/new/topic", content=parts(), headers=kind).status_code == 413


def test_without_users_everybody_acts_by_the_console_s_credentials():
    world = ConsoleWorld({"topic_configs": {}})
    open_console(world, credentials="console.toml").get("/topics")
    assert {call[0] for call in world.calls} == {"console.toml"}


def test_who_logs_in_acts_by_own_credentials(users):
    world = ConsoleWorld({"topic_configs": {}})
    client = open_console(world, users)
    assert client.get("/topics", follow_redirects=False).headers["location"] == (
        "/login?next=%2Ftopics"
    )
    client.log_in("viewer")
    assert client.get("/topics").status_code == 200
    assert {call[0] for call in world.calls} == {"viewer"}
    client.post("/logout", data={"csrf": client.csrf("/")})
    assert client.get("/topics", follow_redirects=False).status_code == 303


def test_the_cookie_is_for_this_site_and_no_script(users):
    client = open_console(ConsoleWorld(), users)
    form = {"name": "admin", "password": PASSWORD}
    cookie = client.post("/login", data=form, follow_redirects=False).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Secure" not in cookie


def test_a_login_goes_on_at_a_page_of_this_console_only(users):
    for wanted, went in [
        ("/topics?kind=all", "/topics?kind=all"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("", "/"),
    ]:
        client = open_console(ConsoleWorld(), users)
        form = {"name": "admin", "password": PASSWORD, "next": wanted}
        answer = client.post("/login", data=form, follow_redirects=False)
        assert answer.headers["location"] == went


def test_five_wrong_passwords_a_minute_are_enough(users):
    world = ConsoleWorld()
    client = open_console(world, users)
    for _ in range(5):
        answer = client.post("/login", data={"name": "admin", "password": "wrong horse"})
        assert "user or password is wrong" in answer.text
    right = {"name": "admin", "password": PASSWORD}
    assert "wait a minute" in client.post("/login", data=right).text
    world.clock.advance(60_001)
    assert client.post("/login", data=right, follow_redirects=False).status_code == 303


def test_a_program_logs_in_with_each_request(users):
    world = ConsoleWorld({"topic_configs": {}})
    client = open_console(world, users)
    answer = client.get("/api/v1/topics")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert client.get("/api/v1/topics", headers=basic("viewer")).json()["total"] == 0
    assert client.get("/api/v1/topics", headers=basic("viewer", "wrong")).status_code == 401
    assert client.get("/api/v1/topics", headers={"Authorization": "Bearer x"}).status_code == 401
    assert "set-cookie" not in client.get("/api/v1/topics", headers=basic("viewer")).headers
    assert client.get("/topics", headers=basic("viewer"), follow_redirects=False).status_code == 303


class Changing:
    """Users of whom one may log in no more."""

    def __init__(self, users: UsersFile) -> None:
        self.users = users

    def find(self, name):
        return self.users.find(name)


def test_a_session_ends_with_the_user(users):
    changing = Changing(users)
    client = open_console(ConsoleWorld(), changing)
    client.log_in("admin")
    assert client.get("/").status_code == 200
    changing.users = UsersFile()
    assert client.get("/", follow_redirects=False).status_code == 303


def test_a_lost_session_of_an_open_console_loads_the_page_again():
    client = open_console(ConsoleWorld())
    ticking = {"HX-Request": "true", "HX-Target": "live"}
    assert client.get("/", headers=ticking).headers["hx-refresh"] == "true"
    assert "hx-refresh" not in client.get("/", headers=ticking).headers


def test_a_tick_after_the_session_s_end_goes_to_the_login(users):
    client = open_console(ConsoleWorld(), users)
    answer = client.get("/", headers={"HX-Request": "true", "HX-Target": "live"})
    assert answer.status_code == 401
    assert answer.headers["hx-redirect"] == "/login"


def test_what_has_not_changed_is_not_sent_again():
    client = open_console(ConsoleWorld())
    ticking = {"HX-Request": "true", "HX-Target": "live"}
    client.get("/")
    first = client.get("/", headers=ticking)
    assert "<html" not in first.text
    again = client.get("/", headers=ticking | {"X-Seen": first.headers["x-digest"]})
    assert (again.status_code, again.text) == (204, "")


def test_a_session_asks_a_hundred_times_a_second():
    client = open_console(ConsoleWorld())
    client.get("/")
    assert [client.get("/").status_code for _ in range(100)][-2:] == [200, 429]


def test_a_proxy_shows_the_console_below_a_path():
    world = ConsoleWorld()
    client = open_console(world, base_path="/mq", hosts=["mq.example"])
    client.headers["host"] = "mq.example"
    page = client.get("/mq/").text
    assert 'href="/mq/topics"' in page
    assert '"/mq/static/console.css' in page
    assert client.get("/mq/static/console.css").status_code == 200


def test_a_trusted_proxy_says_who_asks_and_how():
    client = open_console(ConsoleWorld(), trusted_proxies=["testclient"], hosts=["mq.example"])
    told = {"X-Forwarded-Host": "mq.example", "X-Forwarded-Proto": "https"}
    answer = client.get("/", headers=told)
    assert "Secure" in answer.headers["set-cookie"]
    strange = open_console(ConsoleWorld(), hosts=["mq.example"])
    assert "Secure" not in strange.get("/", headers=told).headers["set-cookie"]


def test_what_a_user_may_not_do_is_grey(users):
    world = ConsoleWorld({"topic_configs": {}}, access_list=access_list_of())
    client = open_console(world, users)
    client.log_in("viewer")
    assert re.search(GREY, client.get("/topics").text)
    client = open_console(world, users)
    client.log_in("admin")
    assert not re.search(GREY, client.get("/topics").text)


GREY = r'aria-disabled="true"[^>]*data-test="new-topic"'


def test_health_needs_no_session(users):
    assert open_console(ConsoleWorld(), users).get("/healthz").status_code == 200


def test_an_unknown_cluster_is_no_page():
    assert open_console(ConsoleWorld()).get("/@other/topics").status_code == 404
