"""Trouble while a page is open: it is said within seconds, and the page goes on by itself."""

from __future__ import annotations

import threading

from harness.browser import Browser
from harness.console_scene import EMPTY, FAILING, TOPIC, log_in, rows
from harness.stopwatch import Stopwatch

from mqmesh import Message, PushConsumer

SAYS_S = 5.0
SHOWS_S = 15.0
PATIENCE_S = 60.0


SCHEDULE = "schedule-broker-a"
SILENT = "no name server answers"


def processes(browser: Browser) -> str:
    return browser.text('[data-test="card-processes"]')


def is_up(browser: Browser) -> bool:
    """Return True while all processes answer, also those that died and were started again."""
    return bool(processes(browser)) and "down" not in processes(browser)


def test_a_broker_and_a_schedule_service_that_are_killed(scene, browser):
    browser.open("/")
    browser.wait(lambda: is_up(browser), PATIENCE_S)
    dead = [scene.follower(), SCHEDULE]
    with scene.killed(*dead):
        watch = Stopwatch()
        browser.wait(lambda: "down: " + ", ".join(dead) in processes(browser), PATIENCE_S)
        assert watch.seconds <= SAYS_S
        browser.wait(
            lambda: all(one in browser.text('[data-test="alarms"]') for one in dead), PATIENCE_S
        )
        assert watch.seconds <= SHOWS_S
    browser.wait(lambda: is_up(browser), PATIENCE_S)
    browser.wait(lambda: all(one in processes(browser) for one in dead), PATIENCE_S)


def test_a_name_server_that_is_killed(scene, session_of_admin):
    browser = session_of_admin
    browser.open("/")
    with scene.killed("namesrv-1"):
        watch = Stopwatch()
        browser.wait(lambda: SILENT in browser.text('[data-test="alarms"]'), PATIENCE_S)
        assert watch.seconds <= SAYS_S
        browser.open("/topics")
        assert "503" in browser.text("main") or SILENT in browser.text("main")
    browser.wait(lambda: rows(browser, '[data-test="topics"]'), PATIENCE_S)
    browser.open("/")
    browser.wait(lambda: SILENT not in browser.text("main"), PATIENCE_S)


def test_a_console_that_is_killed(scene, session_of_admin):
    browser = session_of_admin
    browser.open(f"/topics/{TOPIC}")
    with scene.killed("console"):
        watch = Stopwatch()
        browser.wait(lambda: "does not answer" in browser.text("#banner"), PATIENCE_S)
        assert watch.seconds <= SAYS_S
    # Sessions are kept in memory only, so that the page asks who it is.
    browser.wait(lambda: "/login" in browser.driver.current_url, PATIENCE_S)
    log_in(browser, "admin", scene.passwords["admin"])


def test_groups_that_fail_or_are_stuck(scene, browser):
    stuck = PushConsumer("packing", consume_orderly=True, close_timeout_ms=0, **scene.keys)
    release = threading.Event()
    stuck.subscribe(EMPTY, listener=lambda _: release.wait() and None)
    browser.open("/")
    with stuck:
        try:
            scene.producer.send_batch([Message(EMPTY, b"%d" % number) for number in range(3)])
            watch = Stopwatch()
            browser.wait(lambda: "packing" in browser.text('[data-test="alarms"]'), PATIENCE_S)
            assert watch.seconds <= SHOWS_S
            assert FAILING in browser.text('[data-test="alarms"]')
        finally:
            release.set()
