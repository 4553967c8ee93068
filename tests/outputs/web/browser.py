"""Chromium without a window, driven over its DevTools protocol: what a person would see."""

import asyncio
import atexit
import base64
import contextlib
import functools
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.until import until

_DEADLINE = 60.0
"""Seconds Chromium may take for anything: it is slow to start on a loaded machine."""


_LEFT = "'code': -32000"
"""In the answer to what is asked of a page while the browser goes to the next one."""
_HASTE = "const wait = setTimeout; window.setTimeout = (then, ms) => wait(then, ms / 20);"


def program() -> str | None:
    """Where Chromium is; None if it is not installed."""
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


class Tab:
    """An open page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.console: list[str] = []
        """What the browser complained of: blocked by the policy, errors of scripts."""
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    async def say(self, method: str, **parameters: Any) -> Any:
        """Has the browser do something: see the DevTools protocol's reference."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(_DEADLINE):
            return await answer

    async def begin(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.say(f"{domain}.enable")
        # Its clock for waiting runs faster, so that nobody waits for the page's two seconds.
        await self.say("Page.addScriptToEvaluateOnNewDocument", source=_HASTE)

    async def open(self, url: str) -> None:
        self._loaded.clear()
        await self.say("Page.navigate", url=url)
        async with asyncio.timeout(_DEADLINE):
            await self._loaded.wait()

    async def screen(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        await self.say(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.say("Emulation.setEmulatedMedia", features=[scheme])

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = await self.say(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """The value of an expression as soon as it is true, also on the page that comes next."""

        async def found() -> Any:
            try:
                return await self.run(script)
            except RuntimeError as error:
                if _LEFT in str(error):
                    return None
                raise

        return await until(found, script, interval=0.05)

    async def shoot(self, path: Path) -> None:
        """Takes a picture of the whole page."""
        size = (await self.say("Page.getLayoutMetrics"))["cssContentSize"]
        picture = await self.say(
            "Page.captureScreenshot",
            captureBeyondViewport=True,
            clip={"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1},
        )
        path.write_bytes(base64.b64decode(picture["data"]))

    async def _listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if answer.cancelled():
                    continue
                if "error" in told:
                    answer.set_exception(RuntimeError(str(told["error"])))
                else:
                    answer.set_result(told["result"])
            elif told["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif told["method"] == "Log.entryAdded":
                self.console.append(told["params"]["entry"]["text"])
            elif told["method"] == "Runtime.exceptionThrown":
                self.console.append(str(told["params"]["exceptionDetails"]))

    async def end(self) -> None:
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)


@functools.cache
def _browser() -> str:
    """Starts a browser that ends with this process; returns the address of its DevTools."""
    found = program()
    assert found is not None
    profile = Path(tempfile.mkdtemp(prefix="npu-chromium-"))
    atexit.register(shutil.rmtree, profile, ignore_errors=True)
    # The flags that keep it from calling home: there is nobody to answer.
    process = subprocess.Popen(
        [
            found,
            "--headless=new",
            *(["--no-sandbox"] if os.getuid() == 0 else []),
            "--disable-gpu",
            "--disable-quic",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    atexit.register(_kill, process)
    port, end = profile / "DevToolsActivePort", time.monotonic() + _DEADLINE
    while not port.exists() or "\n" not in port.read_text(encoding="utf-8"):
        assert time.monotonic() < end, "Chromium does not start"
        time.sleep(0.05)
    return f"http://127.0.0.1:{port.read_text(encoding='utf-8').split()[0]}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A new, empty page."""
    browser = _browser()
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{browser}/json/new?about:blank") as answer:
            target = await answer.json()
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            page = Tab(socket)
            try:
                await page.begin()
                yield page
            finally:
                await page.end()
                await session.get(f"{browser}/json/close/{target['id']}")
