"""Window of a browser without a screen, driven by selenium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder

BROWSERS = (
    "google-chrome",
    "google-chrome-stable",
    "chromium",
    "chromium-browser",
)  # a distribution's may be a stub
_LIMIT_S = 60


def missing() -> str | None:
    """Return the package that :func:`browser` needs and this host lacks; None if it is complete."""
    if shutil.which("chromedriver") is None:
        return "chromedriver is not installed (Debian: apt-get install chromium chromium-driver)"
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser is installed (one of {', '.join(BROWSERS)})"
    return None


class Window:
    """One window. Positions are in CSS pixels of the window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self._driver = driver

    def open(self, page: Path) -> None:
        """Load a file and wait until it is loaded."""
        self._driver.get(page.as_uri())

    def run(self, script: str, *arguments: object) -> Any:
        """The value that ``script`` returns, which may be a promise."""
        return self._driver.execute_script(script, *arguments)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to (x, y)."""
        self._mouse(x, y)

    def drag(self, x: float, y: float, dx: float) -> None:
        """Press the button at (x, y), move by ``dx`` to the right, and release it."""
        self._mouse(x, y, x + dx / 2, x + dx)

    def wheel(self, x: float, y: float, delta: int) -> None:
        """Turn the wheel at (x, y); a negative ``delta`` scrolls up."""
        actions = ActionBuilder(self._driver, duration=0)
        actions.wheel_action.scroll(round(x), round(y), 0, delta, 0, "viewport")
        actions.perform()

    def keys(self, *keys: str) -> None:
        """Press and release keys one after the other."""
        ActionChains(self._driver, duration=0).send_keys(*keys).perform()

    def resize(self, width: int, height: int) -> None:
        """Change the size of the window."""
        self._driver.set_window_size(width, height)

    def console(self) -> list[str]:
        """Return the messages in the console since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def screenshot(self) -> str:
        """The window as PNG, base64."""
        return self._driver.get_screenshot_as_base64()

    def prefer(self, **features: str) -> None:
        """Pretend that the user prefers ``prefers_color_scheme="dark"`` and the like."""
        wanted = [{"name": key.replace("_", "-"), "value": value} for key, value in features.items()]
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})

    def _mouse(self, x: float, y: float, *dragged_to: float) -> None:
        actions = ActionBuilder(self._driver, duration=0)
        mouse = actions.pointer_action
        mouse.move_to_location(round(x), round(y))
        if dragged_to:
            mouse.pointer_down()
            for to in dragged_to:
                mouse.move_to_location(round(to), round(y))
            mouse.pointer_up()
        actions.perform()


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 900) -> Iterator[Window]:
    """A window of that size with a new profile in ``profile``; it and its driver end with the context."""
    options = webdriver.ChromeOptions()
    options.binary_location = next(path for path in map(shutil.which, BROWSERS) if path)
    quiet = ("background-networking", "component-update", "quic", "sync", "gpu")
    for name in ("headless", "no-first-run", *(f"disable-{name}" for name in quiet)):
        options.add_argument(f"--{name}")
    options.add_argument(f"--user-data-dir={profile}")
    options.add_argument(f"--window-size={width},{height}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to start as root with it.
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # With the path of the driver, selenium does not look for another one.
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        driver.set_page_load_timeout(_LIMIT_S)
        driver.set_script_timeout(_LIMIT_S)
        yield Window(driver)
    finally:
        driver.quit()
