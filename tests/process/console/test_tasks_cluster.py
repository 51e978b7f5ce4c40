"""Tasks of the console on the cluster and its users, by a robot, compared with the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from harness.browser import Browser
from harness.console_scene import TOPIC, ConsoleScene, confirm, log_in, plan, rows
from harness.oracle.scenes import heartbeat
from harness.stopwatch import Stopwatch

from mqmesh.errors import MQMeshError, NoPermission
from mqmesh.message import Message
from mqmesh.protocol.remoting.codes import RemotingStatus
from mqmesh.sdk.producer.producer import Producer

BROKER = "broker-a"
PROCESSES = '[data-test="card-processes"]'
CLIENTS_OF_ROCKETMQ = '[data-test="gateway-clients"]'
SHOWS_S = 15.0
PATIENCE_S = 60.0


@contextmanager
def sending(scene: ConsoleScene) -> Iterator[list[MQMeshError]]:
    """Send to ``TOPIC`` all the time; yields the errors of sends."""
    ending, errors = threading.Event(), list[MQMeshError]()

    def send() -> None:
        while not ending.wait(0.05):
            try:
                scene.producer.send(Message(TOPIC, b"on and on"))
            except MQMeshError as error:
                errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield errors
    finally:
        ending.set()
        thread.join()


def master_by_cli(scene: ConsoleScene) -> tuple[str, str]:
    """Return id and epoch of the master, as the command line has it."""
    for one in scene.cli("ha", "status", BROKER):
        status = one.get("status")
        if status and status["role"] == "MASTER":
            return f"replica {status['broker_id']}", str(status["epoch"])
    return "none", ""


def shown_master(browser: Browser) -> tuple[str, str]:
    master = browser.text(f'[data-test="master-{BROKER}"]')
    return master, browser.text(f'[data-test="epoch-{BROKER}"]')


def is_all_up(browser: Browser) -> bool:
    """Say whether the first page knows of processes, and none is down."""
    text = browser.text(PROCESSES)
    return "all up" in text or "started again" in text


def test_1_a_dead_master_is_named_and_the_next_one_leads(scene, browser):
    dead, card = scene.master(), PROCESSES
    browser.open("/")
    browser.wait(lambda: is_all_up(browser), PATIENCE_S)
    with sending(scene) as errors:
        with scene.killed(dead):
            watch = Stopwatch()
            browser.wait(lambda: f"down: {dead}" in browser.text(card), PATIENCE_S)
            browser.wait(
                lambda: dead in browser.text('[data-test="alarm-process-down"]'), PATIENCE_S
            )
            assert watch.seconds <= SHOWS_S
            browser.wait(
                lambda: not browser.text('[data-test="card-in"] .value').startswith("0/"),
                PATIENCE_S,
            )
            browser.open("/cluster")
            browser.wait(
                lambda: shown_master(browser)[0] not in ("", "none", f"replica {dead[-1]}"),
                PATIENCE_S,
            )
            assert shown_master(browser) == master_by_cli(scene)
        browser.open("/")
        browser.wait(lambda: is_all_up(browser), PATIENCE_S)
    assert errors == []


def test_21_a_broker_is_drained_and_comes_back(scene, browser):
    def perms() -> set[int]:
        return {one["perm"] for one in scene.cli("topic", "route", TOPIC)["queues"]}

    before = perms()
    browser.open("/cluster")
    with sending(scene) as errors:
        assert f"Producers leave {BROKER}" in plan(browser, f"drain-{BROKER}")
        assert "topics changed" in confirm(browser, "Drain")
        browser.test("drained")
        assert perms() != before
        plan(browser, f"undrain-{BROKER}")
        confirm(browser, "Undrain")
        browser.test(f"drain-{BROKER}")
        assert perms() == before
    assert errors == []


def test_the_lead_is_handed_over(scene, browser):
    before = master_by_cli(scene)
    browser.open("/cluster")
    browser.wait(lambda: len(rows(browser, '[data-test="replicas"]')) == 3, PATIENCE_S)
    with sending(scene) as errors:
        assert "hands the lead" in plan(browser, f"switch-over-{BROKER}", {})
        confirm(browser, "Switch over")
        browser.wait(lambda: shown_master(browser)[0] not in ("", "none", before[0]), PATIENCE_S)
        assert shown_master(browser) == master_by_cli(scene)
    assert errors == []


def test_22_a_rule_is_put_in_force_and_a_viewer_is_refused(scene, browser):
    with scene.stranger() as viewer:
        log_in(viewer, "viewer", scene.passwords["viewer"])
        viewer.open(f"/topics/{TOPIC}")
        assert viewer.test("delete").get_attribute("aria-disabled") == "true"
        forged = viewer.driver.execute_async_script(FORGED, f"/topics/{TOPIC}/delete", TOPIC)
        assert forged == 403
    assert TOPIC in [one["topic"] for one in scene.cli("topic", "list")]

    keys = {"namesrv_addr": scene.namesrv_addr, "credentials": str(scene.shop_keys)}
    with Producer("shop-of-22", retry_times_when_send_failed=0, **keys) as shop:
        refused = None
        try:
            shop.send(Message(TOPIC, b"not yet"))
        except NoPermission as error:
            refused = error
        assert refused is not None
        browser.open("/access")
        version = int(browser.wait(lambda: browser.text('[data-test="version"]')))
        browser.press("shop", "main")
        said = plan(browser, "add-rule", {"Actions": "PUB", "Topics": TOPIC})
        assert f'topics = ["{TOPIC}"]' in said
        assert f"version {version + 1}" in confirm(browser, "Apply")
        states = scene.cli("acl", "status")
        assert {one["version"] for one in states} == {version + 1}
        assert shop.send(Message(TOPIC, b"now")).message_id
    browser.open("/access")
    browser.wait(lambda: browser.text('[data-test="version"]') == str(version + 1))
    shown = [row[1] for row in rows(browser, '[data-test="versions"]')]
    assert shown == [str(version + 1)] * len(states)
    lines = (scene.data / "security" / "audit.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    by_admin = [one for one in found if one["command"] == "UPDATE_ACCESS_LIST"]
    assert by_admin[-1]["user"] == "client"
    refusals = [one for one in found if one["result"] == "NO_PERMISSION"]
    assert {"shop", "viewer"} <= {one["user"] for one in refusals}


FORGED = """
const done = arguments[arguments.length - 1];
const form = new FormData();
form.set("csrf", (document.querySelector('[name="csrf"]') || {}).value || "");
form.set("step", "do");
form.set("typed", arguments[1]);
fetch(arguments[0], {method: "POST", body: new URLSearchParams(form)})
    .then((one) => done(one.status));
"""


def test_a_client_of_rocketmq_is_seen_until_it_leaves(scene, browser):
    client_id = "10.0.0.7@<b>4711</b>"
    with closing(scene.rocketmq(client_id)) as client:
        assert heartbeat(client, "java", TOPIC).code == RemotingStatus.SUCCESS
        browser.open("/gateway")
        (row,) = browser.wait(lambda: rows(browser, CLIENTS_OF_ROCKETMQ))
        assert row[:2] == [client_id, "admin"]
        assert row[2].startswith("127.0.0.1:")
        assert row[3:7] == ["java-p", "java", TOPIC, "JAVA 493 by remoting"]
        browser.press("java", "main")
        browser.wait(lambda: client_id in browser.text("main"))
        browser.open("/gateway?search=shop")
        browser.wait(lambda: "No client is called so." in browser.text("main"))
        browser.open("/gateway")
        browser.wait(lambda: rows(browser, CLIENTS_OF_ROCKETMQ))
    browser.wait(lambda: "No client of RocketMQ is connected" in browser.text("main"))
