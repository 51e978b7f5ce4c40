"""Pictures of the console's pages, over a cluster with some traffic and some trouble."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from harness.browser import Browser, open_browser
from harness.commands import free_ports
from mqmesh import GroupAdmin, Message, Producer, PushConsumer
from mqmesh.protocol.groups import GroupConfig, ResetWhere
from mqmesh.sdk.admin.admin import AdminClient

DOCS: Final = Path(__file__).parents[2] / "docs" / "console"
PAGES: Final = {
    "overview": "/",
    "topics": "/topics",
    "topic": "/topics/orders",
    "groups": "/groups?sort=-lag",
    "group": "/groups/billing",
    "messages": "/messages?topic=orders",
    "dead-letters": "/dead-letters",
    "delayed": "/delayed",
    "transactions": "/transactions",
    "api": "/api",
    "about": "/about",
}
TRAFFIC_S: Final = 45
"""Time for which figures are collected before the first picture."""


@contextmanager
def scene() -> Iterator[str]:
    """Run a cluster with a console; yields the address of the console.

    A producer sends orders all the time; ``billing`` consumes them, ``ledger`` has no members, and
    each delivery to ``failing`` fails.
    """
    with tempfile.TemporaryDirectory(prefix="mqmesh-pictures-") as folder:
        first, second, broker, console = free_ports(4)
        settings = {
            "namesrv.0.listen_port": first,
            "namesrv.1.listen_port": second,
            "broker.0.listen_port": broker,
            "console.listen_port": console,
        }
        command = [sys.executable, "-m", "mqmesh.cli", "up", "--console", "--data-dir", folder]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        log = Path(folder, "up.log")
        with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
            try:
                _wait_ready(log, process)
                with _traffic(f"127.0.0.1:{first};127.0.0.1:{second}"):
                    yield f"http://127.0.0.1:{console}"
            finally:
                process.terminate()


def _wait_ready(log: Path, process: subprocess.Popen[bytes]) -> None:
    while "cluster is ready" not in log.read_text():
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        time.sleep(0.1)


@contextmanager
def _traffic(namesrv: str) -> Iterator[None]:
    ending = threading.Event()

    def fail(messages: object) -> None:
        raise ValueError("no such account")

    with AdminClient(namesrv) as admin:
        for topic in ("orders", "payments", "invoices"):
            admin.create_topic(topic, queues=4)
    with GroupAdmin(namesrv) as groups:
        groups.create_group(GroupConfig("ledger"))
        groups.reset_offset("ledger", "orders", ResetWhere.FIRST)
    producer = Producer("shop", namesrv_addr=namesrv, msg_trace=1)
    consumers = [
        PushConsumer(group, namesrv_addr=namesrv, msg_trace=1) for group in ("billing", "failing")
    ]
    consumers[0].subscribe("orders", listener=lambda messages: None)
    consumers[1].subscribe("payments", listener=fail)

    def send() -> None:
        number = 0
        while not ending.wait(0.02):
            body = f'{{"order": {number}, "price": {number % 40}}}'.encode()
            producer.send(Message("orders", body, "new", (f"order-{number}",)))
            if number % 7 == 0:
                producer.send(Message("payments", body))
            number += 1

    producer.start()
    for consumer in consumers:
        consumer.start()
    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        ending.set()
        sending.join()
        for consumer in consumers:
            consumer.close()
        producer.close()


def take_for_docs(browser: Browser, theme: str, folder: Path) -> None:
    """Take the pictures of the pages of the documentation."""
    for name in ("overview", "group"):
        browser.open(PAGES[name])
        browser.find(".u-legend")
        browser.picture(folder / f"{name}-{theme}.png", 1_200)
    take_message(browser, folder / f"message-{theme}.png")
    browser.open(PAGES["group"])
    browser.press("Reset")
    browser.press("Continue", "dialog")
    browser.test("plan")
    browser.driver.set_window_size(1_200, 760)
    browser.driver.save_screenshot(str(folder / f"reset-{theme}.png"))


def take_message(browser: Browser, path: Path) -> None:
    """Take the picture of a message that a group failed to consume."""
    browser.open("/messages?topic=payments&until=15s")
    browser.find('[data-test="messages"] tbody a').click()
    browser.test("span-consume")
    browser.picture(path, 1_200)


def take_all(browser: Browser, theme: str, folder: Path) -> None:
    """Take pictures of all pages, wide and narrow."""
    for name, path in PAGES.items():
        for width in (1_200, 360):
            browser.driver.set_window_size(width, 800)
            browser.open(path)
            browser.find("main")
            browser.picture(folder / f"{name}-{width}-{theme}.png", width)


def main() -> None:
    """Take the pictures of the documentation, or all into a folder."""
    folder = Path(sys.argv[1]) if sys.argv[1:] else DOCS
    folder.mkdir(parents=True, exist_ok=True)
    with scene() as address:
        for theme in ("light", "dark") if sys.argv[1:] else ("light",):
            with open_browser(address, dark=theme == "dark") as browser:
                browser.open("/")  # the console looks more often while somebody looks on
                if theme == "light":
                    time.sleep(TRAFFIC_S)
                (take_all if sys.argv[1:] else take_for_docs)(browser, theme, folder)


if __name__ == "__main__":
    main()
