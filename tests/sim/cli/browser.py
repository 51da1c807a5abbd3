"""A browser to look at a page with: chromium, driven through a pipe by its DevTools protocol."""

import itertools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe", "--window-size=1400,1000"),
)


class BrowserError(Exception):
    """An action that the browser cannot do."""


class Browser:
    """One page. ``said`` has the messages of its console and the errors of its scripts."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = os.fdopen(to, "wb", 0), os.fdopen(back, "rb")
        self._numbers = itertools.count(1)
        self._page: dict[str, str] = {}
        self.said: list[Any] = []
        self.asked: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        found = self("Target.attachToTarget", targetId=target, flatten=True)
        self._page = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> Any:
        number = next(self._numbers)
        call = {"id": number, "method": method, "params": parameters, **self._page}
        self._to.write(json.dumps(call).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> Any:
        message = bytearray()
        while (byte := self._back.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        told = json.loads(message)
        if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.said.append(told["params"])
        if told.get("method") == "Network.requestWillBeSent":
            self.asked.append(told["params"]["request"]["url"])
        return told

    def open(self, page: pathlib.Path, fragment: str = "") -> None:
        """Load a file anew, and wait for its scripts."""
        for url in ("about:blank", page.absolute().as_uri()):
            self("Page.navigate", url=url if url == "about:blank" else url + fragment)
            there = f"location.href.split('#')[0] === {json.dumps(url)}"
            self.until(f"{there} && document.readyState === 'complete'")

    def until(self, expression: str) -> None:
        """Wait until an expression is true, at most for the test's time."""
        true = False
        while not true:
            with suppress(BrowserError):  # a page that goes cannot be asked
                true = self.js(expression)

    def js(self, expression: str) -> Any:
        """Return the value of an expression as JSON."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def click(self, selector: str) -> None:
        """Click in the middle of the first found element."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{found}.scrollIntoView({{block: 'center', inline: 'center'}})")
        x, y = self.js(
            f"(box => [box.x + box.width / 2, box.y + box.height / 2])({found}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser with a new profile, and end it."""
    assert PROGRAM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    theirs = to_browser[0], from_browser[1]
    # it reads from descriptor 3 and writes to 4
    script = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            ["bash", "-c", script, "bash", PROGRAM, f"--user-data-dir={folder}", *OPTIONS],
            pass_fds=theirs,
            stderr=subprocess.DEVNULL,
        )
        for each in theirs:
            os.close(each)
        try:
            yield Browser(to_browser[1], from_browser[0])
        finally:
            process.kill()
            process.wait()
