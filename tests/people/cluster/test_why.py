"""What `kubectl npu why` says of a Pod: the scheduler's words, and facts that are true alone."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from npu_agent.kube.objects import ResourceClaim
from npu_agent.people.cluster import why as why_module
from npu_agent.people.cluster.objects import Cluster, Pod
from npu_agent.people.cluster.why import Explanation, Fact, lines, why
from tests.people.cluster.build import (
    DRIVER,
    NPU,
    TYPES,
    WORDS,
    Json,
    claim,
    claims,
    class_,
    cluster,
    cut,
    device,
    held,
    node,
    pod,
    read,
    request,
    slice_,
    thing,
)

CARDS = f'device.attributes["{DRIVER}"].cores == 8'
SAID = "0/2 nodes are available: 2 Insufficient beta.furiosa.ai/npu."


def answer(asked: Json, *objects: Json, refused: tuple[str, ...] = ()) -> Explanation:
    there = cluster(*objects)
    own = Cluster(claims=there.claims, templates=there.templates)
    kept = dict.fromkeys(refused, "forbidden")
    fields: dict[str, Any] = {name: getattr(there, name) for name in there.__struct_fields__}
    fields |= {TYPES[kind][0]: () for kind in refused} | {"refused": kept}
    return why(read(Pod, asked), own, Cluster(**fields), WORDS)


def facts(asked: Json, *objects: Json, refused: tuple[str, ...] = ()) -> dict[str, str]:
    """The facts by subject; several of one subject a line each."""
    found: dict[str, str] = {}
    for fact in answer(asked, *objects, refused=refused).facts:
        before = found.get(fact.subject)
        found[fact.subject] = f"{before}\n{fact.text}" if before else fact.text
    return found


def waits(requests: dict[str, str] | None = None, said: str = SAID, **spec: Any) -> Json:
    unscheduled = {"type": "PodScheduled", "status": "False", "message": said}
    return pod(requests=requests, status={"conditions": [unscheduled]}, **spec)


CLAIMED = waits(resourceClaims=claims(npu="mine"))
MINE = claim("mine")


def test_a_pod_that_no_scheduler_has_reported_on() -> None:
    found = answer(pod(requests={NPU: "2"}, schedulerName="kai"))
    assert found.sentence == "Pod ml/train is Pending; no scheduler has reported on it (kai)."
    assert found.scheduler is None


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (pod(on="n1"), "Pod ml/train is on Node n1: its phase is Running."),
        (pod(status={"phase": "Failed"}), "Pod ml/train has ended: its phase is Failed."),
        (pod(metadata={"deletionTimestamp": "t"}), "Pod ml/train is being deleted."),
    ],
)
def test_pods_that_do_not_wait(asked: Json, sentence: str) -> None:
    assert answer(asked).sentence == sentence


@pytest.mark.parametrize(
    ("name", "objects", "fact"),
    [
        (
            "beta.furiosa.ai/npo",
            [node("n1", {NPU: "1"})],
            f"no Node offers it; did you mean {NPU}?",
        ),
        ("other/x", [node("n1", {NPU: "1"})], f"no Node offers it; there are {NPU}"),
        ("other/x", [node("n1")], "no Node offers it"),
        (
            "furiosa.ai/rngd-4core.24gb",
            [node("n1", {"furiosa.ai/rngd": "1"})],
            (
                "no Node offers it: an administrator offers parts of cards by "
                "`coresPerDevice`, or with DRA by `dra.partitions`"
            ),
        ),
        (
            "furiosa.ai/rngb",
            [class_("whole", extended="furiosa.ai/rngd")],
            "no Node offers it; did you mean furiosa.ai/rngd?",
        ),
        (
            "deviceclass.resource.kubernetes.io/hole",
            [class_("whole")],
            "DeviceClass hole does not exist; did you mean whole?",
        ),
        (
            NPU,
            [
                node("n1", {NPU: "3"}),
                node("n2", {NPU: "2"}),
                node("n10", {NPU: "0"}),
                pod("a", {NPU: "2"}, on="n1"),
            ],
            (
                "Nodes offer it: n2 (2 of 2 allocatable, Pods have 0), n1 (3 of 3 allocatable, "
                "Pods have 2)"
            ),
        ),
    ],
)
def test_names_and_where_they_are_offered(name: str, objects: list[Json], fact: str) -> None:
    found = facts(waits({name: "1"}), *objects)
    assert found["requests"] == f"1 {name}"
    assert found[name] == fact


def test_a_resource_that_dra_serves() -> None:
    found = facts(waits({NPU: "1"}), class_(extended=NPU), node("n1"), *cut("n1", "npu0"))
    assert found[NPU] == (
        f"DeviceClass {DRIVER} serves it by DRA: 1 card, 14 parts published, of which 1 card, "
        f'14 parts meet device.driver == "{DRIVER}" (DeviceClass {DRIVER}): n1 has 1 card, '
        "14 parts; free: 1 card, 14 parts"
    )


TEMPLATE = waits(resourceClaims=[{"name": "npu", "resourceClaimTemplateName": "one-npu"}])


@pytest.mark.parametrize(
    ("asked", "objects", "fact"),
    [
        (CLAIMED, [], "ResourceClaim mine does not exist"),
        (CLAIMED, [claim("nine")], "ResourceClaim mine does not exist; did you mean nine?"),
        (TEMPLATE, [], "ResourceClaimTemplate one-npu does not exist"),
        (
            TEMPLATE,
            [thing("ResourceClaimTemplate", "one-npu", "ml", spec={"spec": {}})],
            (
                "no ResourceClaim has been created from template one-npu yet: "
                "see `kubectl describe pod`"
            ),
        ),
        (
            CLAIMED,
            [MINE, class_("npu.furiosa.ia")],
            f"request npu: DeviceClass {DRIVER} does not exist; did you mean npu.furiosa.ia?",
        ),
        (
            CLAIMED,
            [held("mine", "n1", "npu-0", by="other")],
            "ResourceClaim mine has npu-0 of pool n1\nResourceClaim mine is in use by other",
        ),
        (CLAIMED, [MINE, class_()], "request npu for 1 device: none published"),
    ],
)
def test_claims(asked: Json, objects: list[Json], fact: str) -> None:
    assert facts(asked, *objects)["claim npu"] == fact


def test_how_many_devices_meet_each_selector() -> None:
    own = claim("mine", request("npu", CARDS))
    other = {**device("gpu0"), "attributes": {}}
    slices = [*cut("n1", "npu0", "npu1"), *cut("n2", "npu0"), slice_("n3", other, driver="gpu.com")]
    assert facts(CLAIMED, own, class_(), *slices)["claim npu"] == (
        f"request npu for 1 device: 3 cards, 42 parts, 1 other device published, of which 3 cards, "
        f'42 parts meet device.driver == "{DRIVER}" (DeviceClass {DRIVER}), of which 3 cards meet '
        f"{CARDS} (request npu): n1 has 2 cards, n2 has 1 card; free: 3 cards"
    )


def requested(exactly: Json, *objects: Json) -> str:
    """The fact about a request with these fields."""
    own = claim("mine", request("npu", **exactly))
    return facts(CLAIMED, own, class_(), *objects)["claim npu"]


def test_a_request_has_its_count_and_the_devices_that_are_free() -> None:
    """Free are those that no claim has, also in part, and that no taint bars."""
    slices = cut("n1", "npu0", "npu1", "npu2")
    for part in slices[0]["spec"]["devices"]:
        if part["name"].startswith("npu2"):
            part["taints"] = [{"key": f"{DRIVER}/unhealthy", "effect": "NoSchedule"}]
    taken = held("theirs", "n1", "npu0-cores-0-3", by="user")
    answers = requested({"count": 4}, *slices, taken)
    assert answers.startswith("request npu for 4 devices: 3 cards, 42 parts published, of which ")
    assert answers.endswith(": n1 has 3 cards, 42 parts; free: 1 card, 21 parts")
    every = requested({"allocationMode": "All"}, *slices, held("all", "n1", "npu0", "npu1"))
    assert every.startswith("request npu for all devices: ")
    assert every.endswith("; free: none")


@pytest.mark.parametrize(
    ("objects", "refused"),
    [
        (cut("n1", "npu0"), ("ResourceClaim",)),
        ([slice_("n1", device("gpu0"), driver="gpu.com")], ()),
    ],
    ids=["claims that may not be read", "another vendor's devices"],
)
def test_free_devices_that_are_not_known_are_not_counted(
    objects: list[Json], refused: tuple[str, ...]
) -> None:
    own = Cluster(claims=(read(ResourceClaim, claim("mine")),))
    there = cluster(*objects, class_(DRIVER, "true"))
    fields: dict[str, Any] = {name: getattr(there, name) for name in there.__struct_fields__}
    fields |= {"refused": dict.fromkeys(refused, "forbidden")}
    texts = [fact.text for fact in why(read(Pod, CLAIMED), own, Cluster(**fields), WORDS).facts]
    (text,) = [text for text in texts if text.startswith("request npu")]
    assert "meet true" in text
    assert "free" not in text


def test_the_scheduling_gates_of_a_pod() -> None:
    gated = waits({NPU: "1"}, schedulingGates=[{"name": "kueue.x-k8s.io/admission"}])
    assert facts(gated)["scheduling gates"] == (
        "kueue.x-k8s.io/admission: no scheduler places the Pod until they are removed"
    )
    assert "scheduling gates" not in facts(waits({NPU: "1"}))


def test_after_a_while_no_selector_is_judged_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=1.25)
    monkeypatch.setattr(why_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    own = claim("mine", request("npu", *(f"{n} < 9" for n in range(9))))
    found = facts(CLAIMED, own, class_(), slice_("n1", device("npu-0")))["claim npu"]
    assert found.count("of which 1 card meet") == 4
    assert found.endswith("how many meet 3 < 9 (request npu): the selectors take more than 5 s")


def test_a_selector_that_fails_on_a_device_names_it() -> None:
    own = claim("mine", request("npu", f'device.attributes["{DRIVER}"].speed > 1'))
    found = facts(CLAIMED, own, class_(), slice_("n1", device("npu-0"), device("npu-1")))
    assert "of which none meet" in found["claim npu"]
    assert "it fails on 2, as on npu-0: Key not found" in found["claim npu"]


def test_alternatives_are_counted_one_by_one() -> None:
    first = [{"name": f"f{n}", "deviceClassName": name} for n, name in enumerate((DRIVER, "no"))]
    found = facts(CLAIMED, claim("mine", {"name": "r", "firstAvailable": first}), class_())
    assert found["claim npu"].splitlines() == [
        "request r/f0 for 1 device: none published",
        f"request r/f1: DeviceClass no does not exist; there are {DRIVER}",
    ]


def test_a_node_by_its_cards_holders_taints_and_cordons() -> None:
    broken: Json = {"taints": [{"key": f"{DRIVER}/unhealthy", "effect": "NoSchedule"}]}
    slices = cut("n1", "npu0", "npu1")
    slices[0]["spec"]["devices"].append(device("npu2", index=2, **broken))
    objects = [
        node(
            "n1",
            spec={
                "unschedulable": True,
                "taints": [
                    {"key": "team", "value": "ml", "effect": "NoSchedule"},
                    {"key": "soft", "effect": "PreferNoSchedule"},
                ],
            },
            metadata={"annotations": {"npu-agent/cordoned": '{"npu0": "fan"}'}},
        ),
        *slices,
        held("theirs", "n1", "npu0-cores-0-3", by="user"),
        pod("user", on="n1", resourceClaims=claims(c="theirs")),
    ]
    found = facts(waits({NPU: "1"}), *objects)
    assert found["n1"] == (
        "2 of 3 cards healthy; 12 of 24 cores free, the widest free device has 8; cordoned; "
        'taint team=ml:NoSchedule; cards cordoned: {"npu0": "fan"}; '
        f"taint {DRIVER}/unhealthy:NoSchedule on npu2; in use by ml/user"
    )


def test_a_taint_rule_is_named() -> None:
    spec = {
        "deviceSelector": {"pool": "n1", "device": "npu-0"},
        "taint": {"key": "repair", "value": "fan", "effect": "NoExecute"},
    }
    found = facts(CLAIMED, thing("DeviceTaintRule", "fan", spec=spec))
    assert found["DeviceTaintRule fan"] == "taint repair=fan:NoExecute on device npu-0, pool n1"


def test_a_pod_that_asks_for_nothing() -> None:
    assert facts(waits({"cpu": "1"}), node("n1", {NPU: "1"})) == {
        "requests": "no NPU and no other device"
    }


def test_objects_that_may_not_be_read_are_not_judged() -> None:
    objects = [MINE, node("n1", {NPU: "1"}), pod("a", {NPU: "1"}, on="n1")]
    assert set(facts(CLAIMED, *objects, refused=("DeviceClass", "Node"))) == {"requests"}
    asked = waits({NPU: "1"})
    assert facts(asked, *objects, refused=("Pod",))[NPU] == (
        "Nodes offer it: n1 (1 of 1 allocatable)"
    )


def test_the_devices_of_a_pod_that_runs() -> None:
    placed = pod("train", on="n1", resourceClaims=claims(npu="mine"))
    placed["status"]["containerStatuses"] = [
        {
            "name": "main",
            "allocatedResourcesStatus": [
                {"name": "claim:npu/r", "resources": [{"resourceID": "d", "health": "Unhealthy"}]}
            ],
        }
    ]
    slices = cut("n1", "npu0")
    assert facts(placed, held("mine", "n1", "npu0-cores-0-3", by="train"), *slices) == {
        "claim/mine": "npu0, cores 0-3",
        "claim:npu/r": "d is Unhealthy",
    }


def test_nodes_of_which_the_same_is_true_share_a_line() -> None:
    texts = ["full", "empty", "full", "full", "full", *(f"{n} free" for n in range(30))]
    found = Explanation(
        "It is.", None, tuple(Fact(f"n{at}", text) for at, text in enumerate(texts, 1))
    )
    shown = lines(found).splitlines()
    assert shown[1:3] == ["  n1, n3, n4 and 1 more: full", "  n2: empty"]
    assert shown[21:] == ["  and 12 lines more: `-o wide` has them"]
    assert lines(found, each=True).count("full") == 4
