"""The status page as people see it: in Chromium, which is Debian's package `chromium`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs.web.server import Server
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.web.browser import Tab, program, tab
from tests.outputs.web.helpers import (
    Scene,
    fenced,
    held,
    hostile,
    listening,
    many,
    night,
    read,
    serving,
)

pytestmark = pytest.mark.skipif(
    program() is None, reason="no Chromium here: apt-get install --no-install-recommends chromium"
)


HEADLINE = "document.getElementById('headline').textContent"

# The least contrast of any text with what is behind it: WCAG 2, 1.4.3 asks for 4.5.
CONTRAST = """(() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  let worst = [99, ""];
  const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data.trim(), e = walk.currentNode.parentElement;
    if (!text || !e.getClientRects().length) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, text];
  }
  return worst;
})()"""


@asynccontextmanager
async def looking(scene: Scene, width: int = 1280, *, dark: bool = False) -> AsyncIterator[Tab]:
    async with serving(scene) as (host, port), tab() as page:
        await page.screen(width, dark=dark)
        await page.open(f"http://{host}:{port}/")
        yield page


def owned() -> Scene:
    """Names that nobody could give, long and without a place to break, at every place."""
    return hostile(
        "<script>window.owned = 1</script><img src=x onerror=window.owned=1>" + "W" * 400
    )


def sick_of_many() -> Scene:
    """One is dead, and one is hot."""
    scene = many()
    cards = list(scene.cards)
    cards[20] = fenced(cards[20], "dead", 1)
    cards[40] = read(cards[40], temperature=97.4)
    scene.cards = tuple(cards)
    return scene


@pytest.mark.parametrize("make", [night, owned, Scene, many])
async def test_the_page_fits_a_phone(make: Callable[[], Scene]) -> None:
    async with looking(make(), 360) as page:
        assert await page.run("document.documentElement.scrollWidth") == 360
        assert await page.run("innerWidth") == 360
        assert await page.run("window.owned === undefined && document.scripts.length === 1")
        assert page.console == []


async def test_a_figure_of_a_small_tile_stays_on_one_line_of_a_phone() -> None:
    async with looking(sick_of_many(), 390) as page:
        lines = "[...document.querySelectorAll('.small summary > span:not(.sign)')]"
        assert await page.run(f"{lines}.length") > 60
        broken = f"{lines}.filter((e) => e.getClientRects().length > 1 || e.offsetHeight > 22)"
        assert await page.run(f"{broken}.map((e) => e.textContent)") == []


@pytest.mark.parametrize("make", [night, sick_of_many])
@pytest.mark.parametrize("dark", [False, True])
async def test_the_page_can_be_read_by_day_and_by_night(
    dark: bool, make: Callable[[], Scene]
) -> None:
    async with looking(make(), dark=dark) as page:
        ground = await page.run("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", ground))) / 3
        assert brightness < 60 if dark else brightness > 200
        ratio, text = await page.run(CONTRAST)
        assert ratio >= 4.5, text


async def test_the_page_shows_changes_without_a_reload() -> None:
    scene = Scene(cards=(read(state()), read(state(index=1))))
    async with looking(scene) as page:
        assert await page.run(HEADLINE) == "Healthy: 2 cards"
        await page.run("window.same = document.body; document.querySelector('details').open = true")
        await page.run("document.getElementById('to-json').focus()")
        scene.cards = (scene.cards[0], fenced(scene.cards[1], "alive says 0", 1))
        await page.until(f"{HEADLINE} === 'npu1 is unhealthy'")
        assert await page.run("window.same === document.body")
        assert await page.run("document.title") == "npu1 is unhealthy - node-7 - npu-agent"
        assert "alive says 0" in await page.run("document.getElementById('warboy-1').innerText")
        # What the reader had done stays done.
        assert await page.run("document.querySelector('#warboy-0 details').open")
        assert await page.run("document.activeElement.id") == "to-json"
        # And it is said to those who cannot see it.
        said = "document.querySelector('[role=status]').textContent"
        assert await page.run(said) == "npu1 is unhealthy"
        assert page.console == []


async def test_a_readers_selection_survives_an_update() -> None:
    scene = Scene(cards=(read(state()),))
    async with looking(scene) as page:
        await page.run("getSelection().selectAllChildren(document.getElementById('config'))")
        await page.run("window.main = document.querySelector('main')")
        scene.cards = (fenced(scene.cards[0], "dead", 1),)
        await page.run("""new Promise((done) => {
            const before = performance.getEntriesByType('resource').length;
            const look = () => performance.getEntriesByType('resource').length > before + 1
                ? done() : setTimeout(look, 50);
            look();
        })""")
        assert await page.run("window.main === document.querySelector('main')")
        await page.run("getSelection().removeAllRanges()")
        await page.until("window.main !== document.querySelector('main')")


async def test_the_page_says_when_the_agent_does_not_answer_and_recovers() -> None:
    scene = Scene(cards=(read(state()),))
    server = Server("metrics", ("127.0.0.1", 0), scene.pages())
    running = asyncio.create_task(server.run())
    host, port = await listening(server)
    async with tab() as page:
        await page.open(f"http://{host}:{port}/")
        assert await page.run("document.getElementById('lost').hidden")
        top = "document.getElementById('warboy-0').getBoundingClientRect().top"
        before = await page.run(top)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await page.until("!document.getElementById('lost').hidden")
        assert await page.run("document.title") == "? - node-7", "a tab does not stay well"
        place = await page.run(
            "(({top, bottom}) => [top >= 0, bottom <= innerHeight])"
            "(document.getElementById('lost').getBoundingClientRect())"
        )
        assert place == [True, True], "it is seen wherever somebody has scrolled to"
        assert "Connection lost" in await page.run("document.getElementById('lost').innerText")
        assert await page.run("document.body.classList.contains('old')")
        # What was last known can still be read.
        look = "getComputedStyle(document.querySelector('main'))"
        assert await page.run(f"[{look}.opacity, {look}.filter]") == ["1", "none"]
        ratio, text = await page.run(CONTRAST)
        assert ratio >= 4.5, text
        assert await page.run(top) == before
        scene.cards = (fenced(scene.cards[0], "dead", 1),)
        async with serving(scene, (host, port)):
            await page.until("document.getElementById('lost').hidden")
            assert "is unhealthy" in await page.run(HEADLINE)
            assert not await page.run("document.body.classList.contains('old')")
            assert "is unhealthy" in await page.run("document.title")


async def test_a_hidden_page_asks_for_nothing() -> None:
    async with looking(Scene()) as page:
        hidden = "Object.defineProperty(document, 'hidden', {get: () => %s, configurable: true});"
        event = "document.dispatchEvent(new Event('visibilitychange'));"
        count = "performance.getEntriesByType('resource').length"
        # Hidden while an answer is under way. The page asks each 100 ms here, so that it would
        # have asked five times more.
        await page.run(
            "const ask = fetch; window.fetch = (...what) => {"
            f" window.fetch = ask; {hidden % 'true'} {event} return ask(...what); }}"
        )
        await page.until("document.hidden")
        still = "new Promise((done) => wait(done, 500))"
        await page.run(still)
        before = await page.run(count)
        await page.run(still)
        assert await page.run(count) == before
        await page.run((hidden % "false") + event)
        await page.until(f"{count} > {before}")


async def test_a_new_version_of_the_page_is_loaded_whole() -> None:
    async with looking(Scene()) as page:
        await page.run("window.old = true; document.documentElement.dataset.build = 'another'")
        await page.until("window.old === undefined && document.readyState === 'complete'")


async def test_a_link_to_one_of_many_cards_opens_it() -> None:
    scene = many()
    scene.holdings = Holdings(assignments=(held(scene.cards[33], "yolo"),))
    async with looking(scene) as page:
        shown = "document.getElementById('rngd-33').checkVisibility()"
        assert not await page.run(shown)
        await page.run("document.getElementById('at-rngd-33-0').click()")
        await page.until(shown)
        # And it stays so when the page is brought up to date.
        await page.run("window.main = document.querySelector('main')")
        await page.until("window.main !== document.querySelector('main')")
        assert await page.run(shown)


async def test_times_are_those_of_the_reader() -> None:
    scene = night()
    async with serving(scene) as (host, port), tab() as page:
        await page.say("Emulation.setTimezoneOverride", timezoneId="Asia/Seoul")
        await page.open(f"http://{host}:{port}/")
        wrong = "!new Date(time.dateTime).toLocaleString('sv', {timeZone: 'Asia/Seoul'})"
        wrong += ".includes(time.textContent)"
        local = f"[...document.querySelectorAll('time')].filter((time) => {wrong})"
        local += ".map((time) => time.outerHTML)"
        assert await page.run(local) == []
        assert await page.run("document.querySelectorAll('time').length") > 20
        assert "Asia/Seoul" in await page.run("document.querySelector('footer').innerText")
        await page.run("window.main = document.querySelector('main')")
        await page.until("window.main !== document.querySelector('main')")
        assert await page.run(local) == []
        assert "UTC" not in await page.run("document.querySelector('.top').innerText")


async def test_the_page_is_in_the_readers_language_and_stays_so() -> None:
    scene = Scene(cards=(read(state()), read(state(index=1))))
    async with tab() as page:
        await page.screen(360)
        agent = await page.run("navigator.userAgent")
        await page.say("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage="ko-KR,en")
        async with serving(scene) as (host, port):
            await page.open(f"http://{host}:{port}/")
            assert await page.run(HEADLINE) == "정상: 카드 2장"
            assert await page.run("document.documentElement.lang") == "ko"
            scene.cards = (scene.cards[0], fenced(scene.cards[1], "dead", 1))
            await page.until(f"{HEADLINE} === 'npu1 비정상'")
            assert "비정상" in await page.run("document.getElementById('warboy-1').innerText")
            assert await page.run("document.documentElement.scrollWidth") == 360
        await page.until("document.getElementById('lost').innerText.includes('연결이 끊겼습니다')")
        assert "{}" not in await page.run("document.getElementById('lost').innerText")


async def test_the_readers_place_stays_when_the_page_changes_above() -> None:
    scene = Scene(cards=tuple(read(state(index=index)) for index in range(9)))
    async with looking(scene, 500) as page:
        top = "document.getElementById('warboy-6').getBoundingClientRect().top"
        await page.run("document.getElementById('warboy-6').scrollIntoView()")
        before = await page.run(top)
        assert await page.run("scrollY") > 500
        # Another card fails: it moves up, and the head has a problem more.
        scene.cards = (*scene.cards[:8], fenced(scene.cards[8], "dead", 1))
        await page.until(f"{HEADLINE} === 'npu8 is unhealthy'")
        assert abs(await page.run(top) - before) < 1


async def test_a_problem_leads_to_its_steps() -> None:
    async with looking(night()) as page:
        await page.run("document.querySelector('.problem .steps').click()")
        await page.until("location.pathname === '/runbook' && document.readyState === 'complete'")
        shown = "document.querySelector(':target')"
        assert await page.run(f"{shown}.textContent") == "NpuCardUnhealthy"
        assert await page.run(f"{shown}.getBoundingClientRect().top") < 200
        ratio, text = await page.run(CONTRAST)
        assert ratio >= 4.5, text
        await page.screen(360)
        assert await page.run("document.documentElement.scrollWidth") == 360
        assert page.console == []
