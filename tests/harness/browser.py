"""A headless Chromium for tests and pictures of the console, by selenium."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
MISSING = "" if CHROMIUM and DRIVER else "chromium and chromedriver (apt: chromium-driver)"
"""Name of the program that this machine lacks; "" for none."""
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--lang=en-GB",
)


class Browser:
    """One browser.

    Args:
        driver: Selenium's.
        address: Address of the console, without a slash at the end.
    """

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self, path: str) -> None:
        """Open a page of the console."""
        self.driver.get(self.address + path)

    def find(self, css: str) -> WebElement:
        """Return the first element, as soon as there is one."""
        found: WebElement = self.wait(lambda: self.driver.find_element(By.CSS_SELECTOR, css))
        return found

    def test(self, name: str) -> WebElement:
        """Return the element with ``data-test``, as soon as it is there."""
        return self.find(f'[data-test="{name}"]')

    def text(self, css: str) -> str:
        """Return the visible text of the first element; what is renewed meanwhile is read again."""
        script = "const e = document.querySelector(arguments[0]); return e ? e.innerText : ''"
        return str(self.driver.execute_script(script, css))

    def press(self, label: str, within: str = "body") -> None:
        """Press the button or link with a label, as soon as it is there."""
        path = (
            f"(.//button|.//a|.//summary)[normalize-space()={json.dumps(label)} "
            f"or @aria-label={json.dumps(label)}]"
        )

        def press() -> bool:
            for one in self.find(within).find_elements(By.XPATH, path):
                if one.is_displayed() and one.is_enabled():
                    one.click()
                    return True
            return False

        self.wait(press)

    def click(self, name: str) -> None:
        """Press the element with ``data-test``, as soon as it is there."""

        def click() -> bool:
            self.driver.find_element(By.CSS_SELECTOR, f'[data-test="{name}"]').click()
            return True

        self.wait(click)

    def fill(self, label: str, value: str, within: str = "body") -> None:
        """Write into the field with a label, in place of what stands there."""
        path = f".//label[normalize-space()={json.dumps(label)}]"
        named = self.wait(lambda: self.find(within).find_elements(By.XPATH, path))[0]
        field = self.driver.find_element(By.ID, named.get_attribute("for") or "")
        if field.tag_name == "select":
            field.find_element(By.XPATH, f"./option[.={json.dumps(value)}]").click()
            return
        field.clear()
        field.send_keys(value)

    def press_keys(self, *keys: str) -> None:
        """Press keys, whatever has the focus."""
        ActionChains(self.driver).send_keys(*keys).perform()

    def wait(self, ready: Callable[[], Any], seconds: float = 15.0) -> Any:
        """Wait until something is so, and return it.

        Raises:
            AssertionError: It is not so in time; the text holds what the page shows.
        """
        # An element that is replaced between two looks raises; look for it again.
        waiting = WebDriverWait(self.driver, seconds, 0.05, (Exception,))
        try:
            return waiting.until(lambda _driver: ready())
        except TimeoutException:
            shown = f"{self.driver.current_url}: {self.text('body')[:2_000]}"
            raise AssertionError(f"not so in {seconds} s at {shown}") from None

    def prefer(self, scheme: str) -> None:
        """Have pages believe that the user prefers ``light`` or ``dark``."""
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)

    def log(self) -> list[str]:
        """Return what stands in the browser's console, and forget it."""
        found: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [f"{one['level']}: {one['message']}" for one in found]

    def picture(self, path: Path, width: int) -> None:
        """Take a picture of the whole page."""
        self.driver.set_window_size(width, 800)
        # The window has a frame around the page.
        script = "return document.documentElement.scrollHeight + outerHeight - innerHeight"
        height = int(self.driver.execute_script(script))
        self.driver.set_window_size(width, min(max(height, 500), 4_000))
        self.driver.save_screenshot(str(path))


@contextmanager
def open_browser(address: str, *, dark: bool = False) -> Iterator[Browser]:
    """Start a browser with a profile of its own; it ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = CHROMIUM or ""
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for one in (*ARGUMENTS, f"--user-data-dir={profile}"):
            options.add_argument(one)
        if dark:
            options.add_argument("--force-dark-mode")
        driver = webdriver.Chrome(options, Service(DRIVER))
        try:
            browser = Browser(driver, address.rstrip("/"))
            browser.prefer("dark" if dark else "light")
            yield browser
        finally:
            driver.quit()
