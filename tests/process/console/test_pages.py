"""All pages of the console: axe-core finds nothing serious, light or dark; they fit phones."""

from __future__ import annotations

import gzip
from urllib.parse import quote, urlencode

import pytest
from harness.browser import Browser
from harness.console_scene import READ, TOPIC, ConsoleScene

from mqmesh.console.app import find_routes
from mqmesh.console.page import ConsoleAction, ConsolePage

PATHS = [
    one.path
    for one in find_routes()
    if isinstance(one, ConsoleAction) or (isinstance(one, ConsolePage) and one.template)
]
PHONE = {"width": 360, "height": 780, "deviceScaleFactor": 2, "mobile": True}
SERIOUS = ("serious", "critical")
RUN = """
const done = arguments[arguments.length - 1];
const short = ({id, impact, nodes}) => ({id, impact, where: nodes.map((one) => one.html)});
axe.run(document, {resultTypes: ["violations"]}).then((one) => done(one.violations.map(short)));
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


def address(scene: ConsoleScene, path: str) -> str:
    """Fill the placeholders of a path with what is there."""
    client_id = scene.members[0].consumer.client_id
    message_id = scene.half_id if "transactions" in path else scene.delivered()[0].message_id
    known = {"topic": TOPIC, "group": READ, "message_id": message_id}
    filled = path.format(**{name: quote(value) for name, value in known.items()})
    return f"{filled}?{urlencode({'client_id': client_id, 'topic': TOPIC, 'group': READ})}"


def faults(browser: Browser, axe: str) -> list[dict]:
    browser.driver.execute_script(axe)
    return [one for one in browser.driver.execute_async_script(RUN) if one["impact"] in SERIOUS]


@pytest.mark.parametrize("path", PATHS)
def test_a_page_is_for_everybody(scene, browser, axe, path):
    browser.open(address(scene, path))
    browser.find("main h1, main h2")
    assert "Internal" not in browser.text("main h1, main h2")
    found = {}
    for scheme in "light", "dark":
        browser.prefer(scheme)
        found[scheme] = faults(browser, axe)
    browser.prefer("light")
    assert found == {"light": [], "dark": []}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        assert browser.driver.execute_script(TOO_WIDE) == []
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_login_is_for_everybody(scene, axe):
    with scene.stranger() as browser:
        browser.open("/login")
        browser.find("main h1")
        assert faults(browser, axe) == []
        browser.prefer("dark")
        assert faults(browser, axe) == []
        assert browser.log() == []
