"""A window of Chromium, what a person does in it, and a server of the page to look at.

Without selenium, chromium and chromedriver (Debian: chromium, chromium-driver) `MISSING` says what there isn't.
"""

from __future__ import annotations

import importlib.util
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll.workbench.view.api import Api
from roll.workbench.view.runs import named_runs
from roll.workbench.view.server import serve

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
SELENIUM = importlib.util.find_spec("selenium") is not None
MISSING = "" if CHROMIUM and DRIVER and SELENIUM else "there is no selenium, or no chromium with its chromedriver"
PATIENCE = 30.0


class Page:
    """A window of Chromium and what a person does in it."""

    def __init__(self, address: str, width: int = 1280, height: int = 900, **features: str) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.driver.set_page_load_timeout(PATIENCE)
        self.address = address
        self.size(width, height)
        if features:
            media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
            self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    def size(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def open(self, view: str) -> None:
        """Show a view, and wait until it is there."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#/{view}")
        self.wait(lambda: self.ready > 0, f"{view} is shown")

    @property
    def ready(self) -> int:
        return int(self.run("return document.getElementById('main')?.dataset.ready || 0"))

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, what: Callable[[], Any], name: str) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if found := what():
                return found
            time.sleep(0.03)
        raise AssertionError(f"waited {PATIENCE:g} s for: {name}; the page says: {self.text('body')[:1500]}")

    def all(self, css: str) -> list[Any]:
        return self.driver.find_elements("css selector", css)

    def texts(self, css: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", css)

    def text(self, css: str) -> str:
        return "\n".join(self.texts(css))

    def click(self, css: str, containing: str = "") -> None:
        """Click on the first such element, as a script does, and wait for the view that follows."""
        before = self.ready
        script = """const found = [...document.querySelectorAll(arguments[0])]
                      .find((one) => one.innerText.includes(arguments[1]));
                    if (found) found.click(); return Boolean(found);"""
        assert self.run(script, css, containing), f"there is no {css} with {containing!r}"
        self.wait(lambda: self.ready > before, f"the view after a click on {css}")

    def click_on(self, css: str, containing: str = "", *, shows: str = "") -> None:
        """Click on the first such element with the mouse; wait for the view that follows, or until it says `shows`."""
        before = self.ready
        script = """return [...document.querySelectorAll(arguments[0])]
                      .find((one) => one.checkVisibility() && one.innerText.includes(arguments[1]));"""
        found = self.run(script, css, containing)
        assert found is not None, f"there is no {css} with {containing!r} to be seen: {self.text('body')[:1500]}"
        self.run("arguments[0].scrollIntoView({block: 'center'})", found)
        found.click()
        if shows:
            self.wait(lambda: shows in self.text("main"), f"{shows!r} after a click on {css} {containing}")
        else:
            self.wait(lambda: self.ready > before, f"the view after a click on {css} {containing}")

    def choose(self, label: str, value: str) -> None:
        before = self.ready
        script = """const label = [...document.querySelectorAll('label')].find((one) => one.innerText === arguments[0]);
                    const control = document.getElementById(label.htmlFor); control.value = arguments[1];
                    control.dispatchEvent(new Event('change'));"""
        self.run(script, label, value)
        self.wait(lambda: self.ready > before, f"the view after {label} = {value}")

    def press(self, key: str) -> None:
        self.driver.switch_to.active_element.send_keys(key)

    def complaints(self) -> list[str]:
        """What the browser has logged, such as scripts that the policy refused."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def served(runs: list[Path]) -> str:
    addresses: list[str] = []
    there = threading.Event()

    def ready(address: str) -> None:
        addresses.append(address)
        there.set()

    given = {"host": "127.0.0.1", "port": 0, "token": "unused", "by_user": True, "ready": ready}
    threading.Thread(target=serve, args=(Api(named_runs(runs)),), kwargs=given, daemon=True).start()
    assert there.wait(PATIENCE), "the server didn't start"
    return addresses[0]
