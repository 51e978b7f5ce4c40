"""Tasks of the console on groups, by a robot in a browser, compared with the command line."""

from __future__ import annotations

from harness.browser import Browser
from harness.console_scene import FAILING, READ, TOPIC, UNREAD, ConsoleScene, confirm, plan, rows
from harness.patience import until

BACK = "1h"


def progress(scene: ConsoleScene, group: str) -> dict[int, dict]:
    """Queues of ``TOPIC``, by number."""
    found = scene.cli("group", "progress", group, "--topic", TOPIC)["queues"]
    return {one["queue_id"]: one for one in found if not one["is_retry"]}


def offsets(scene: ConsoleScene, group: str) -> dict[int, int]:
    return {number: one["consumer_offset"] for number, one in progress(scene, group).items()}


def shown_offset(browser: Browser, queue: int) -> str:
    found = [row for row in rows(browser, '[data-test="queues"]') if row[0] == TOPIC]
    return next(row[3] for row in found if row[2] == str(queue))


def moves(scene: ConsoleScene, *words: str) -> list[list[str]]:
    """Table of a plan, as the command line has it."""
    return [
        [
            one["topic"],
            one["broker_name"],
            str(one["queue_id"]),
            *(f"{one[key]:,}" for key in ("old_offset", "new_offset", "reread", "skipped")),
        ]
        for one in scene.cli("group", *words, "--dry-run")["queues"]
    ]


def test_7_groups_are_sorted_by_lag(scene, browser):
    browser.open("/groups")
    browser.press("Lag", "main")

    def shown() -> list[list[str]]:
        return [row[:2] for row in rows(browser, '[data-test="groups"]')]

    def expected() -> list[list[str]]:
        found = sorted(scene.cli("group", "list"), key=lambda one: -one["lag"])
        return [[one["group"], f"{one['lag']:,}"] for one in found]

    browser.wait(lambda: shown()[0][0] == UNREAD and shown() == expected())
    assert progress(scene, UNREAD)[0]["lag"] > 0


def test_8_a_running_group_reads_again(scene, browser):
    until(lambda: scene.cli("group", "progress", READ)["lag"] == 0)
    before = len(scene.delivered())
    browser.open(f"/groups/{READ}")
    said = plan(browser, "reset", {"Topic": TOPIC, "Go on at": "a time", "Time": BACK})
    planned = rows(browser, "#dialog")
    assert planned == moves(scene, "reset-offset", READ, "--topic", TOPIC, "--to-time", BACK)
    again = sum(int(row[5].replace(",", "")) for row in planned)
    assert again >= 1_000
    assert f"{again:,} messages are read again, 0 skipped" in said
    confirm(browser, "Reset")
    until(lambda: len(scene.delivered()) >= before + again)
    until(lambda: scene.cli("group", "progress", READ)["lag"] == 0)
    browser.wait(lambda: browser.text('[data-test="card-lag"] .value') == "0")


def test_9_one_queue_goes_on_at_an_offset(scene, browser):
    before = offsets(scene, UNREAD)
    browser.open(f"/groups/{UNREAD}")
    plan(browser, f"move-{TOPIC}-3", {"Offset": "17"})
    confirm(browser, "Reset")
    browser.wait(lambda: shown_offset(browser, 3) == "17")
    assert offsets(scene, UNREAD) == before | {3: 17}


def test_11_a_group_is_cloned(scene, browser):
    until(lambda: scene.cli("group", "progress", READ)["in_flight"] == 0)
    browser.open(f"/groups/{READ}")
    plan(browser, "clone", {"New group": "billing-v2"})
    planned = {int(row[2]): int(row[4].replace(",", "")) for row in rows(browser, "#dialog")}
    confirm(browser, "Clone")
    assert offsets(scene, "billing-v2") == offsets(scene, READ) == planned


def test_12_a_group_gets_settings(scene, browser):
    browser.open(f"/groups/{READ}")
    assert "5" in plan(browser, "settings", {"Retries": "5"})
    confirm(browser, "Apply")
    browser.wait(lambda: rows(browser, '[aria-labelledby="group-settings"]')[0][1] == "5")
    found = scene.cli("group", "show", READ)["brokers"]
    assert [one["retry_max_times"] for one in found] == [5]


def test_10_a_backlog_is_skipped(scene, browser):
    browser.open(f"/groups/{UNREAD}")
    assert "never come to the group" in plan(browser, "skip", {})
    confirm(browser, "Skip", typed=UNREAD)
    browser.wait(lambda: browser.text('[data-test="card-lag"] .value') == "0")
    assert scene.cli("group", "progress", UNREAD)["lag"] == 0


def test_a_failing_group_is_seen_on_the_first_page(scene, browser):
    browser.open("/")
    browser.wait(lambda: FAILING in browser.text('[data-test="alarms"]'), 60)
