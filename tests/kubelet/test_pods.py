"""Which Pods live on: the kubelet's notes as it writes them, and cgroups as kernels have them."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_agent import files
from npu_agent.kubelet import pods
from npu_agent.kubelet.pods import CHECKPOINT, Pods

A = "0b1c6a4e-52f5-4a4e-9d5e-3d4f4b5c6d01"
B = "1b1c6a4e-52f5-4a4e-9d5e-3d4f4b5c6d02"
NPU = "beta.furiosa.ai/npu"


def entry(uid: str, *devices: str, resource: str = NPU) -> dict[str, Any]:
    """As a kubelet 1.36 writes it: by NUMA node, with the answer to Allocate."""
    return {
        "PodUID": uid,
        "ContainerName": "main",
        "ResourceName": resource,
        "DeviceIDs": {"-1": list(devices[:1]), "0": list(devices[1:]) or None},
        "AllocResp": "CiIKC05QVV9ERVZOQU1FEhNucHUwcGUwLTE=",
    }


def noted(directory: Path, *entries: dict[str, Any]) -> None:
    data = {"PodDeviceEntries": list(entries) or None, "RegisteredDevices": {NPU: ["U0"]}}
    (directory / CHECKPOINT).write_text(json.dumps({"Data": data, "Checksum": 1}), encoding="utf-8")


def unified(root: Path, name: str, *, populated: bool = True) -> Path:
    """A cgroup of version 2."""
    top = root / "sys/fs/cgroup"
    made = top / name
    made.mkdir(parents=True, exist_ok=True)
    (top / "cgroup.controllers").touch()
    (made / "cgroup.events").write_text(f"populated {populated:d}\nfrozen 0\n", encoding="utf-8")
    return made


def by_controller(root: Path, name: str, *, processes: int) -> None:
    """A cgroup of version 1."""
    for controller in ("memory", "pids"):
        made = root / "sys/fs/cgroup" / controller / name
        made.mkdir(parents=True)
        (made / "cgroup.procs").touch()  # empty for who is in another PID namespace
    (root / "sys/fs/cgroup/pids" / name / "pids.current").write_text(
        f"{processes}\n", encoding="utf-8"
    )


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.fields["reason"] for record in caplog.records if hasattr(record, "fields")]


async def test_the_kubelets_checkpoint_has_the_pods_of_each_device(tmp_path: Path) -> None:
    pods = Pods(tmp_path, tmp_path)
    assert await pods.device_holders() == {}
    noted(tmp_path)
    assert await pods.device_holders() == {}
    noted(tmp_path, entry(A, "U0", "U1"), entry(B, "U1"), entry(B, "U0", resource="other/npu"))
    assert await pods.device_holders() == {
        (NPU, "U0"): {A},
        (NPU, "U1"): {A, B},
        ("other/npu", "U0"): {B},
    }


async def test_a_plugin_with_more_devices_than_pod_resources_is_read_for_is_left_out(
    tmp_path: Path,
) -> None:
    """Its Pods are in no list that is read: each note would be compared with each card."""
    many = [f"{number}" for number in range(pods.MOST + 1)]
    noted(tmp_path, entry(A, *many, resource="other/slots"), entry(B, *many[1:], resource=NPU))
    assert await Pods(tmp_path, tmp_path).device_holders() == {(NPU, id_): {B} for id_ in many[1:]}


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"Data": {"PodDeviceEntries": [1]}}', "[" * 9999),
        json.dumps({"Data": {"PodDeviceEntries": [entry(A) | {"DeviceIDs": ["U0"]}]}}),
    ],
)
async def test_notes_in_another_form_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (tmp_path / CHECKPOINT).write_text(content, encoding="utf-8")
    pods = Pods(tmp_path, tmp_path)
    for _ in range(2):
        assert await pods.device_holders() == {}
    (reason,) = reasons(caplog)
    assert reason.startswith(f"{tmp_path}/{CHECKPOINT}: ")


@pytest.mark.parametrize(
    "name",
    [
        f"kubepods/pod{A}",
        f"kubelet/kubepods/burstable/pod{A}",
        f"kubepods.slice/kubepods-pod{A.replace('-', '_')}.slice",
        f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{A.replace('-', '_')}.slice",
    ],
)
async def test_a_pod_lives_as_long_as_its_cgroup_has_processes(tmp_path: Path, name: str) -> None:
    pods = Pods(tmp_path, tmp_path)
    made = unified(tmp_path, name)
    unified(tmp_path, f"kubepods/pod{B}", populated=False)
    assert await pods.running({A, B}) == {A}
    assert await pods.running({B}) == frozenset()
    assert await pods.running(()) == frozenset()
    (made / "cgroup.events").write_text("populated 0\nfrozen 0\n", encoding="utf-8")
    assert await pods.running({A}) == frozenset()
    (made / "cgroup.events").write_text("populated 1\nfrozen 0\n", encoding="utf-8")
    assert await pods.running({A}) == {A}
    (made / "cgroup.events").unlink()
    made.rmdir()
    assert await pods.running({A}) == frozenset()


async def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    by_controller(tmp_path, f"kubepods/besteffort/pod{A}", processes=2)
    by_controller(tmp_path, f"kubepods/besteffort/pod{B}", processes=0)
    assert await Pods(tmp_path, tmp_path).running({A, B}) == {A}


async def test_a_pod_lives_if_any_cgroup_with_its_name_has_processes(tmp_path: Path) -> None:
    """The kubelet's `cgroupRoot` was changed, or another kubelet runs on this host."""
    names = [f"{root}/kubepods/pod{A}" for root in ("a", "b", "c")]
    made = [unified(tmp_path, name, populated=False) for name in names]
    pods = Pods(tmp_path, tmp_path)
    assert await pods.running({A}) == frozenset()
    for each in made:
        (each / "cgroup.events").write_text("populated 1\nfrozen 0\n", encoding="utf-8")
        assert await pods.running({A}) == {A}
        (each / "cgroup.events").write_text("populated 0\nfrozen 0\n", encoding="utf-8")


async def test_a_file_of_a_cgroup_is_read_with_a_bound(tmp_path: Path) -> None:
    events = unified(tmp_path, f"kubepods/pod{A}") / "cgroup.events"
    events.write_text("populated 0\n".rjust(1 << 20), encoding="utf-8")
    assert await Pods(tmp_path, tmp_path).running({A}) == {A}


GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV)


def fail(monkeypatch: pytest.MonkeyPatch, call: str, path: Path, number: int) -> None:
    """Listing a directory, or opening or reading a file, fails."""
    of: Any = os if call == "scandir" else files
    function: Callable[..., Any] = getattr(of, call)

    def failing(given: Path, *rest: object, **more: object) -> Any:
        if given == path:
            raise OSError(number, os.strerror(number), str(given))
        return function(given, *rest, **more)

    monkeypatch.setattr(of, call, failing)


@pytest.mark.parametrize("call", ["scandir", "content"])
@pytest.mark.parametrize("number", [errno.ENODEV, errno.EACCES], ids=errno.errorcode.get)
async def test_a_cgroup_that_cannot_be_read_lives_unless_it_has_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
    call: str,
) -> None:
    unified(tmp_path, f"kubepods/besteffort/pod{A}")
    path = unified(tmp_path, f"kubepods/burstable/pod{B}")
    path = path.parent if call == "scandir" else path / "cgroup.events"
    fail(monkeypatch, call, path, number)
    pods = Pods(tmp_path, tmp_path)
    for _ in range(2):
        assert await pods.running({A, B}) == ({A} if number in GONE else {A, B})
    assert reasons(caplog) == ([] if number in GONE else [f"{path}: {os.strerror(number)}"])


async def test_without_cgroups_only_the_kubelet_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pods = Pods(tmp_path, tmp_path)
    (tmp_path / files.SIMULATION).touch()
    assert await pods.running({A}) == frozenset()
    assert caplog.text == ""
    (tmp_path / files.SIMULATION).unlink()
    for _ in range(2):
        assert await pods.running({A}) == frozenset()
    assert reasons(caplog) == [f"{tmp_path}/sys/fs/cgroup: this is missing: mount it here"]


async def test_a_kernel_that_does_not_answer_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(files, "content", lambda *_, **__: go_on.wait(20))
    unified(tmp_path, f"kubepods/pod{A}", populated=False)
    pods = Pods(tmp_path, tmp_path, deadline=0.05)
    for _ in range(2):
        assert await pods.running({A, B}) == {A, B}
    (record,) = caplog.records
    assert "withholding their devices" in record.message
    assert "sys/fs/cgroup" in reasons(caplog)[0]
    go_on.set()
