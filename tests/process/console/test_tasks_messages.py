"""Tasks of the console on messages, by a robot in a browser, compared with the command line."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from harness.browser import Browser
from harness.console_scene import (
    BROKEN,
    FAILING,
    READ,
    TOPIC,
    ConsoleScene,
    Undecided,
    confirm,
    log_in,
    plan,
    rows,
)
from harness.patience import until

from mqmesh import Message, PushConsumer, TransactionProducer
from mqmesh.protocol.route import TopicConfig
from mqmesh.sdk.admin.admin import AdminClient

SQL = "price > 10 AND TAGS = 'new'"
REFUNDS, REFUNDING = "refunds", "refunding"
BODIES = [b"plain", b"<b>bold</b>", b'"quoted", and\r\nlines', b"\xff\x00\xfe", "grün ☂".encode()]
FETCH = """
const done = arguments[arguments.length - 1];
fetch(arguments[0]).then((one) => one.arrayBuffer())
  .then((one) => done(btoa(String.fromCharCode(...new Uint8Array(one)))));
"""


def shown(browser: Browser, table: str) -> list[str]:
    """Return what the rows of a table are called by, without what all begin with."""
    script = """return [...document.querySelectorAll(arguments[0])].map(row => row.dataset.test)"""
    found = browser.driver.execute_script(script, f'[data-test="{table}"] tbody tr')
    return [name.split("-", 1)[1] for name in found]


def file_of(browser: Browser, link: str) -> bytes:
    """Return what a link to a file brings."""
    href = browser.test(link).get_attribute("href")
    return base64.b64decode(browser.driver.execute_async_script(FETCH, href))


def test_13_messages_are_found_by_key(scene, browser):
    browser.open("/messages")
    browser.press("Key", "main")
    for label, value in (("Topic", TOPIC), ("Key", "order-7"), ("From", "1h")):
        browser.fill(label, value)
    browser.press("Search", "main")
    browser.test("messages")
    words = ("--topic", TOPIC, "--from", "1h", "--max", "1000")
    found = scene.cli("query", "by-key", "order-7", *words)["messages"]
    assert shown(browser, "messages") == [one["message_id"] for one in found]
    assert len(found) >= 10
    assert {row[2] for row in rows(browser, '[data-test="messages"]')} == {"order-7"}


def test_14_messages_are_found_by_time_and_sql(scene, browser):
    priced = [
        Message(TOPIC, b"{}", ("new", "paid")[n % 2], properties={"price": str(n)})
        for n in range(30)
    ]
    times = [scene.producer.send(one).store_timestamp for one in priced]
    begin, end = str(min(times)), max(times)
    browser.open("/messages")
    for label, value in (("Topic", TOPIC), ("From", begin), ("To", str(end)), ("SQL92", SQL)):
        browser.fill(label, value)
    browser.press("Search", "main")
    browser.test("messages")
    words = ("consume", TOPIC, "--sql", SQL, "--from", begin, "--until", str(end + 1))
    counts = scene.cli(*words, "--count-by", "tag")
    assert counts == [{"tag": "new", "messages": 9}]
    assert browser.text('[data-test="total"]') == "9 messages"
    assert [row[3] for row in rows(browser, '[data-test="messages"]')] == ["new"] * 9
    browser.open(f"/messages?topic={TOPIC}")
    browser.wait(lambda: re.search(r"Looked at 1,000 of [\d,]{5,}", browser.text("main")))


@pytest.fixture
def failed(scene) -> str:
    """Id of a message that ``FAILING`` fails at, and ``READ`` does not."""
    message = Message(TOPIC, b'{"order": "bad"}', BROKEN, ["order-bad"])
    return scene.producer.send(message).message_id


def test_15_a_message_has_its_track_and_trace(scene, browser, failed):
    browser.open(f"/messages/{failed}")
    browser.wait(lambda: "done" in browser.text(f'[data-test="track-{READ}"]'))
    browser.wait(lambda: "retry 1" in browser.text(f'[data-test="track-{FAILING}"]'))
    assert "no address for order-bad" in browser.text(f'[data-test="track-{FAILING}"]')
    states = {one["group"]: one["state"] for one in scene.cli("query", "track", failed)["groups"]}
    assert (states[READ], states[FAILING]) == ("CONSUMED", "RETRYING")
    browser.test("span-send")
    browser.wait(lambda: shown(browser, "trace").count("consume") >= 2)
    spans = scene.cli("trace", "show", failed)["spans"]
    assert {"SEND", "CONSUME"} == {one["kind"] for one in spans}


def test_16_a_message_is_handed_to_one_client(scene, browser, failed):
    def handed() -> list[int]:
        return [
            sum(one.message_id == failed and one.is_handed_over for one in list(member.got))
            for member in scene.members
        ]

    browser.open(f"/messages/{failed}")
    client_id = scene.members[1].consumer.client_id
    said = plan(browser, "hand-to", {"Member": f"{READ} {client_id}"})
    assert "No offset moves" in said
    assert handed() == [0, 0]
    assert "SUCCESS after" in confirm(browser, "Hand over")
    assert handed() == [0, 1]


def test_a_viewer_reads_no_messages(scene):
    with scene.stranger() as browser:
        log_in(browser, "viewer", scene.passwords["viewer"])
        browser.open("/messages")
        assert "needs the right SUB" in browser.test("no-right").text
        for path in (f"/messages?topic={TOPIC}", "/delayed", f"/transactions/{scene.half_id}"):
            browser.open(path)
            assert "viewer" in browser.test("problem").text
        for path in ("/dead-letters", "/transactions"):
            browser.open(path)
            assert browser.find("main h1").text != "Forbidden"


@contextmanager
def refunding(scene: ConsoleScene, got: list[str], *, fails: bool) -> Iterator[None]:
    def listen(messages):
        if fails:
            raise LookupError("no account")
        got.extend(one.message_id for one in messages)

    options = {"max_reconsume_times": 0, "consume_from_where": "FIRST_OFFSET"}
    consumer = PushConsumer(REFUNDING, **scene.keys, **options)
    consumer.subscribe(REFUNDS, listener=listen)
    with consumer:
        yield


@pytest.fixture(scope="session")
def letters(scene) -> list[str]:
    """Ids of dead letters of ``REFUNDING``."""
    with AdminClient(**scene.keys) as admin:
        admin.create_topic(TopicConfig(REFUNDS, 1, 1))
    sent = [scene.producer.send(Message(REFUNDS, one, "refund", ["r"])) for one in BODIES]
    with refunding(scene, [], fails=True):
        until(lambda: len(scene.cli("dlq", "list", REFUNDING)["dead_letters"]) == len(BODIES))
    return [one.message_id for one in sent]


def test_17_chosen_dead_letters_are_resent_once(scene, browser, letters):
    scene.cli("dlq", "resend", REFUNDING, *letters[:2])
    got: list[str] = []
    with refunding(scene, got, fails=False):
        until(lambda: sorted(got) == sorted(letters[:2]))
        browser.open("/dead-letters")
        group = f'[data-test="letters-of-{REFUNDING}"]'
        browser.wait(lambda: "no account" in browser.text(group))
        browser.press(REFUNDING, "main")
        browser.find('[aria-label="Choose all on this page"]').click()
        said = plan(browser, "resend")
        assert "3 dead letters" in said
        assert "2 were resent before" in said
        browser.press("Resend", "#dialog")
        browser.test("outcome")
        dates = [row[1:] for row in rows(browser, "#dialog")]
        assert browser.text('[data-test="outcome"]') == "3 resent, 2 were before"
        assert [one[0] for one in dates] == ["resent before"] * 2
        assert all(one[1].endswith("UTC") for one in dates)
        browser.press("Go on", "#dialog")
        until(lambda: len(got) >= 5)
    assert sorted(got) == sorted(letters)
    listed = scene.cli("dlq", "list", REFUNDING)["dead_letters"]
    assert [one["resent_timestamp"] > 0 for one in listed] == [True] * 5

    def marked() -> int:
        browser.open(f"/dead-letters/{REFUNDING}")
        return browser.text('[data-test="letters"]').count("resent ")

    browser.wait(lambda: marked() == 5)


def test_18_dead_letters_are_exported(scene, browser, letters, short_tmp_path):
    browser.open(f"/dead-letters/{REFUNDING}")
    file = short_tmp_path / "letters.jsonl"
    scene.cli("dlq", "export", REFUNDING, str(file))
    exported = file_of(browser, "export-jsonl")
    lines = [json.loads(line) for line in exported.splitlines()]
    assert lines == [json.loads(line) for line in file.read_bytes().splitlines()]
    table = io.StringIO(file_of(browser, "export-csv").decode(), newline="")
    records = list(csv.DictReader(table))
    for found in (lines, records):
        assert sorted(one["message_id"] for one in found) == sorted(letters)
        bodies = [
            (one["body"] or "").encode() or base64.b64decode(one["body_base64"]) for one in found
        ]
        assert sorted(bodies) == sorted(BODIES)


def test_19_a_delayed_message_is_cancelled(scene, browser):
    sent = scene.producer.send(Message(TOPIC, b"late", keys=["late"]).delayed_by(3_600_000))
    browser.open("/delayed")
    browser.wait(lambda: sent.message_id in shown(browser, "delayed"))
    assert browser.test("due-chart").is_displayed()
    assert "never delivered" in plan(browser, f"cancel-{sent.message_id}")
    assert "is cancelled" in confirm(browser, "Cancel it")
    browser.wait(lambda: sent.message_id not in browser.text("main"))
    waiting = scene.cli("schedule", "list", "--max", "1000")
    assert sent.message_id not in [one["message_id"] for one in waiting]


def test_20_a_parked_half_message_is_committed(scene, browser):
    with TransactionProducer("payments", listener=Undecided(), **scene.keys) as producer:
        sent = producer.send_message_in_transaction(Message(TOPIC, b"paid", keys=["pay"]))
        half = sent.send_result.message_id
        browser.open("/transactions?state=parked")
        browser.wait(lambda: half in shown(browser, "transactions"))
        assert "cannot be taken back" in plan(browser, f"commit-{half}")
        assert "is committed" in confirm(browser, "Commit")
    browser.test("card-parked")
    browser.wait(lambda: half not in browser.text("main"))
    assert half not in [one["message_id"] for one in scene.cli("tx", "list")["messages"]]
    until(lambda: any(one.message_id == half for one in scene.delivered()))
    assert sum(one.message_id == half for one in scene.delivered()) == 1
