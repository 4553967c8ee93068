"""Which of the cluster's DeviceClasses serve a resource name, and which select nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from npu_agent.doctor.check import Verdict
from npu_agent.doctor.classes import DeviceClass, device_class, judged, selects
from npu_agent.outputs.dra.slices import slices
from tests.outputs.dra.cards import card, pool_of

DRIVER = "npu.furiosa.ai"
NPU = "beta.furiosa.ai/npu"
CLASSES = Path(__file__).parents[2] / "k8s/components/dra-classes/deviceclasses.yaml"
OURS = f'device.driver == "{DRIVER}"'


def published(*families: str, **options: Any) -> list[dict[str, Any]]:
    """The devices in the slices of a node with these cards."""
    devices = pool_of(*(card(name, at) for at, name in enumerate(families)), **options)
    made = slices(devices, driver=DRIVER, node="n1", uid="u", generation=1)
    return [device for each in made for device in each["spec"].get("devices", ())]


def shipped() -> dict[str, DeviceClass]:
    found = map(device_class, yaml.safe_load_all(CLASSES.read_text()))
    return {each.name: each for each in found}


def own(name: str = "own", *selectors: str, **more: str) -> DeviceClass:
    return DeviceClass(name=name, selectors=selectors, **{"resource": NPU, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "families"),
    [
        ("beta.furiosa.ai-npu", {"warboy", "rngd"}),
        ("furiosa.ai-warboy", {"warboy"}),
        ("furiosa.ai-rngd", {"rngd"}),
    ],
)
def test_our_classes_select_the_cards_that_they_are_for(name: str, families: set[str]) -> None:
    found = {
        device["attributes"]["arch"]["string"]
        for device in published("warboy", "rngd")
        if selects(shipped()[name], device, DRIVER)
    }
    assert found == families


def test_our_classes_for_parts_select_parts() -> None:
    parts = published("warboy", "rngd", partitions=True)
    counts = {
        name: sum(selects(each, device, DRIVER) for device in parts)
        for name, each in shipped().items()
        if "core" in name
    }
    assert counts == {
        "furiosa.ai-rngd-4core.24gb": 2,
        "furiosa.ai-rngd-2core.12gb": 4,
        "furiosa.ai-rngd-1core.6gb": 8,
        "furiosa.ai-warboy-1core.8gb": 2,
    }


ARCH = f'device.attributes["{DRIVER}"].arch'
CORES = f'device.attributes["{DRIVER}"].cores'


@pytest.mark.parametrize(
    "selector",
    [
        "",
        OURS,
        f'{OURS} && {ARCH} == "rngd"',
        f"{CORES}==8",
        'device.attributes["resource.kubernetes.io"].pcieRoot == "pci0000:16"',
        # Not understood, so nothing is said against it.
        f'{ARCH} == "warboy" || {ARCH} == "rngd"',
        f'!({ARCH} == "warboy" && {CORES} == 1 && {OURS})',
        f'{ARCH} != "warboy"',
        f'{ARCH} in ["rngd"] && {CORES} > 4',
        f'device.attributes["{DRIVER}"].?cores.orValue(1) == 8',
    ],
)
def test_what_may_select_a_card(selector: str) -> None:
    (rngd,) = published("rngd")
    assert selects(own("own", selector), rngd, DRIVER)


@pytest.mark.parametrize(
    "selector",
    [
        'device.driver == "npu.furiosa.a"',
        f'{OURS} && {ARCH} == "rngdd"',
        f'{ARCH} == "rngd"\n  && {CORES} == 16',
        f'device.attributes["{DRIVER}"].index == false',  # it is 0
        f'{CORES} > 4 && device.attributes["{DRIVER}"].architecture == "rngd"',
        'device.attributes["furiosa.ai"].arch == "rngd"',
    ],
)
def test_what_selects_no_card(selector: str) -> None:
    (rngd,) = published("rngd")
    assert not selects(own("own", selector), rngd, DRIVER)
    found = judged(DRIVER, [own("good", OURS, resource="a.example/b"), own("own", selector)],
                   [rngd], {})  # fmt: skip
    assert found.state is Verdict.NOTE
    assert found.detail == f"own: selects no device of {DRIVER} on any node"
    assert "compare its selectors with the devices' attributes" in found.remedy


def test_a_class_needs_all_of_its_selectors() -> None:
    (rngd,) = published("rngd")
    assert not selects(own("own", OURS, f'{ARCH} == "warboy"'), rngd, DRIVER)


def test_our_classes_may_wait_for_a_family_and_all_wait_for_the_first_card() -> None:
    every = [*shipped().values(), own("tail", f'{ARCH} == "warboy"', resource="a.example/b")]
    assert judged(DRIVER, every, published("warboy"), {}).state is Verdict.OK
    assert judged(DRIVER, every, (), {}).state is Verdict.OK
    assert judged(DRIVER, every, published("rngd"), {}).detail.startswith("tail: selects no")


def test_the_newest_of_several_classes_counts_and_else_the_first_by_name() -> None:
    old, new = "2026-11-22T07:00:00Z", "2026-11-22T07:00:01Z"
    rivals = [own("c", OURS, created=old), own("b", OURS, created=new), own("a", created=old)]
    found = judged(DRIVER, rivals, (), {})
    assert found.state is Verdict.WRONG
    assert found.detail == f"{NPU} is the resource name of a, b and c: the scheduler takes b"
    del rivals[1]
    assert judged(DRIVER, rivals, (), {}).detail.endswith("of a and c: the scheduler takes a")


def test_classes_of_others_are_none_of_ours() -> None:
    gpu = DeviceClass(name="gpu", resource="nvidia.com/gpu", selectors=("false",))
    twin = DeviceClass(name="twin", resource="nvidia.com/gpu")
    lure = DeviceClass(name="lure", resource="notfuriosa.ai/npu")
    found = judged(DRIVER, [gpu, twin, lure], published("rngd"), {"nvidia.com/gpu": "8"})
    assert found.state is Verdict.UNUSED
    assert judged(DRIVER, [gpu, own("own", OURS)], published("rngd"), {}).state is Verdict.OK
