"""Texts of others in a real browser: they are shown, and nothing in them is done."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import msgspec
import pytest
from harness.browser import Browser, open_browser
from harness.console import WELL, ConsoleWorld, serve_console
from harness.console_scene import EMPTY, rows

from mqmesh.console.cluster_view import AlarmView, ClusterReadings, GroupLag, ProcessView, TopicRate
from mqmesh.message import Message
from mqmesh.protocol.admin import QueueStats, TopicStats
from mqmesh.protocol.client_rpc import RunningInfo
from mqmesh.protocol.groups import (
    ConsumerConnection,
    GroupConfig,
    GroupSummary,
    QueueProgress,
)
from mqmesh.protocol.membership import ConsumerData
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.group_admin import GroupProgress, QueueLag

MARKUP = (
    "<script>window.hacked=1</script><img src=x onerror='window.hacked=1' data-evil>"
    "<b hx-get='/evil' hx-trigger='load' data-evil>\"'>&amp;{{ 7*7 }}"
)
CONTROL = "a\x00b\x07c\x1b[31md\x7f\x85e"
BIDI = "txt\u202egpj.exe\u2066x\u200b\ufeff"
LONG = "x<i data-evil>" * 75_000
"""More than 1 MiB."""
HOSTILE = {"markup": MARKUP.replace("/", ""), "control": CONTROL, "bidi": BIDI, "long": LONG[:250]}
UNSEEN = "\x00\x07\x1b\x7f\x85\u202e\u2066\u200b\ufeff"
"""Characters that must be shown as something that people see."""


def unharmed(browser: Browser) -> None:
    """Nothing was done, nothing is hidden, and nobody complains."""
    script = "return [window.hacked || 0, document.querySelectorAll('[data-evil]').length]"
    assert browser.driver.execute_script(script) == [0, 0]
    shown = browser.driver.execute_script("return document.documentElement.textContent")
    assert not set(UNSEEN) & set(shown)
    assert browser.log() == []


def world_of(name: str) -> ConsoleWorld:
    """A cluster in which everything has one name."""
    member = ConsumerConnection(
        name, name, name, True, 900, ConsumerData(name, "CLUSTERING", name, [])
    )
    queue = QueueLag(name, QueueProgress(name, 0, 0, 10, 3, 5, 1, name), 60_000)
    summary = GroupSummary(GroupConfig(name), members=1, lag=7, topics=[name])
    lag = GroupLag(name, 7, 1_000, 1, 0.8)
    running = RunningInfo(name, name, name, 1, {name: name}, [], [], [], [], name)
    view = msgspec.structs.replace(
        WELL,
        processes=[ProcessView(name, name, False)],
        alarms=[AlarmView(name, "critical", name, 1, False, {"consumer_group": name})],
        top_topics=[TopicRate(name, 1.0, 1.0)],
        lagging_groups=[lag],
        disk_node=name,
    )
    return ConsoleWorld(
        {
            "topic_configs": {name: [TopicConfig(name, 8, 8)]},
            "topic_schema": "",
            "topic_stats": {name: TopicStats(name, [QueueStats(0, 10, 30)])},
            "topic_consumers": [name],
            "groups": {name: [summary]},
            "progress": GroupProgress(name, [queue], 2.0, 4, 1, "CLUSTERING", 0),
            "connections": [member],
            "running_info": running,
        },
        view=view,
        readings=ClusterReadings({name: 1.0}, {name: 1.0}, [lag], {name: 0.5}),
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[Browser]:
    """A browser without a console."""
    with open_browser("") as browser:
        yield browser


@pytest.mark.parametrize("kind", HOSTILE)
def test_names_of_all_kinds(plain, kind):
    name = HOSTILE[kind]
    segment = quote(name, safe="")
    with serve_console(world_of(name)) as address:
        plain.address = address
        for path in (
            "/",
            "/topics?kind=all",
            f"/topics/{segment}",
            f"/topics?search={segment}",
            f"/topics/{segment}/settings",
            "/groups",
            f"/groups/{segment}",
            f"/groups/{segment}/member?client_id={segment}",
            f"/groups/{segment}/delete",
            "/api",
        ):
            plain.open(path)
            plain.find("main h1, main h2")
            unharmed(plain)
        plain.driver.get("about:blank")  # it asks no console that has ended


def test_bodies_and_fields_of_real_messages(scene, browser):
    browser.open(f"/topics/{EMPTY}")
    browser.press("Tail", "main")
    browser.wait(lambda: browser.text('[data-test="tail-state"]') == "listening")
    texts = [MARKUP, CONTROL, BIDI, LONG]
    scene.producer.send_batch(
        [
            Message(EMPTY, text.encode(), "t<b>", ["k<i data-evil>"], {"p": text[:100]})
            for text in texts
        ]
    )
    browser.wait(lambda: len(rows(browser, '[data-test="tailed"]')) == len(texts))
    assert MARKUP in rows(browser, '[data-test="tailed"]')[0][-1]
    unharmed(browser)


@contextmanager
def foreign_site(target: str, field: str) -> Iterator[str]:
    """A page of another site, whose form acts at the console; yields its address."""
    page = (
        f"<form method=post action='{target}'><input name=topic value={field}>"
        "<input name=queues value=4><button name=step value=do>Win</button></form>"
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("path", ["/new/topic", "/api/v1/new/topic"])
def test_a_form_of_another_site_changes_nothing(scene, session_of_admin, path):
    browser = session_of_admin
    with foreign_site(scene.address + path, "forged") as other:
        browser.driver.get(other)
        browser.press("Win")
        browser.wait(lambda: "another site" in browser.text("body"))
    assert "forged" not in scene.cli("topic", "list")
    browser.open("/")
    assert browser.test("nav-topics")  # the session is still there
    browser.log()
