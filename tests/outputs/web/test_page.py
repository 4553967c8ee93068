"""The status page as a document; how it looks and behaves is for `test_browser`."""

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jinja2 import nodes
from jinja2.ext import extract_from_ast

from npu_agent.core.hardware import CoreRange, CoreReading, SkippedDevice
from npu_agent.core.state import AgentState, ConditionState, LabelState, SessionPhase, SlicesState
from npu_agent.core.timeline import Timeline
from npu_agent.kubelet.podresources import Holdings
from npu_agent.outputs.web.page import environment, page, runbook
from npu_agent.outputs.web.view import MOST, bounds, curve
from npu_agent.outputs.web.words import NBSP, WORDS, span
from npu_agent.wording import LANGUAGES
from tests.golden import golden
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import claim
from tests.outputs.web.helpers import (
    Scene,
    driver,
    fenced,
    held,
    hostile,
    many,
    night,
    read,
    stopped,
)

_EMPTY = {"meta", "link", "br"}

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"\'><b onclick="alert(1)">&amp;',
    "</style></main></title><iframe>",
    "\x00\x1b[31m\r\n\x7f\udcff\ud800",
    "\u202egnp.evil\u2066",
    "{{7*7}} ${x} `id`",
    "x" * 100_000,
)


class Document(HTMLParser):
    """Text and elements of a page; fails on one that is not well nested, if it is `whole`."""

    def __init__(self, html: str, *, whole: bool = True) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [] or not whole

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def shown(scene: Scene) -> Document:
    return Document(page(scene.state(), scene.history.of))


def headline(scene: Scene) -> str:
    found = re.search(r'id="headline">.*?<span>(.*?)</span>', html(scene), re.DOTALL)
    assert found
    return found[1]


def html(scene: Scene) -> str:
    return page(scene.state(), scene.history.of)


def test_the_first_line_says_whether_all_is_well() -> None:
    assert headline(Scene(cards=(read(state()),))) == "Healthy: 1 card"
    assert headline(Scene()) == "Healthy: no cards on this node"
    assert (
        headline(Scene(complete=False, phase=SessionPhase.REGISTERED))
        == "Still searching for cards"
    )
    assert headline(night()) == "npu2 is unhealthy, and 3 more problems"
    assert headline(Scene(cards=(fenced(read(state()), "dead", 1),))) == "npu0 is unhealthy"
    assert "<title>npu2 is unhealthy (+3) - npu-rack3" in page(night().state(), night().history.of)


def test_a_problem_links_to_its_details() -> None:
    found = shown(night())
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    anchors = set(ids)
    assert len(ids) == len(anchors), "each is there once"
    links = [attrs["href"] for tag, attrs in found.elements if tag == "a"]
    inside = [href[1:] for href in links if href and href.startswith("#")]
    assert {"rngd-2", "rngd-5", "config"} <= set(inside)
    assert set(inside) <= anchors


def by_claims() -> AgentState:
    """A card that two Pods share, one that is cut, one that is gone; one is on its way to DRA."""
    whole, cut = read(state(uuid="A")), read(state("rngd", 1, uuid="B"))
    gone = state(index=2, uuid="GONE")
    device = claim("cut", cut).devices[0]
    parts = tuple(
        replace(device, request=name, footprint=replace(device.footprint, cores=cores))
        for name, cores in (("most", CoreRange(0, 3)), ("one", CoreRange(5, 5)))
    )
    claims = (
        claim("shared", whole, pods=("a", "b")),
        replace(claim("cut", cut), devices=parts),
        claim("train", gone),
    )
    return Scene(
        cards=(whole, cut),
        dra=(driver(*claims, slices=SlicesState(dropped=("devices.taints",))),),
        timeline=Timeline().left([gone], [], time.monotonic() - 60),
    ).state()


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reading grows old while a busy machine makes a scene."""
    stopped(monkeypatch)


SCENES: dict[str, Callable[[], AgentState]] = {
    "night": lambda: night().state(),
    "troubled": lambda: troubled().state(),
    "claims": by_claims,
}


@pytest.mark.parametrize("name", SCENES)
def test_golden_pages(name: str) -> None:
    """Its text is in a golden file, an element a line."""
    found = Document(page(SCENES[name](), lambda _: ()))
    lines = (" ".join(words.replace(NBSP, " ").split()) for words in found.words)
    text = "\n".join(filter(None, lines)) + "\n"
    assert text == golden(Path(__file__).parent / "golden" / f"{name}.txt", text)


def test_a_card_that_is_too_hot_stands_out() -> None:
    assert re.findall('value hot">([^<]*)', html(night())) == ["97.4\N{NO-BREAK SPACE}°C"]


def test_old_figures_are_not_drawn_as_those_of_now() -> None:
    fresh, old = read(state(), load=80), read(state(), load=80, temperature=99, age=600)
    assert '<rect width="80.0"' in html(Scene(cards=(fresh,)))
    shown_old = html(Scene(cards=(old,)))
    assert '<rect width="80.0"' not in shown_old
    assert 'value stale">' in shown_old
    assert 'value hot">' not in shown_old
    scene, none = many(), '<rect width="0" height="10"/>'
    scene.cards = (read(scene.cards[0], age=600), *scene.cards[1:])
    assert html(scene).count(none) == 1


def test_a_card_of_which_little_is_known() -> None:
    bare = read(state())
    assert bare.reading
    bare = replace(bare, reading=replace(bare.reading, sensors=(), cores=(), uptime=None))
    found = shown(Scene(cards=(bare, state(index=1)), node=None)).text
    assert "unknown node" in found
    assert "nan" not in found


@pytest.mark.parametrize(
    ("points", "lines"),
    [
        ([(2 * n, 1.0) for n in range(8)], 1),
        ([(0, 1.0), (4, 1.0), (200, 1.0), (204, 1.0)], 2),
        ([(0, 1.0), (4, 2.0), (8, math.nan)], 1),
        ([(0, 1.0), (4, math.nan)], 0),
    ],
)
def test_a_curve_is_broken_where_nothing_was_read(
    points: list[tuple[int, float]], lines: int
) -> None:
    assert len([line for line in curve(points, (0.0, 10.0)) if len(line) > 1]) == lines


def test_a_curve_has_an_axis() -> None:
    made = html(night())
    assert '<span class="high">100</span>' in made
    assert 'aria-label="Load over the last hour"' in made
    assert curve([(0, 75.0), (4, 50.0)], (50.0, 75.0)) == [["0,2", "4,70"]]
    assert '<svg class="curve' not in html(Scene(cards=(read(state()),))), "nothing was read yet"


@pytest.mark.parametrize(
    ("values", "least", "ends"),
    [
        ([44.0, 45.0], 20.0, (40.0, 60.0)),
        ([58.0, 61.0], 20.0, (50.0, 70.0)),
        ([41.0, 97.4], 20.0, (0.0, 100.0)),
        ([float("nan"), 44.0], 20.0, (40.0, 60.0)),
        ([], 20.0, (0.0, 20.0)),
        ([float("inf"), float("nan")], 5.0, (0.0, 5.0)),
        ([-1e30, 1e30], 5.0, (-1e30, 1e30)),
    ],
)
def test_the_ends_of_an_axis_are_round_and_hold_every_value(
    values: list[float], least: float, ends: tuple[float, float]
) -> None:
    assert bounds(values, least) == ends


def links_of(found: Document) -> set[str]:
    return {attrs["href"] or "" for tag, attrs in found.elements if tag == "a"}


def anchors_of(found: Document) -> set[str | None]:
    return {attrs["id"] for _, attrs in found.elements if "id" in attrs}


def troubled() -> Scene:
    """As much trouble as there can be."""
    stale, hot = read(state(index=1), age=600), read(state(index=2), temperature=91)
    very_hot = read(state(index=3), temperature=101)
    return replace(
        night(),
        cards=(*night().cards, stale, hot, very_hot),
        phase=SessionPhase.REGISTERING,
        skipped=(SkippedDevice("/sys/x", "Permission denied", unread=True),),
        holdings=Holdings(assignments=(held(state(index=9), "lost"),), error="no socket"),
        labels=LabelState(output="api", labels={"a": "b"}, error="403"),
        dra=(
            driver(phase=SessionPhase.BLOCKED, reason="why"),
            driver(slices=SlicesState(trouble="forbidden")),
            driver(slices=SlicesState(published=True, incomplete=True, foreign="a")),
        ),
    )


@pytest.mark.parametrize("language", ["ko", "ja"])
@pytest.mark.parametrize("name", SCENES)
def test_the_pages_own_words_are_in_the_readers_language(
    language: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a translation; what comes from elsewhere is never asked for."""
    missing = set[str]()

    class Asked(dict[str, Sequence[str]]):
        def get(self, english: str, default: object = None) -> Any:
            if english.isascii() and english not in self:
                missing.add(english)
            return super().get(english, default)

    monkeypatch.setattr("npu_agent.outputs.web.words.WORDS", Asked(WORDS))
    found = Document(page(SCENES[name](), lambda _: (), language))
    assert not missing
    assert ("html", language) in [(tag, attrs.get("lang")) for tag, attrs in found.elements]


@pytest.mark.parametrize("name", environment.list_templates())
def test_a_template_has_no_words_without_translation(name: str) -> None:
    tree = parsed(name)
    asked = {
        english
        for _, _, words in extract_from_ast(tree, ("_", "ngettext"), babel_style=False)
        for english in ([words] if isinstance(words, str) else words or ())
        if english
    }
    assert asked <= set(WORDS)
    fixed = Document("".join(data.data for data in tree.find_all(nodes.TemplateData)), whole=False)
    names = {"npu-agent", "status.json", "UTC"}
    assert set(re.findall(r"[\w.-]*[^\W\d_]{2}[\w.-]*", fixed.text)) <= names


@pytest.mark.parametrize("name", environment.list_templates())
def test_a_template_escapes_its_values(name: str) -> None:
    assert environment.autoescape is True
    tree = parsed(name)
    assert not [*tree.find_all(nodes.ScopedEvalContextModifier)], "no autoescape false"
    assert "safe" not in {filter_.name for filter_ in tree.find_all(nodes.Filter)}


def parsed(name: str) -> nodes.Template:
    assert environment.loader
    return environment.parse(environment.loader.get_source(environment, name)[0])


@pytest.mark.parametrize("language", ["ko", "ja"])
def test_the_words_of_problems_and_of_the_timeline_are_in_the_readers_language(
    language: str,
) -> None:
    words = Document(page(night().state(), night().history.of, language)).text
    problem, entry = {
        "ko": ("드라이버가 카드의 장애를 알립니다", "npu7이(가) 할당되었습니다"),
        "ja": ("ドライバーがカードの故障を示しています", "npu7が割り当てられました"),
    }[language]
    assert words.count(problem) > 3, "in the list of problems, on the card, in the timeline"
    assert entry in words
    assert not re.findall("reports the card dead|in use by|became unhealthy| more", words)


def test_translations_put_in_the_same_values() -> None:
    for english, others in WORDS.items():
        values = sorted(re.findall(r"\{\d*\}", english))
        for other in others:
            assert sorted(re.findall(r"\{\d*\}", other)) == values, english
            assert other[-1] == " " or not english.endswith(" "), english


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_problem_has_its_steps_in_the_runbook(language: str) -> None:
    sections = anchors_of(Document(runbook(language)))
    steps = {link[8:] for link in links_of(shown(troubled())) if link.startswith("runbook#")}
    assert steps <= sections
    assert {
        *("npucardunhealthy", "nputemperaturehigh", "nputemperaturecritical", "npureadingsstale"),
        *("npucardmissing", "npuresourcenotregistered", "npuconfigrejected"),
        *("npudranotregistered", "npudraslicesnotpublished", "npudrapoolincomplete"),
        "npudrapreparefailing",
        "npulabelsnotapplied",
        *("npuconfigwaitsforrestart", "a-node-offers-no-npus-or-too-few"),
    } == steps


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_runbook_leads_nowhere_else(language: str) -> None:
    """It is read where there may be nothing else: in a cluster without the internet."""
    found = Document(runbook(language))
    for link in links_of(found) - {"./"}:
        assert link[0] == "#"
        assert link[1:] in anchors_of(found)
    assert "dmesg" in found.text
    assert not [
        each for _, attrs in found.elements for each in attrs.values() if "//" in (each or "")
    ]


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (ConditionState(type="a/Ready"), "Type a/Ready Status not yet"),
        (
            ConditionState(type="a/Ready", status=True, reason="NPUsReady", message="2 of 2"),
            "Status True Reason NPUsReady Message 2 of 2",
        ),
        (
            ConditionState(type="a/Ready", status=False, reason="No", message="<0", error="403"),
            "Status False Reason No Message <0 What is wrong 403",
        ),
    ],
)
def test_the_condition_is_shown_whatever_it_is(condition: ConditionState, words: str) -> None:
    state_ = replace(Scene(cards=(state(),)).state(), condition=condition)
    found = Document(page(state_, lambda _: ()))
    assert words in " ".join(found.text.split())
    assert ("#condition" in links_of(found)) is (condition.error is not None)
    assert "condition" in anchors_of(found)
    assert "condition" not in anchors_of(shown(Scene(cards=(state(),))))


def test_whether_it_is_ready_and_why_not() -> None:
    assert "Ready: every resource with cards is registered" in shown(Scene(cards=(state(),))).text
    alone = replace(Scene(cards=(state(),)).state(), resources=())
    assert "Ready: the config is applied." in Document(page(alone, lambda _: ())).text
    blocked = Scene(cards=(state(),), phase=SessionPhase.BLOCKED, reason="mount it")
    assert "Not ready: beta.furiosa.ai/npu: blocked: mount it" in shown(blocked).text
    blocked.config = replace(blocked.config, errors=("c.yaml:1:1: bad",))
    assert "blocked: mount it (and 1 more)" in shown(blocked).text


@pytest.mark.parametrize("jump", [315e6, -315e6])
def test_how_long_ago_something_was_does_not_depend_on_the_wall_clock(jump: float) -> None:
    scene = replace(night(), jump=jump)
    text = shown(scene).text.replace("\N{NO-BREAK SPACE}", " ")
    for words in (
        "up 3 d 1 h",
        "healthy for 3 d 1 h, since",
        "not found on this host any more since 5 h 50 min ago",
        "Last written 3 d 1 h ago",
        "npu-agent 1.2.3 started",  # almost a day ago
    ):
        assert words in text, words


def articles(found: Document) -> list[str]:
    return [str(attrs["id"]) for tag, attrs in found.elements if tag == "article"]


def test_many_cards_are_small_and_have_all_the_rest_within() -> None:
    scene = many()
    found = shown(scene)
    small = [a for tag, a in found.elements if tag == "details" and a.get("class") == "small"]
    assert len(small) == 64
    assert len(articles(found)) == 64
    scene.cards = (*scene.cards[:20], fenced(scene.cards[20], "dead", 1), *scene.cards[21:])
    found = shown(scene)
    assert articles(found)[0] == "rngd-20", "large, before all others"
    places = [a["href"] for tag, a in found.elements if a.get("class") == "small fenced"]
    assert places == ["#rngd-20"], "and its place among the small ones leads there"
    ids = [attrs["id"] for _, attrs in found.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert len(html(scene)) < 500_000


def test_a_small_card_names_its_first_holder_and_counts_the_others() -> None:
    scene = many()
    first, second = scene.cards[:2]
    halves = [CoreRange(0, 3), CoreRange(4, 7)]
    held_now = [held(first, f"pod-{cores}", cores) for cores in halves]
    scene.holdings = Holdings(assignments=(*held_now, held(second, "alone")))
    tiles = re.findall(r'<small class="who( dim)?">([^<]*)</small>', html(scene))
    assert tiles[:3] == [("", "pod-0-3 +1"), ("", "alone"), (" dim", "free")]


def test_a_page_of_many_unhealthy_cards_is_still_one_glance() -> None:
    scene = many()
    scene.cards = tuple(fenced(card, "dead", 1) for card in scene.cards)
    assert html(scene).count('<article class="card fenced"') == 0
    assert html(scene).count('class="small fenced"') == 64
    assert "Ready:" not in html(scene)
    assert "0 of 64 cards can be given to Pods" in html(scene)


@pytest.mark.parametrize("bad", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_from_outside_gets_out_of_its_place(bad: str) -> None:
    plain = {tag for tag, _ in shown(night()).elements} | {"bdi", "br"}
    scene = hostile(bad)
    text = html(scene)
    text.encode()
    found = Document(text)
    assert {tag for tag, _ in found.elements} <= plain
    attributes = [entry for _, attrs in found.elements for entry in attrs.items()]
    assert not any(name.startswith("on") for name, _ in attributes)
    assert not any("<bdi>" in (value or "") for _, value in attributes)
    assert len(text) < 150_000
    assert not any(char in text for char in "\x00\x1b\r\x7f\u200b")


@pytest.mark.parametrize(
    ("seconds", "shown_as"),
    [(-1, "0 s"), (0, "0 s"), (59.9, "59 s"), (3600, "1 h 0 min"), (90_061, "1 d 1 h")],
)
def test_a_length_of_time(seconds: float, shown_as: str) -> None:
    assert span(seconds).replace(NBSP, " ") == shown_as


def test_entries_that_are_left_out_are_counted_and_only_then() -> None:
    pods = tuple(held(state(), f"pod-{index}") for index in range(5_000))
    for count in (MOST, MOST + 1):
        cards = many(count).cards
        text = shown(Scene(cards=cards, holdings=Holdings(assignments=pods[:count]))).text
        assert (f"The first {MOST} are shown" in text) == (count > MOST)
        assert ("and 1 more" in text) == (count > MOST)
    holders = Holdings(assignments=pods, error="no socket")
    text = html(Scene(cards=(state(),), holdings=holders))
    assert len(text) < 200_000
    assert "and 4900 more" in text
    assert "As last known: no socket" in text


def test_pods_are_in_natural_order() -> None:
    cards = many(3).cards
    pods = (held(card, f"train-{2**index}") for card, index in zip(cards, (4, 1, 0), strict=True))
    text = shown(Scene(cards=cards, holdings=Holdings(assignments=tuple(pods)))).text
    table = text.rpartition("Namespace")[2]
    assert re.findall("train-[0-9]+", table) == ["train-1", "train-2", "train-16"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300, 1e300])
def test_nonsense_figures_do_not_cost_the_page(value: float) -> None:
    card = read(state())
    assert card.reading
    cores = (CoreReading(core=0, utilization=value),)
    card = replace(card, reading=replace(card.reading, cores=cores))
    scene = Scene(cards=(card,))
    for _ in range(2):
        scene.history.add(scene.snapshot)
        assert card.reading
        card = replace(card, reading=replace(card.reading, at=card.reading.at + 5))
        scene.cards = (card,)
    assert "npu0" in html(scene)
