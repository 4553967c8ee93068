"""Which problems and notes there are, of which kinds and with which facts.

What they read like is for tests/wording.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from npu_agent.core.cordon import cordons
from npu_agent.core.hardware import CardState, Cause, HealthState, SkippedDevice
from npu_agent.core.kinds import Kind, Message, Problem
from npu_agent.core.ledger import Usage, keys_of
from npu_agent.core.problems import notes, problems, unready
from npu_agent.core.problems.cards import is_hot
from npu_agent.core.state import (
    AgentState,
    ConditionState,
    Invocation,
    LabelState,
    SessionPhase,
    SlicesState,
    TlsState,
)
from npu_agent.core.timeline import Timeline
from npu_agent.core.trends import HOT, VERY_HOT, TrendKind
from npu_agent.kubelet.podresources import Holdings
from npu_agent.wording import ENGLISH, of_problem
from tests.outputs.deviceplugin.helpers import state
from tests.outputs.helpers import RESOURCE, claim
from tests.outputs.web.helpers import Scene, driver, fenced, held, read, stopped

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reading grows old while a busy machine makes a scene."""
    stopped(monkeypatch)


def scene(phase: SessionPhase, reason: str = "", registrations: int = 0, **more: Any) -> Scene:
    more.setdefault("cards", (state(),))
    return Scene(phase=phase, reason=reason, registrations=registrations, **more)


_REGISTERED, _STANDBY, _NO_CARDS = (
    SessionPhase.REGISTERED,
    SessionPhase.STANDBY,
    SessionPhase.NO_CARDS,
)
_REGISTERING, _BLOCKED = SessionPhase.REGISTERING, SessionPhase.BLOCKED


@pytest.mark.parametrize(
    ("found", "reasons"),
    [
        (scene(_REGISTERED), ()),
        # A rolling update with maxSurge ends the old one only when the new one is ready.
        (scene(_STANDBY, "served by another"), ()),
        (scene(_NO_CARDS, cards=()), ()),
        (scene(_REGISTERING, cards=()), ()),
        (scene(_NO_CARDS, disabled=frozenset({"npu0"})), ()),
        (
            scene(_NO_CARDS, cards=(), complete=False),
            ("ResourceSearching",),
        ),
        # A session gets its cards a moment later: that is no node without any.
        (scene(_NO_CARDS), ("ResourceNotRegistered",)),
        (scene(_REGISTERING, "no socket"), ("ResourceNotRegistered",)),
        (scene(_REGISTERING, "it ended", 3), ("ResourceNotRegistered",)),
        (scene(_BLOCKED, "mount it"), ("ResourceBlocked",)),
        (scene(SessionPhase.ENDED), ("ResourceNotRegistered",)),
        # Its device is listed as unhealthy, which is the agent's job done.
        (scene(_REGISTERED, cards=(state(health=HealthState.UNHEALTHY),)), ()),
        (scene(_REGISTERED, dra=(driver(),)), ()),
        (scene(_REGISTERED, dra=(driver(phase=_STANDBY, slices=SlicesState()),)), ()),
        (
            scene(_REGISTERED, dra=(driver(phase=_REGISTERING, reason="why"),)),
            ("DRANotRegistered",),
        ),
        (
            scene(_REGISTERED, dra=(driver(slices=SlicesState()),)),
            ("SlicesPending",),
        ),
        (
            scene(
                _REGISTERED,
                dra=(driver(slices=SlicesState(trouble="forbidden: do")),),
            ),
            ("SlicesNotPublished",),
        ),
    ],
)
def test_readiness(found: Scene, reasons: tuple[Kind, ...]) -> None:
    assert tuple(problem.kind for problem in unready(found.state())) == reasons
    assert len(found.unready()) == len(reasons)


def test_the_reason_that_a_resource_waits_is_a_fact() -> None:
    def facts(phase: SessionPhase, reason: str, registrations: int) -> dict[str, object]:
        (problem,) = unready(scene(phase, reason, registrations).state())
        return dict(problem.facts)

    known = {"service": RESOURCE, "phase": _REGISTERING, "again": False, "reason": "no socket"}
    assert facts(_REGISTERING, "no socket", 0) == known
    assert facts(_REGISTERING, "it ended", 3) == {**known, "again": True, "reason": "it ended"}
    assert facts(_BLOCKED, "mount it", 3) == {**known, "phase": _BLOCKED, "reason": "mount it"}


def test_not_ready_with_a_refused_config_and_ready_with_keys_that_wait() -> None:
    good = scene(_REGISTERED)
    waiting = replace(good.config, waiting=("resourceName",))
    assert replace(good, config=waiting).unready() == ()
    refused = replace(good.config, errors=("config.yaml:3:1: unknown key",))
    (problem,) = unready(replace(good, config=refused).state())
    assert problem.kind == "ConfigRefused"


def well(index: int) -> CardState:
    return state(
        index=index, uuid=f"U{index}", id_=f"U{index}", pci_bus_id=f"0000:{index:02x}:00.0"
    )


def dead(index: int, cause: Cause | None = Cause.DEAD, ago: float = 60) -> CardState:
    return fenced(well(index), "alive says 0", ago, cause)


LEFT = well(3)
"""A card that is no longer here."""
NEW = state(index=3, uuid="NEW", id_="NEW", pci_bus_id="0000:03:00.0")
"""Another one in its slot."""


def gone(ago: float, *cards: CardState) -> Timeline:
    """The card left so many seconds ago, and these are here."""
    return Timeline().left([LEFT], cards, time.monotonic() - ago)


def kinds(scene: Scene) -> list[Kind]:
    return [problem.kind for problem in problems(scene.state())]


def noted(scene: Scene) -> list[Kind]:
    return [problem.kind for problem in notes(scene.state())]


def names(problem: Problem) -> list[str]:
    return [card.name for card in problem.cards]


def test_all_is_well() -> None:
    scene = Scene(cards=(read(state()),))
    assert kinds(scene) == noted(scene) == []


def test_a_card_that_vanished_under_a_pod_is_a_problem() -> None:
    scene = Scene(holdings=Holdings(assignments=(held(state(), "yolo"),)))
    (problem,) = problems(scene.state())
    assert problem.kind == "DeviceMissing"
    assert problem.pods == ("default/yolo",)
    assert problem.facts == {"devices": ("WARBOY-0",)}


def test_stale_readings_are_a_problem() -> None:
    """A panel that shows old values as if they were new is worse than none."""
    scene = Scene(cards=(read(state(), age=9), read(state(index=1), age=16)))
    (problem,) = problems(scene.state())
    assert (problem.kind, names(problem)) == ("ReadingsStale", ["npu1"])
    scene.stale_after = 180.0
    assert kinds(scene) == []


def test_a_fault_of_the_agent_is_one_problem() -> None:
    scene = Scene(
        cards=(state(),), phase=SessionPhase.REGISTERING, reason="kubelet.sock is missing"
    )
    scene.config = replace(
        scene.config,
        errors=(
            "c.yaml:1:1: bad",
            "c.yaml:2:1: worse",
        ),
        waiting=("pluginDir",),
    )
    scene.holdings = Holdings(error="the socket is missing")
    scene.labels = LabelState(output="api", labels={"a": "b"}, error="403: give the role patch")
    scene.skipped = (
        SkippedDevice("/sys/x", "Permission denied", unread=True),
        SkippedDevice("/sys/y", "FPGA"),
    )
    found = {problem.kind: problem.facts for problem in problems(scene.state())}
    assert [*found] == [
        "ResourceNotRegistered",
        "ConfigRefused",
        "LabelsNotApplied",
        "EntryUnreadable",
    ]
    assert found["ResourceNotRegistered"]["reason"] == "kubelet.sock is missing"
    assert found["ConfigRefused"] == {"error": "c.yaml:1:1: bad"}, "the first one"
    assert found["LabelsNotApplied"] == {"error": "403: give the role patch"}
    unreadable = {"entries": ("/sys/x",), "error": "Permission denied"}
    assert found["EntryUnreadable"] == unreadable
    (note,) = notes(scene.state())
    assert (note.kind, note.facts) == ("ConfigWaitsForRestart", {"keys": "pluginDir"})
    scene.phase = SessionPhase.REGISTERED
    unknown = "AssignmentsUnknown"
    assert unknown in kinds(scene), "the kubelet is there, so that it is no consequence"


def test_a_condition_that_cannot_be_written_is_a_problem() -> None:
    condition = ConditionState(type="example.com/NPUReady", error="403: give the role patch")
    (note,) = problems(replace(Scene(cards=(read(state()),)).state(), condition=condition))
    assert note.kind == "ConditionNotWritten"
    assert note.facts == {"error": "403: give the role patch"}
    assert note.runbook == "npuconditionnotwritten"


def test_unusual_states_are_notes() -> None:
    unknown = state(health=HealthState.UNKNOWN, reason="the driver does not say")
    unlisted = state(index=1, missing=("pe1", "pe0-1"))
    scene = Scene(
        cards=(unknown, unlisted, state(index=2)), phase=SessionPhase.STANDBY, reason="by 7"
    )
    scene.disabled = frozenset({"npu2"})
    scene.labels = LabelState(output="nfd", labels={"a": "b"})
    assert kinds(scene) == []
    found = [*notes(scene.state())]
    assert [(note.kind, names(note)) for note in found] == [
        ("HealthUnknown", ["npu0"]),
        ("CardDisabled", ["npu2"]),
        ("DeviceWithheld", []),
        ("ResourceStandby", []),
        ("LabelsPending", []),
    ]
    assert {note.severity for note in found} == {"info"}
    assert found[0].facts == {"reason": "the driver does not say"}
    withheld = "no device node for core 1: /dev/npu1pe1 is missing"
    assert found[2].facts == {"device": "npu1", "reason": withheld}
    assert found[3].facts == {"service": RESOURCE, "reason": "by 7"}


def test_oddities_of_cards_are_one_note_for_all_of_them() -> None:
    odd = (("ProductUnknown", "RNGD+"), ("VersionUnreadable", "x"), ("VersionUnreadable", "x"))
    scene = Scene(cards=(state(index=0, oddities=odd), state(index=1, oddities=odd[:1])))
    assert kinds(scene) == []
    assert [(note.kind, names(note), note.facts) for note in notes(scene.state())] == [
        ("ProductUnknown", ["npu0", "npu1"], {"text": "RNGD+"}),
        ("VersionUnreadable", ["npu0"], {"text": "x"}),
    ]


def test_a_kernel_that_cannot_be_heard_is_noted() -> None:
    agent = Scene(cards=(state(),)).state()
    assert [*notes(agent)] == []
    (note,) = notes(replace(agent, kernel_error="Operation not permitted"))
    assert (note.kind, note.facts) == ("KernelUnheard", {"reason": "Operation not permitted"})


def test_a_node_of_the_host_that_is_missing_is_a_problem() -> None:
    agent = Scene(cards=(state(),)).state()
    lacking = replace(agent.snapshot, missing_nodes=("/dev/dma_heap/system",))
    (problem,) = problems(replace(agent, snapshot=lacking))
    assert (problem.kind, problem.severity) == ("HostNodeMissing", "warning")
    assert "/dev/dma_heap/system" in ENGLISH.text(problem)
    assert "containers.deviceNodes" in ENGLISH.remedy(problem)


def test_a_disabled_name_that_means_another_card_than_before_is_noted() -> None:
    scene = Scene(cards=(state(index=0), state(index=1), state(index=2)))
    scene.disabled = frozenset({"npu0", "npu1", scene.cards[2].id.lower()})
    state_ = replace(
        scene.state(),
        first_ids={"npu0": scene.cards[1].id, "npu1": scene.cards[1].id, "npu2": "another"},
    )
    found = [note for note in notes(state_) if note.subject == "card"]
    assert [(note.kind, names(note)) for note in found] == [
        ("DisabledNameMoved", ["npu0"]),
        ("CardDisabled", ["npu1"]),
        ("CardDisabled", ["npu2"]),
    ]
    assert found[0].facts == {"first": scene.cards[1].id}


def test_the_command_that_corrects_a_cordon_has_the_nodes_name() -> None:
    scene = Scene(cards=(state(index=1),))
    wrong = cordons({}, scene.state().snapshot, "not JSON").wrong
    found = problems(replace(scene.state(), cordons_lost={"npu9": ""}, cordons_wrong=wrong))
    remedies = " ".join(map(ENGLISH.remedy, found))
    assert "`kubectl annotate node node-7 npu-agent/cordoned-`" in remedies
    assert "`kubectl -n kube-system exec npu-agent-x7k2p -- npu-agent uncordon npu9`" in remedies


def test_an_incomplete_pool_is_one_problem() -> None:
    def found(slices: SlicesState) -> list[str]:
        state = scene(SessionPhase.REGISTERED, dra=(driver(slices=slices),)).state()
        return [note.runbook for note in problems(state)]

    assert found(SlicesState(published=True, incomplete=True)) == ["npudrapoolincomplete"]
    assert found(SlicesState(incomplete=True)) == ["npudraslicesnotpublished"]
    assert found(SlicesState(published=True)) == []
    assert found(SlicesState(published=True, foreign="a")) == ["npudrapreparefailing"]


def test_simulated_cards_are_a_note() -> None:
    real = state()
    simulated = replace(real, card=replace(real.card, simulated=True))
    assert noted(Scene(cards=(real,))) == []
    assert noted(Scene(cards=(simulated,))) == ["CardsSimulated"]


def test_fields_that_the_api_server_drops_are_a_note_and_no_problem() -> None:
    slices = SlicesState(published=True, dropped=("devices.taints", "sharedCounters"))
    state = scene(SessionPhase.REGISTERED, dra=(driver(slices=slices),)).state()
    assert problems(state) == ()
    (note,) = notes(state)
    assert note.kind == "PartitionsDropped"
    assert note.facts == {"fields": "devices.taints, sharedCounters"}


def test_a_claim_whose_card_is_gone_is_a_problem() -> None:
    gone = state(index=1, uuid="B")
    held = claim("train", state(uuid="A"), gone)
    admin = replace(claim("look", gone).devices[0], admin=True)
    looks = replace(claim("look", gone), devices=(admin,))
    found = scene(
        SessionPhase.REGISTERED, cards=(state(uuid="A"),), dra=(driver(held, looks),)
    ).state()
    (problem,) = problems(found)
    assert (problem.kind, problem.pods) == ("DeviceMissing", ("ml/train-pod",))
    assert problem.facts == {"devices": (held.devices[1].device,)}
    unknown = replace(found, snapshot=replace(found.snapshot, cards=(), complete=False))
    assert unknown.gone == ()


def test_a_certificate_that_is_refused_is_a_problem_and_without_one_the_agent_is_unready() -> None:
    def said(tls: TlsState) -> tuple[bool, list[Kind]]:
        found = replace(scene(SessionPhase.REGISTERED).state(), tls=tls)
        return bool(unready(found)), [problem.kind for problem in problems(found)]

    later, refused = time.time() + 60, "is not valid"
    assert said(TlsState(expires_at=later)) == (False, [])
    assert said(TlsState(expires_at=later, error=refused)) == (
        False,
        ["CertificateRefused"],
    )
    assert said(TlsState(error=refused)) == (
        True,
        ["CertificateMissing"],
    )
    assert said(TlsState(expires_at=1.0)) == (
        False,
        ["CertificateExpired"],
    )


@pytest.mark.parametrize(
    ("cause", "runbook"),
    [(Cause.DEAD, "npucardunhealthy"), (Cause.HOT, "nputemperaturehigh")],
)
def test_an_unhealthy_card_has_its_cause_its_pods_and_the_steps(cause: Cause, runbook: str) -> None:
    card = fenced(state(), "alive says 0", 60, cause)
    scene = Scene(cards=(card,))
    (problem,) = problems(scene.state())
    assert (problem.kind, problem.cause) == ("CardUnhealthy", cause)
    assert problem.facts["why"] == card.health
    assert problem.pods == ()
    assert problem.runbook == runbook
    scene.holdings = Holdings(assignments=(held(card, "yolo"),))
    (problem,) = problems(scene.state())
    assert problem.pods == ("default/yolo",)


def troubled() -> Scene:
    """As much trouble as there can be."""
    found = Scene(
        cards=(
            dead(0),
            read(well(1), age=600),
            read(well(2), temperature=95),
            read(well(3), temperature=101),
        ),
        phase=SessionPhase.REGISTERING,
        skipped=(SkippedDevice("/sys/x", "Permission denied", unread=True),),
        holdings=Holdings(assignments=(held(state(index=9), "lost"),)),
        labels=LabelState(output="api", labels={"a": "b"}, error="403: give the role patch"),
        dra=(
            driver(phase=SessionPhase.BLOCKED, reason="why"),
            driver(slices=SlicesState()),
            driver(slices=SlicesState(published=True, incomplete=True, foreign="a")),
        ),
        timeline=Timeline().left([well(4)], [], time.monotonic()),
    )
    found.config = replace(found.config, errors=("bad",))
    return found


def test_every_problem_has_a_remedy_or_says_it_itself() -> None:
    now = troubled().state()
    found = problems(now)
    assert len(found) == 14
    assert all(problem.runbook and of_problem(problem, now).command for problem in found)
    silent = [problem.kind for problem in found if not ENGLISH.remedy(problem)]
    assert silent == ["SlicesPending", "LabelsNotApplied"]


def test_the_most_harmful_comes_first() -> None:
    hot = read(well(3), temperature=95)
    held_, idle = dead(1), dead(2, Cause.HANGS)
    scene = Scene(
        cards=(idle, held_, hot, read(well(5), temperature=101)),
        phase=SessionPhase.REGISTERING,
        reason="kubelet.sock is missing",
        holdings=Holdings(assignments=(held(held_, "yolo"),)),
        timeline=Timeline().left([well(4)], [], time.monotonic() - 30),
    )
    scene.config = replace(scene.config, errors=("bad",))
    found = problems(scene.state())
    assert [(problem.kind, names(problem), problem.severity) for problem in found] == [
        ("ResourceNotRegistered", [], "critical"),
        ("CardUnhealthy", ["npu1"], "critical"),
        ("CardUnhealthy", ["npu2"], "critical"),
        ("CardVeryHot", ["npu5"], "critical"),
        ("CardMissing", ["npu4"], "warning"),
        ("CardHot", ["npu3"], "warning"),
        ("ConfigRefused", [], "warning"),
    ]


@pytest.mark.parametrize("cause", [Cause.DEAD, Cause.HOT])
def test_a_cause_of_every_card_is_one_problem_of_the_node(cause: Cause) -> None:
    scene = Scene(cards=tuple(dead(index, cause, 60 + index) for index in range(64)))
    (problem,) = problems(scene.state())
    assert (problem.kind, problem.cause) == ("AllCardsUnhealthy", cause)
    assert len(problem.cards) == 64
    assert problem.since == min(card.health.since for card in scene.cards)
    scene.holdings = Holdings(assignments=tuple(held(card, card.id) for card in scene.cards[:21]))
    now = scene.state()
    (problem,) = problems(now)
    words = of_problem(problem, now)
    assert words.command == "kubectl cordon node-7"
    assert not words.last_command, "no other card of this Node would take them"


@pytest.mark.parametrize(
    ("odd", "texts"),
    [
        (
            dead(7, Cause.HANGS),
            (
                "npu0, npu1, npu2, npu3 and 3 more: the driver reports the card dead (alive says "
                "0); npu7: it does not answer (alive says 0)"
            ),
        ),
        ("flapping", "the driver reports the card dead (alive says 0)"),
        ("cordoned", "the driver reports the card dead (alive says 0)"),
        ("gone", "the driver reports the card dead (alive says 0)"),
    ],
    ids=["hangs", "flapping", "cordoned", "gone"],
)
def test_a_node_without_a_usable_card_is_a_matter_of_the_host(odd: Any, texts: str) -> None:
    """Whatever the mix of causes, no command deletes all of its Pods."""
    cards = [dead(index) for index in range(7)]
    pods = [held(card, f"train-{card.card.index}") for card in cards]
    scene = Scene(cards=tuple(cards))
    if isinstance(odd, CardState):
        scene.cards = (*cards, odd)
    elif odd == "gone":
        scene.timeline = Timeline().left([well(7)], [], time.monotonic())
        pods.append(held(well(7), "train-7"))
    else:
        scene.cards = (*cards, well(7))
    if odd == "flapping":
        scene = scene.lasts(TrendKind.FLAPPING, well(7), 60)
    scene.holdings = Holdings(assignments=tuple(pods))
    cordoned = {well(7).id: "fan"} if odd == "cordoned" else {}
    now = replace(scene.state(), cordons=cordoned)
    found = problems(now)
    of_all = next(problem for problem in found if problem.kind == "AllCardsUnhealthy")
    words = of_problem(of_all, now)
    assert texts in words.text
    assert words.text.count("the driver or the host, not the cards") == 1
    assert words.command == "kubectl cordon node-7"
    assert "delete" not in " ".join(of_problem(problem, now).remedy for problem in found)
    assert [of_problem(problem, now).last_command for problem in found] == [""] * len(found)


def test_a_driver_that_took_all_its_cards_along_is_a_matter_of_the_host() -> None:
    pods = tuple(held(well(index), f"train-{index}") for index in range(2))
    timeline = Timeline().left([well(0), well(1)], [], time.monotonic())
    now = Scene(cards=(), timeline=timeline, holdings=Holdings(assignments=pods)).state()
    (problem,) = problems(now)
    words = of_problem(problem, now)
    assert (problem.kind, problem.severity) == ("AllCardsMissing", "critical")
    assert (words.command, words.last_command) == ("kubectl cordon node-7", "")


def test_the_last_usable_card_keeps_the_others_a_matter_of_cards() -> None:
    scene = Scene(cards=(dead(0), dead(1), well(2)))
    assert {problem.kind for problem in problems(scene.state())} == {"CardUnhealthy"}


def test_a_cause_of_some_cards_is_one_problem_that_names_them() -> None:
    scene = Scene(cards=(dead(0), dead(1), well(2), dead(3, Cause.HANGS)))
    assert [(problem.cause, names(problem)) for problem in problems(scene.state())] == [
        (Cause.DEAD, ["npu0", "npu1"]),
        (Cause.HANGS, ["npu3"]),
    ]


def test_a_problem_names_its_pods_and_the_command_that_deletes_them() -> None:
    cards = dead(0), dead(1), well(2)
    pods = held(cards[0], "a"), held(cards[0], "b;rm", namespace="ml"), held(cards[1], "c")
    now = Scene(cards=cards, holdings=Holdings(assignments=pods)).state()
    (problem,) = problems(now)
    assert problem.pods == ("default/a", "ml/b;rm", "default/c")
    deletes = "kubectl delete pod -n default a c && kubectl delete pod -n ml 'b;rm'"
    assert of_problem(problem, now).last_command == deletes


def test_a_gone_card_and_the_pods_that_hold_it_are_one_entry() -> None:
    timeline, pods = gone(30), (held(LEFT, "yolo"),)
    (problem,) = problems(Scene(timeline=timeline, holdings=Holdings(assignments=pods)).state())
    assert (problem.kind, names(problem)) == ("CardMissing", ["npu3"])
    assert (problem.severity, problem.pods) == ("critical", ("default/yolo",))
    assert problem.since == timeline.gone[0].since
    assert problem.facts == {"pci": "0000:03:00.0"}


def test_gone_cards_of_two_families_with_one_number_are_told_apart() -> None:
    free, used = (state(index=3, uuid=one, id_=one) for one in ("FREE", "USED"))
    now, pods = time.monotonic(), (held(used, "yolo"),)
    timeline = Timeline().left([used], [], now - 60).left([free], [], now - 30)
    holdings = Holdings(assignments=pods)
    scene = Scene(cards=(well(9),), timeline=timeline, holdings=holdings).state()
    found = problems(scene)
    assert {note.since: note.pods for note in found} == {now - 30: (), now - 60: ("default/yolo",)}
    on_a_host = replace(scene, invocation=Invocation())
    commands = {of_problem(problem, on_a_host).command for problem in found}
    assert commands == {"lspci"}, "the slot of neither is known"


def test_a_problem_is_as_severe_as_its_alert() -> None:
    """Else the page and the pager would sort them differently."""
    group = yaml.safe_load(
        (ROOT / "k8s/components/alerts/prometheusrule.yaml").read_text(encoding="utf-8")
    )
    rules = [rule for one in group["spec"]["groups"] for rule in one["rules"] if "alert" in rule]
    severities = {rule["alert"].lower(): rule["labels"]["severity"] for rule in rules}
    seen = {note.runbook: note.severity for note in problems(troubled().state())}
    without_alert = {"a-node-offers-no-npus-or-too-few"}
    assert len(seen.keys() - without_alert) == 12
    assert seen.items() - severities.items() == {(name, "warning") for name in without_alert}


def test_a_search_for_cards_needs_no_remedy() -> None:
    (note,) = problems(scene(SessionPhase.NO_CARDS, complete=False).state())
    assert note.kind == "ResourceSearching"
    assert ENGLISH.remedy(note) == ""


def at(celsius: float) -> tuple[Message]:
    return (Message("Temperature", facts={"celsius": celsius}),)


def hot(temperature: float, **more: Any) -> list[Problem]:
    found = Scene(cards=(read(state(), temperature=temperature),), **more).state()
    assert is_hot(found.snapshot.cards[0], found) == bool(problems(found))
    return list(problems(found))


def test_a_hot_card_is_a_problem_without_the_option() -> None:
    assert hot(HOT) == []
    (problem,) = hot(HOT + 0.1)
    assert (problem.kind, problem.runbook) == ("CardHot", "nputemperaturehigh")
    assert problem.facts["details"] == (at(HOT + 0.1),)
    (problem,) = hot(VERY_HOT + 0.1)
    assert (problem.kind, problem.runbook) == ("CardVeryHot", "nputemperaturecritical")


def test_several_hot_cards_are_one_problem_with_the_temperature_of_each() -> None:
    cards = read(well(0), temperature=91), read(well(1), temperature=92)
    (problem,) = problems(Scene(cards=cards).state())
    assert names(problem) == ["npu0", "npu1"]
    assert problem.facts["details"] == (at(91.0), at(92.0))


def test_the_option_makes_it_hot_earlier_and_never_later() -> None:
    assert hot(81.0, max_temperature=80.0)
    assert hot(HOT + 0.1, max_temperature=105.0)


def test_a_card_is_hot_where_the_alert_says_so() -> None:
    rules = (ROOT / "k8s/components/alerts/prometheusrule.yaml").read_text(encoding="utf-8")
    assert f"(npu:temperature_celsius) > {HOT:g}" in rules
    assert f"(npu:temperature_celsius) > {VERY_HOT:g}" in rules


def counted(ago: float | None) -> Scene:
    card = read(state())
    assert card.reading
    errors = (("axi_post_error", 3), ("pcie_error", 0))
    card = replace(card, reading=replace(card.reading, errors=errors))
    scene = Scene(cards=(card,))
    return scene if ago is None else scene.lasts(TrendKind.ERRORS, card, ago)


def test_errors_that_rise_are_a_problem_and_older_ones_a_note() -> None:
    (problem,) = problems(counted(60).state())
    assert problem.kind == "ErrorsRising"
    assert problem.facts["details"] == (("axi_post_error 3",),)
    assert noted(counted(60)) == []
    assert kinds(counted(None)) == []
    (note,) = notes(counted(None).state())
    assert (note.kind, note.facts) == ("ErrorsCounted", {"errors": "axi_post_error 3"})


def test_a_card_that_flaps_is_one_entry_whether_it_is_there_or_not() -> None:
    card, now = read(dead(0)), time.monotonic()
    away = Scene(timeline=Timeline().left([card], [], now))
    for scene in (Scene(cards=(card,)), away):
        (problem,) = problems(scene.lasts(TrendKind.FLAPPING, card, 60).state())
        assert (problem.kind, names(problem)) == ("CardFlapping", ["npu0"])
        assert problem.since == pytest.approx(now - 60, abs=1)


def test_two_cards_with_one_uuid_are_one_entry_that_names_both() -> None:
    cards = [
        replace(one, card=replace(one.card, uuid="SAME"))
        for one in (state(index=0, id_="A"), state(index=1, id_="B"))
    ]
    (problem,) = problems(Scene(cards=(*cards,)).state())
    assert (problem.kind, names(problem)) == ("SameUUID", ["npu0", "npu1"])
    assert problem.facts["details"] == (("SAME",), ("SAME",))


def test_a_card_that_was_exchanged_is_not_gone() -> None:
    scene = Scene(cards=(NEW,), timeline=gone(0, NEW))
    assert scene.state().timeline.gone
    assert kinds(scene) == noted(scene) == []


def test_a_pod_whose_card_was_replaced_is_a_problem_and_the_next_one_is_not() -> None:
    scene = Scene(cards=(NEW,))
    # The ledger knows the slot by which the ID was given out.
    kept = Usage("NEW", NEW.card.all_cores, held(LEFT, "yolo"))
    (note,) = problems(replace(scene.state(), usages=(kept,)))
    assert (note.kind, names(note), note.pods) == (
        "CardReplaced",
        ["npu3"],
        ("default/yolo",),
    )
    scene.holdings = Holdings(assignments=(held(NEW, "yolo"),))
    assert kinds(scene) == []
    by_claim = Scene(cards=(NEW,), dra=(driver(claim("c", LEFT)),)).state()
    pods = [one.pods for one in problems(by_claim) if one.kind == "CardReplaced"]
    assert pods == [("ml/c-pod",)]
    assert kinds(Scene(cards=(NEW,), dra=(driver(claim("c", NEW)),))) == []


def test_a_card_that_the_agent_before_had_is_missed() -> None:
    here = state(index=0, uuid="A", id_="A", pci_bus_id="0000:01:00.0")
    lost = state(index=6, uuid="B", id_="B", pci_bus_id="0000:85:00.0")
    recorded = {"A": keys_of(here.card), "B": keys_of(lost.card) | {"name:warboy-6"}}
    scene = Scene(cards=(here,), recorded=recorded)
    (problem,) = problems(scene.state())
    assert problem.kind == "EarlierCardMissing"
    assert problem.facts == {"earlier": ("npu6 (0000:85:00.0)",)}
    older = replace(scene, recorded={"B": keys_of(lost.card)})
    assert problems(older.state())[0].facts == {"earlier": ("B (0000:85:00.0)",)}
    scene.started -= 6 * 3600
    assert kinds(scene) == []
    (note,) = notes(scene.state())
    assert (note.kind, note.facts) == ("EarlierCardLongMissing", problem.facts)
    scene.complete = False
    assert noted(scene) == [], "it may be found yet"
    # In another slot, or another card in its slot, it is not missed.
    moved = state(index=6, uuid="B", id_="B", pci_bus_id="0000:86:00.0")
    other = state(index=6, uuid="C", id_="C", pci_bus_id="0000:85:00.0")
    for card in (moved, other):
        assert kinds(Scene(cards=(here, card), recorded=scene.recorded)) == []


def test_fewer_cards_than_the_config_expects_are_one_problem() -> None:
    expecting = Scene(cards=(well(0),), expected_cards=3)
    (problem,) = problems(expecting.state())
    assert problem.kind == "FewerCardsThanExpected"
    assert problem.facts == {"here": 1, "expected": 3}
    assert kinds(replace(expecting, expected_cards=1)) == []
    two = replace(expecting, expected_cards=2)
    two.timeline = gone(0)
    assert kinds(two) == ["CardMissing"]
    two.timeline = gone(7 * 3600)
    assert kinds(two) == ["FewerCardsThanExpected"], "its name is a note by now"
    two.holdings = Holdings(assignments=(held(LEFT, "yolo"),))
    assert kinds(two) == ["CardMissing"], "a Pod holds it: it is still named"


def test_the_expected_cards_are_missed_for_longer_than_those_before_the_restart() -> None:
    here, lost = state(index=0, uuid="A", id_="A"), state(index=1, uuid="B", id_="B")
    recorded = {"B": keys_of(lost.card)}
    scene = Scene(cards=(here,), recorded=recorded, expected_cards=2)
    assert kinds(scene) == ["EarlierCardMissing"]
    scene.started -= 6 * 3600
    assert kinds(scene) == ["FewerCardsThanExpected"]


def test_a_card_that_is_gone_is_a_problem_and_after_some_hours_a_note_for_a_day() -> None:
    scene = Scene(timeline=gone(3600))
    assert kinds(scene) == ["CardMissing"]
    assert noted(scene) == []
    scene.timeline = gone(7 * 3600)
    assert kinds(scene) == [], "the alert has ended too"
    assert noted(scene) == ["CardLongMissing"]
    scene.timeline = gone(25 * 3600)
    assert noted(scene) == []


def test_a_card_that_works_for_no_pod_is_noted() -> None:
    busy = read(state(), load=80)
    (note,) = notes(Scene(cards=(busy,)).state())
    assert (note.kind, names(note), note.severity) == ("LoadWithoutPod", ["npu0"], "info")
    assert note.facts["load"] == 81.0
    made_up = replace(busy, card=replace(busy.card, simulated=True))
    assert "LoadWithoutPod" not in noted(Scene(cards=(made_up,)))
    holds = Holdings(assignments=(held(busy, "yolo"),))
    assert noted(Scene(cards=(busy,), holdings=holds)) == []
    assert noted(Scene(cards=(read(state(), load=18),))) == []
    assert noted(Scene(cards=(busy,), holdings=Holdings(error="no socket"))) == [], "not known"
    rules = (ROOT / "k8s/components/alerts/prometheusrule.yaml").read_text(encoding="utf-8")
    assert "npu:core_utilization_ratio[10m])) > 20" in rules


# --- one cause, one problem ---------------------------------------------------------------------

_AWAY = "cannot get nodes: https://10.0.0.1: no connection (Connection refused)"
_FAULTS = (
    *("well", "dead", "hangs", "hot", "very hot", "stale", "errors", "link", "flaps", "gone"),
    *("dead+errors", "dead+stale", "dead+cordoned", "dead+held", "gone+cordoned", "gone+held"),
    *("dead+cordoned+held", "flaps+dead", "flaps+cordoned", "cordoned", "gone+flaps"),
)


@dataclass(frozen=True)
class Faults:
    """What is wrong with a node: by card, and with what is around it."""

    cards: tuple[str, ...]
    kubelet: bool = False
    """Whether it is away."""
    api: bool = False
    """Whether the API server is."""

    def state(self) -> AgentState:
        scene = Scene(phase=_REGISTERING if self.kubelet else _REGISTERED)
        if self.kubelet:
            scene.reason, scene.registrations = "kubelet.sock is missing", 1
            scene.dra = (driver(phase=_REGISTERING, reason="no socket"),)
        cards: list[CardState] = []
        left: list[CardState] = []
        pods, cordoned = [], {}
        for index, found in enumerate(self.cards):
            card, faults = read(well(index)), found.split("+")
            scene = scene.lasts(TrendKind.ERRORS, card, 60) if "errors" in faults else scene
            flaps = "flaps" in faults
            scene = scene.lasts(TrendKind.FLAPPING, card, 60) if flaps else scene
            if "held" in faults:
                pods.append(held(card, f"pod-{index}"))
            if "cordoned" in faults:
                cordoned[card.id] = "swap fan"
            (left if "gone" in faults else cards).append(_with(card, faults))
        scene.cards = (*cards,)
        error = "no socket" if self.kubelet else None
        scene.holdings = Holdings(assignments=(*pods,), error=error)
        scene.timeline = Timeline().left(left, cards, time.monotonic() - 30)
        labels = LabelState(output="api", labels={"a": "b"}, error=_AWAY)
        condition = ConditionState(type="a/Ready", error=_AWAY)
        here = {card.id for card in cards}
        now = replace(
            scene.state(),
            cordons={id_: why for id_, why in cordoned.items() if id_ in here},
            cordons_lost={id_: why for id_, why in cordoned.items() if id_ not in here},
        )
        if not self.api:
            return now
        away: dict[str, Any] = {
            "api_error": _AWAY,
            "node_error": _AWAY,
            "auto_pending_reason": _AWAY,
        }
        return replace(now, **away, labels=labels, condition=condition)


def _with(card: CardState, faults: list[str]) -> CardState:
    hotter = {"hot": 95.0, "very hot": 101.0}
    for fault in faults:
        if fault in hotter:
            card = read(card, temperature=hotter[fault])
        if fault == "stale":
            card = read(card, age=600)
        if fault == "link":
            card = replace(card, card=replace(card.card, lanes=(8, 16)))
        if fault in ("dead", "hangs"):
            card = fenced(card, "why", 60, Cause.DEAD if fault == "dead" else Cause.HANGS)
    return card


def causes(found: Faults) -> int:
    """How many causes a person would count."""
    kinds = {
        "dead": {"dead", "dead+errors", "dead+stale", "dead+held", "dead+cordoned+held"},
        "flaps": {"flaps", "flaps+dead", "gone+flaps"},
        **{one: {one} for one in (*_FAULTS[2:8], "gone", "gone+held")},
    }
    present = [name for name, kind in kinds.items() if not kind.isdisjoint(found.cards)]
    out = {"dead", "hangs", "flaps", "gone", "cordoned"}
    usable = any(out.isdisjoint(card.split("+")) for card in found.cards)
    # Where no card is left, all that are unhealthy are one matter of the host.
    of_host = not usable and {"dead", "hangs"} <= {*present}
    return len(present) - of_host + found.kubelet + found.api


@given(
    found=st.builds(
        Faults,
        st.lists(st.sampled_from(_FAULTS), max_size=8).map(tuple),
        st.booleans(),
        st.booleans(),
    )
)
def test_a_cause_is_one_problem(found: Faults) -> None:
    now = found.state()
    # Without the kubelet, cards that wait for nothing are its only consequence.
    away = found.kubelet and bool(now.snapshot.cards or now.dra)
    api = found.api
    told = problems(now)
    assert len(told) == causes(replace(found, kubelet=away, api=api)), [one.kind for one in told]
    entries = [*told, *notes(now)]
    assert not any(one in entries[:at] for at, one in enumerate(entries))
    for index, faults in enumerate(found.cards):
        what = [one for one in entries if f"npu{index}" in names(one)]
        assert len(what) <= 1 or "cordoned+held" in faults, what
    if 1 < len(found.cards) <= 4:
        # As many again make no entry more.
        twice = replace(found, cards=found.cards * 2)
        assert len(problems(twice.state())) == len(told)


@pytest.mark.parametrize("pending", ["", _AWAY])
def test_cards_are_called_served_only_while_they_are(pending: str) -> None:
    scene = Scene(cards=(read(well(0)),), holdings=Holdings(error="no answer"))
    now = replace(scene.state(), api_error=_AWAY, node_error=_AWAY, auto_pending_reason=pending)
    found = problems(now)
    assert [one.facts["served"] for one in found] == [not pending] * 2
    (away,) = [one for one in found if one.kind == "APIServerAway"]
    assert "NodeNotWatched" in [part.kind for part in away.parts]
