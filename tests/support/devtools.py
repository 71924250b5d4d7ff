"""A headless Chromium that a test drives: scripts, keys, screenshots. It speaks the DevTools protocol over pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from browser import CHROMIUM

KEYS = {"Enter": 13, "Tab": 9, "Escape": 27}


class Page:
    """A browser tab. `console`: all printed lines, refusals of the page's policy and uncaught errors included."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while (answer := self._receive()).get("id") != self._number:
            self._take(answer)
        assert "error" not in answer, answer["error"]
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        message: dict[str, Any] = json.loads(data)
        return message

    def _take(self, event: dict[str, Any]) -> None:
        match event.get("method"), event.get("params", {}):
            case "Runtime.consoleAPICalled", given:
                self.console.append(" ".join(str(each.get("value")) for each in given["args"]))
            case "Runtime.exceptionThrown", given:
                self.console.append(json.dumps(given["exceptionDetails"]))
            case "Log.entryAdded", given:
                self.console.append(given["entry"]["text"])
            case "Network.requestWillBeSent", given:
                self.requested.append(given["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(condition):
            assert time.monotonic() < deadline, f"{condition}; the page says {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            code = KEYS[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                      modifiers=8 if shift else 0, **(text if kind == "keyDown" else {}))  # fmt: skip

    def show_as(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the window's size in pixels, and whether the user prefers dark colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[colours])

    def screenshot(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])


@contextmanager
def browser() -> Iterator[Page]:
    """Start a browser with a new profile and one page, and yield the page."""
    profile = tempfile.mkdtemp()
    its_read, write = os.pipe()
    read, its_write = os.pipe()

    # Chromium reads commands from descriptor 3 and writes to 4.
    shell = f'exec 3<&{its_read} 4>&{its_write}; exec "$@"'
    command = ["bash", "-c", shell, "bash", *CHROMIUM, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    process = subprocess.Popen(command, pass_fds=(its_read, its_write), stderr=subprocess.DEVNULL)
    for descriptor in (its_read, its_write):
        os.close(descriptor)
    try:
        yield Page(read, write)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)
