"""All pages of the console: axe-core finds nothing serious, light or dark; they fit phones."""

from __future__ import annotations

import gzip
from urllib.parse import quote, urlencode

import pytest
from harness.browser import Browser
from harness.console_scene import EMPTY, READ, TOPIC

from mqmesh.console.app import find_routes
from mqmesh.console.page import ConsoleAction, ConsolePage
from mqmesh.message import Message
from mqmesh.sdk.tables.key_value import KeyValue

SHOWN = [one.path for one in find_routes() if isinstance(one, ConsolePage) and one.template]
PATHS = SHOWN + [one.path for one in find_routes() if isinstance(one, ConsoleAction)]
TABLE = "settings"
PHONE = {"width": 360, "height": 780, "deviceScaleFactor": 2, "mobile": True}
SERIOUS = ("serious", "critical")
RUN = """
const done = arguments[arguments.length - 1];
const short = ({id, impact, nodes}) => ({id, impact, where: nodes.map((one) => one.html)});
const rules = arguments[0] ? {runOnly: arguments[0]} : {};
axe.run(document, {resultTypes: ["violations"], ...rules})
    .then((one) => done(one.violations.map(short)));
"""
TOO_WIDE = """
const wide = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth <= wide) return [];
return [...document.body.querySelectorAll("*")]
    .filter((one) => one.getBoundingClientRect().right > wide + 1)
    .map((one) => one.outerHTML.slice(0, 120)).slice(0, 10);
"""


@pytest.fixture(scope="session")
def axe(data_dir) -> str:
    """Source of axe-core."""
    return gzip.decompress((data_dir / "axe/axe.min.js.gz").read_bytes()).decode()


@pytest.fixture(scope="module")
def known(scene) -> dict[str, str]:
    """Arguments that lead to what is there; ``message_id`` by the beginning of a path, too."""
    with KeyValue(TABLE, create=True, **scene.keys) as table:
        table.put("shop/ulm", b"open")
    delayed = scene.producer.send(Message(EMPTY, b"later").delayed_by(3_600_000))
    return {
        "topic": TOPIC,
        "group": READ,
        "broker_name": "broker-a",
        "name": "shop",
        "user": "shop",
        "key": "shop/ulm",
        "client_id": scene.members[0].consumer.client_id,
        "message_id": scene.delivered()[0].message_id,
        "/delayed": delayed.message_id,
        "/transactions": scene.half_id,
    }


def address(known: dict[str, str], path: str) -> str:
    """Fill the placeholders of a path, and give its page what it may want."""
    beginning = "/" + path.split("/")[1]
    values = known | {"message_id": known.get(beginning, known["message_id"])}
    if beginning == "/tables":
        values["topic"] = TABLE
    filled = path.format(**{name: quote(value) for name, value in values.items()})
    names = ("client_id", "topic", "group", "key")
    asked = {name: known[name] for name in names if f"{{{name}}}" not in path}
    return f"{filled}?{urlencode(asked)}"


def faults(browser: Browser, axe: str) -> dict[str, list[dict]]:
    """Return what axe-core finds; in the dark only colours differ."""
    browser.driver.execute_script(axe)
    found = {}
    for scheme, rules in (("dark", ["color-contrast"]), ("light", None)):
        browser.prefer(scheme)
        told = browser.driver.execute_async_script(RUN, rules)
        found[scheme] = [one for one in told if one["impact"] in SERIOUS]
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_for_everybody(session_of_admin, known, axe, path):
    browser = session_of_admin
    browser.open(address(known, path))
    browser.find("main h1, main h2")
    assert faults(browser, axe) == {"light": [], "dark": []}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        # Charts are drawn anew a moment after the width of the window has changed.
        browser.wait(lambda: browser.driver.execute_script(TOO_WIDE) == [], 5.0)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    # Some actions need what must be chosen first, and say so; the scene has no archive.
    may_refuse = path not in SHOWN or path.startswith("/archive/")
    log = [one for one in browser.log() if not may_refuse or "status of 4" not in one]
    assert log == []


def test_the_login_is_for_everybody(scene, axe):
    with scene.stranger() as browser:
        browser.open("/login")
        browser.find("main h1")
        assert faults(browser, axe) == {"light": [], "dark": []}
        assert browser.log() == []
