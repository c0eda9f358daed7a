"""Headless Chromium over its debugging pipe: no driver, no package, only the standard library."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-default-browser-check",
    "--mute-audio",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]

# Chromium reads commands from descriptor 3 and answers on 4; ours are moved out of the way first.
LAUNCH = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


OVERFLOW = """(() => {
  const root = document.documentElement;
  const scrolls = (e) => /auto|scroll|hidden/.test(getComputedStyle(e).overflowX);
  const framed = (e) => e !== null && (scrolls(e) || framed(e.parentElement));
  const wide = [...document.querySelectorAll("body *")].filter((e) => {
    const box = e.getBoundingClientRect();
    return box.width > 0 && box.right > root.clientWidth + 1 && !framed(e.parentElement);
  });
  const found = wide.map((e) => `${e.tagName} to ${Math.round(e.getBoundingClientRect().right)} px`);
  if (root.scrollWidth > root.clientWidth) found.push(`the page is ${root.scrollWidth} px wide`);
  return found;
})()"""


class Browser:
    """One page at a time: open it, click, type, read. Every wait ends after `seconds`."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900, seconds: float = 60):
        assert CHROMIUM is not None
        self.seconds, self.numbers, self.buffer, self.errors = seconds, itertools.count(1), b"", []
        command_out, self.command = os.pipe()
        self.answers, answers_in = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(command_out), str(answers_in), CHROMIUM, *flags],
            pass_fds=(command_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_out)
        os.close(answers_in)
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")

    def close(self) -> None:
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (RuntimeError, OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.command)
        os.close(self.answers)

    def call(self, method: str, **parameters):
        """Send one command and wait for its answer; uncaught errors of the page are collected on the way."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.command, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"]["exceptionDetails"])
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
        raise RuntimeError(f"{method}: no answer from Chromium within {self.seconds} s")

    def _messages(self):
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            while b"\0" in self.buffer:
                raw, self.buffer = self.buffer.split(b"\0", 1)
                yield json.loads(raw)
            if select.select([self.answers], [], [], 0.5)[0]:
                chunk = os.read(self.answers, 1 << 20)
                if not chunk:
                    return
                self.buffer += chunk

    def open(self, path: Path, fragment: str = "") -> None:
        # about:blank in between: a new fragment alone would not load the page anew
        for url in ("about:blank", f"file://{path}#{fragment}"):
            self.call("Page.navigate", url=url)
        end = time.monotonic() + self.seconds
        while self.evaluate("document.readyState + location.href.slice(0, 5)") != "completefile:":
            assert time.monotonic() < end, f"{path} does not load"
            time.sleep(0.02)

    def evaluate(self, expression: str):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of the element, as a person makes it."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replace what is in a text field by typing."""
        self.click(selector)
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                self.call(
                    "Input.dispatchKeyEvent", type=kind, key="Delete", code="Delete", windowsVirtualKeyCode=46
                )

    def screenshot(self, path: Path) -> None:
        image = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def overflow(self, path: Path, width: int) -> list[str]:
        """What reaches past the right edge of a page `width` pixels wide, and does not scroll in a frame."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.open(path)
        try:
            return self.evaluate(OVERFLOW)
        finally:
            self.call("Emulation.clearDeviceMetricsOverride")
