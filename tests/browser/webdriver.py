"""A browser without a screen, driven through the W3C WebDriver protocol with the standard library alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_REQUEST_TIMEOUT_S = 60

Actions = list[dict[str, Any]]


def missing() -> str | None:
    """What has to be installed before :func:`browser` can be used, or None."""
    if shutil.which("chromedriver") is None:
        return "chromedriver is not installed (Debian: apt-get install chromium chromium-driver)"
    if not any(map(shutil.which, BROWSERS)):
        return f"no browser is installed (one of {', '.join(BROWSERS)})"
    return None


class WebDriverError(Exception):
    """The browser refused a request, or a script in it failed."""


class Browser:
    """One window."""

    def __init__(self, session_url: str) -> None:
        self._url = session_url

    def open(self, page: Path) -> None:
        """Load a file and wait until it is loaded."""
        self._post("/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """The value that ``script`` returns, which may be a promise."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def move(self, x: float, y: float) -> None:
        """Move the mouse to (x, y), in CSS pixels of the window."""
        self._mouse([_move(x, y)])

    def drag(self, x: float, y: float, dx: float) -> None:
        """Press the button at (x, y), move by ``dx`` to the right, and let go."""
        down, up = ({"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp"))
        self._mouse([_move(x, y), down, _move(x + dx / 2, y), _move(x + dx, y), up])

    def wheel(self, x: float, y: float, delta: int) -> None:
        """Turn the wheel at (x, y): negative is away from oneself."""
        turn = {"type": "scroll", "x": round(x), "y": round(y), "deltaX": 0, "deltaY": delta, "duration": 0}
        self._post("/actions", {"actions": [{"type": "wheel", "id": "wheel", "actions": [turn]}]})

    def keys(self, *keys: str) -> None:
        """Press and release keys one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def console(self) -> list[str]:
        """What the page has written to the console, or the browser about it, since the last call."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def screenshot(self) -> str:
        """The window as PNG, base64."""
        return _request("GET", self._url + "/screenshot")

    def prefer(self, **features: str) -> None:
        """Pretend that the user prefers ``prefers_color_scheme="dark"`` and the like."""
        wanted = [{"name": key.replace("_", "-"), "value": value} for key, value in features.items()]
        command = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": wanted}}
        self._post("/goog/cdp/execute", command)

    def _mouse(self, actions: Actions) -> None:
        self._post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _request("POST", self._url + path, body)


def _move(x: float, y: float) -> dict[str, Any]:
    return {"type": "pointerMove", "x": round(x), "y": round(y), "duration": 0}


def _request(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urlopen(request, timeout=_REQUEST_TIMEOUT_S) as answer:
            return json.load(answer)["value"]
    except HTTPError as error:
        raise WebDriverError(error.read().decode()) from None


@contextmanager
def browser(profile: Path, width: int = 1400, height: int = 900) -> Iterator[Browser]:
    """A window of that size with a new profile in ``profile``; it and its driver end with the context."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{_port(driver)}/session"
        session = _request("POST", url, {"capabilities": {"alwaysMatch": _wishes(profile, width, height)}})
        try:
            yield Browser(f"{url}/{session['sessionId']}")
        finally:
            _request("DELETE", f"{url}/{session['sessionId']}")
    finally:
        driver.terminate()
        driver.communicate(timeout=_REQUEST_TIMEOUT_S)


def _port(driver: subprocess.Popen[str]) -> int:
    """The port that the driver says it listens at."""
    assert driver.stdout is not None
    lines = []
    for line in driver.stdout:
        lines.append(line)
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise WebDriverError(f"chromedriver ended: {''.join(lines)}")


def _wishes(profile: Path, width: int, height: int) -> dict[str, Any]:
    quiet = ("first-run", "background-networking", "component-update", "quic", "sync", "gpu")
    arguments = [f"--{'no' if name == 'first-run' else 'disable'}-{name}" for name in quiet]
    arguments += ["--headless", f"--user-data-dir={profile}", f"--window-size={width},{height}"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # Chromium refuses to start as root with it.
    binary = next(path for path in map(shutil.which, BROWSERS) if path)
    return {
        "goog:chromeOptions": {"args": arguments, "binary": binary},
        "goog:loggingPrefs": {"browser": "ALL"},
    }
