"""A headless Chromium that a test controls through a pipe with the DevTools protocol.

It has one page. `Page.problems` has everything that the page logs, raises or fails to load.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

__all__ = ["Page", "find_chromium", "open_browser"]

PATIENCE_SECONDS = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # root cannot use the sandbox
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "Enter": 13}


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """The only page of a browser."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""
        self._numbers = count(1)
        self._session = ""
        self.problems: list[str] = []
        self.site = "file:"  # the prefix of URLs that the page may load
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self._call(f"{domain}.enable")

    def show(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a report with this size and theme, and wait until it is drawn."""
        self.open(path.resolve().as_uri(), width=width, height=height, dark=dark)
        self.wait_for("document.documentElement?.dataset.ready")

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Open a page with this size and theme."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.get(f"!!({expression})"):
            if self.problems or time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}; {self.problems}")
            time.sleep(0.02)

    def get(self, expression: str) -> Any:
        """Evaluate a JavaScript expression; await it if it is a promise."""
        result = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of an element."""
        found: str = self.get(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def num_colors(self, canvas: str) -> int:
        """Count the colors of a canvas."""
        script = f"""(() => {{
          const canvas = document.querySelector({json.dumps(canvas)});
          const {{ width, height }} = canvas;
          const {{ data }} = canvas.getContext("2d").getImageData(0, 0, width, height);
          return new Set(new Uint32Array(data.buffer)).size;
        }})()"""
        found: int = self.get(script)
        return found

    def click(self, selector: str) -> None:
        """Click the center of an element."""
        x, y = self.middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, x, y)

    def middle(self, selector: str) -> tuple[float, float]:
        """Scroll an element into view and return its center."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.get(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.get(f"{element}.getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a mouse event, such as mouseMoved or mouseWheel."""
        button = "none" if kind in ("mouseMoved", "mouseWheel") else "left"
        event = {"type": kind, "x": x, "y": y, "button": button, "clickCount": 1, **more}
        self._call("Input.dispatchMouseEvent", **event)

    def press(self, key: str) -> None:
        """Press and release a key: a character, or a name in `_KEYS`."""
        text = key if len(key) == 1 else ""
        code = _KEYS.get(key, ord(key[0]))
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=code,
            )

    def type(self, selector: str, text: str) -> None:
        """Replace the text of an input and remove the focus from it."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.get(f"{element}.focus(); {element}.select()")
        self._call("Input.insertText", text=text)
        self.get(f"{element}.blur()")

    def cpu_seconds(self) -> float:
        """Return the CPU time of the page's process."""
        metrics = self._call("Performance.getMetrics")["metrics"]
        return next(float(one["value"]) for one in metrics if one["name"] == "ProcessTime")

    def save_picture(self, path: Path, selector: str | None = None) -> None:
        """Save a PNG of the window, or of an element with a margin."""
        self.get("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        clip = {} if selector is None else {"clip": self._box(selector)}
        found = self._call("Page.captureScreenshot", captureBeyondViewport=bool(clip), **clip)
        path.write_bytes(base64.b64decode(found["data"]))

    def _box(self, selector: str) -> dict[str, float]:
        box = self.get(f"""(() => {{
          const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
          return {{ x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height }};
        }})()""")
        margin = 12
        return {
            "x": box["x"] - margin,
            "y": box["y"] - margin,
            "width": box["width"] + 2 * margin,
            "height": box["height"] + 2 * margin,
            "scale": 1,
        }

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") != number:
                self._note(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._reader], [], [], PATIENCE_SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            found = os.read(self._reader, 1 << 20)
            if not found:
                raise ConnectionError("the browser has ended")
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" | "Log.entryAdded" | "Network.loadingFailed":
                self.problems.append(json.dumps(parameters))
            case "Network.requestWillBeSent":
                url = parameters["request"]["url"]
                if not url.startswith((self.site, "blob:", "data:", "about:")):
                    self.problems.append(f"requested {url}")


@contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """Run Chromium with a new profile in the directory ``profile``."""
    program = find_chromium()
    if program is None:
        raise FileNotFoundError(f"no Chromium: none of {', '.join(_NAMES)} is on the PATH")
    to_browser, from_browser = _pipe(), _pipe()

    def place() -> None:  # Chromium expects the pipes at these numbers
        os.dup2(to_browser[0], 3)
        os.dup2(from_browser[1], 4)

    process = subprocess.Popen(
        [program, *_FLAGS, f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(3, 4),
        preexec_fn=place,  # noqa: PLW1509 (it takes no lock)
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        page = Page(from_browser[0], to_browser[1])
        yield page
    finally:
        os.close(to_browser[1])  # ends the browser
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])


def _pipe() -> tuple[int, int]:
    """Make a pipe whose file descriptors are 10 or more, and so neither 3 nor 4."""
    found = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in found)
    for end in found:
        os.close(end)
    return moved[0], moved[1]
