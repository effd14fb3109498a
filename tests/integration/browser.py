"""A headless Chromium, driven by WebDriver's own HTTP calls, so that Python needs no package for it; and tools with a
page of their own."""

from __future__ import annotations

import base64
import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from tests.integration.harness import ROOT

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
KEYS = {"ArrowLeft": "\ue012", "ArrowRight": "\ue014"}
_FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class Browser:
    """One window; every call has a deadline of its own."""

    def __init__(self, driver_url: str, profile: Path) -> None:
        self._http = requests.Session()
        self._http.trust_env = False  # a proxy for the world is none for loopback
        self._root = driver_url
        options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}", "--window-size=1280,860"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._root += f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._http.request(method, self._root + path, json=body, timeout=90).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), f"{method} {path}: {answer['message']}"
        return answer

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function of this body returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, expression: str, *arguments: Any) -> Any:
        """The value of an expression of JavaScript, once it is true."""
        deadline = time.monotonic() + 20
        while not (value := self.run(f"return {expression}", *arguments)):
            assert time.monotonic() < deadline, f"not within 20 s: {expression} {arguments}; {self.log()}"
            time.sleep(0.05)
        return value

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{next(iter(found.values()))}"

    def click(self, selector: str) -> None:
        self._call("POST", self._find(selector) + "/click", {})

    def type(self, selector: str, text: str) -> None:
        """Into a field, in place of what is there."""
        self._call("POST", self._find(selector) + "/clear", {})
        self._call("POST", self._find(selector) + "/value", {"text": text})

    def press(self, key: str) -> None:
        """A key, wherever the focus is."""
        strokes = [{"type": kind, "value": KEYS.get(key, key)} for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]})

    def hover(self, selector: str) -> None:
        element = self._call("POST", "/element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "duration": 0, "x": 0, "y": 0, "origin": element}
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def emulate(self, command: str, **parameters: Any) -> None:
        """A command of the DevTools' domain ``Emulation``."""
        self._call("POST", "/goog/cdp/execute", {"cmd": f"Emulation.{command}", "params": parameters})

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def log(self) -> list[str]:
        """What the console got since the last call, as of scripts that the page's policy stopped."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._call("DELETE", "")


@contextlib.contextmanager
def started(directory: Path) -> Iterator[Browser]:
    """A browser with an empty profile in ``directory``; both are gone afterwards."""
    assert DRIVER is not None
    log = directory / "chromedriver.log"
    with log.open("w") as output:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 30
        while not (port := re.search(r"started successfully on port (\d+)\D", log.read_text())):
            assert time.monotonic() < deadline, f"chromedriver does not start: {log.read_text()}"
            time.sleep(0.1)
        browser = Browser(f"http://127.0.0.1:{port[1]}", directory / "profile")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)


@contextlib.contextmanager
def tool_at(*command: str) -> Iterator[str]:
    """The address that a tool of the repository prints, run as a user does; it is ended afterwards."""
    with tempfile.NamedTemporaryFile("w") as output:
        tool = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)

        def said() -> str:
            return Path(output.name).read_text()

        try:
            deadline = time.monotonic() + 90
            while not (address := re.search(r" at (http://\S+)\n", said())):
                assert tool.poll() is None, said()
                assert time.monotonic() < deadline, f"no address: {said()}"
                time.sleep(0.05)
            yield address[1]
        finally:
            tool.terminate()
            tool.wait(timeout=30)
        assert "Traceback" not in said()


def assert_light_and_dark(browser: Browser) -> None:
    """A page is as the system asks for, and its button turns that around."""
    back = "return getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 28)"
    for scheme, first, second in (("light", light, dark), ("dark", dark, light)):
        browser.emulate("setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert browser.run(back) == first
        browser.click("#theme")
        assert browser.run(back) == second
        browser.click("#theme")
    browser.emulate("setEmulatedMedia", features=[])
