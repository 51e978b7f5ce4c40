"""Tasks of the console on topics, by a robot in a browser, compared with the command line."""

from __future__ import annotations

import re

from harness.browser import Browser
from harness.console_scene import TOPIC, ConsoleScene, confirm, plan, rows
from selenium.webdriver.common.keys import Keys

from mqmesh.message import Message

TAILED = 50


def queues(scene: ConsoleScene, topic: str) -> list[int]:
    return [one["write_queue_nums"] for one in scene.cli("topic", "route", topic)["queues"]]


def shown_queues(browser: Browser, topic: str) -> list[str]:
    return [row[1] for row in rows(browser, '[data-test="topics"]') if row[0] == topic]


def test_2_to_4_a_topic_is_made_changed_and_deleted(scene, browser):
    browser.open("/topics")
    said = plan(browser, "new-topic", {"Name": "t2", "Queues": "4"})
    assert "Topic t2 is made with 4 queues" in said
    confirm(browser, "Create")
    browser.wait(lambda: shown_queues(browser, "t2") == ["4"])
    assert queues(scene, "t2") == [4]

    browser.press("t2", "main")
    assert "4 more queues" in plan(browser, "settings", {"Queues": "8"})
    confirm(browser, "Apply")
    browser.wait(lambda: len(rows(browser, '[data-test="queues"]')) == 8)
    assert queues(scene, "t2") == [8]

    assert "0 messages are lost" in plan(browser, "delete")
    confirm(browser, "Delete", typed="t2")
    browser.test("topics")
    browser.wait(lambda: shown_queues(browser, "t2") == [])
    assert "t2" not in scene.cli("topic", "list")


def test_a_topic_is_made_by_keyboard_alone(scene, browser):
    browser.open("/topics")
    browser.test("topics")
    _tab_to(browser, lambda one: one.text == "New topic")
    browser.press_keys(Keys.ENTER)
    browser.test("action-form")
    browser.press_keys("t3", Keys.TAB, Keys.CONTROL + "a", Keys.NULL, "2", Keys.ENTER)
    browser.test("plan")
    _tab_to(browser, lambda one: one.text == "Create")
    browser.press_keys(Keys.ENTER)
    browser.test("outcome")
    browser.press_keys(Keys.ENTER)
    browser.wait(lambda: shown_queues(browser, "t3") == ["2"])
    assert queues(scene, "t3") == [2]


def test_5_a_message_is_sent_with_all_its_fields(scene, browser):
    browser.open(f"/topics/{TOPIC}")
    fields = {
        "Body": "by hand",
        "Tag": "new",
        "Keys": "order-hand by-hand",
        "Properties": "price=12",
        "Delay": "2s",
    }
    said = plan(browser, "send", fields)
    assert "is delivered after 2s" in said
    outcome = confirm(browser, "Send")
    found = re.search("message ([0-9A-F]{32})", outcome)
    assert found is not None, outcome

    (stored,) = browser.wait(lambda: scene.cli("query", "by-id", found[1])["messages"])
    assert stored["body"] == "by hand"
    assert stored["tag"] == "new"
    assert stored["keys"] == ["order-hand", "by-hand"]
    assert stored["properties"]["price"] == "12"
    assert stored["topic"] == TOPIC


def test_6_a_tail_shows_what_is_sent_meanwhile_and_leaves_no_group(scene, browser):
    before = [one["group"] for one in scene.cli("group", "list")]
    browser.open(f"/topics/{TOPIC}")
    browser.press("Tail", "main")
    browser.wait(lambda: browser.text('[data-test="tail-state"]') == "listening")
    bodies = [f"tailed {number}" for number in range(TAILED)]
    scene.producer.send_batch([Message(TOPIC, body.encode()) for body in bodies])
    browser.wait(lambda: [row[-1] for row in rows(browser, '[data-test="tailed"]')] == bodies)
    browser.press("Stop", "main")
    browser.wait(lambda: browser.text('[data-test="tail-state"]') == "stopped")
    assert [one["group"] for one in scene.cli("group", "list")] == before


def _tab_to(browser: Browser, wanted) -> None:
    """Go on by the tabulator key until the focus is on what is wanted."""
    for _ in range(100):
        focused = browser.driver.switch_to.active_element
        if wanted(focused):
            return
        browser.press_keys(Keys.TAB)
    raise AssertionError("the keyboard does not get there")
