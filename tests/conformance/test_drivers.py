"""Our driver passes each item; the Kubernetes project's example falls short as the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.cluster.build import DRA_EXAMPLE_DRIVER, ensure_binaries
from tests.conformance.__main__ import judge
from tests.outputs.deviceplugin.helpers import short_directory

PAGE = Path(__file__).with_name("README.md")
OURS = (
    f"{sys.executable} -m npu_agent run --simulate warboy=2,rngd=2 --host-root $HOST_ROOT "
    "--plugin-dir $KUBELET_DIR/device-plugins --allocation-api dra --labels-output none "
    "--events false --metrics-listen 127.0.0.1:0"
)
EXAMPLE = (
    "--cdi-root $CDI_DIR --kubelet-plugins-directory-path $KUBELET_DIR/plugins "
    "--kubelet-registrar-directory-path $KUBELET_DIR/plugins_registry"
)


async def verdicts(name: str, command: str) -> dict[str, str]:
    """The word for each item; what came is printed."""
    with short_directory() as directory:
        judged = [verdict async for verdict in judge(name, command, directory)]
    print(*judged, sep="\n")
    return {one.item.name: one.word for one in judged}


def page() -> dict[str, str]:
    """The word for each item that the page says the example does not pass."""
    text = PAGE.read_text(encoding="utf-8")
    (absent,) = re.findall(r"\(([^()]*) are not applicable\)", text)
    failed = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    words = {"NOT APPLICABLE": [absent], "FAIL": failed}
    return {
        name: word
        for word, cells in words.items()
        for cell in cells
        for name in re.findall("`([a-z-]+)`", cell)
    }


async def test_ours_passes_each_item() -> None:
    found = await verdicts("npu.furiosa.ai", OURS)
    assert found == dict.fromkeys(found, "PASS")
    assert f"for each of {len(found)} items" in PAGE.read_text(encoding="utf-8")
    assert page().keys() <= found.keys()


async def test_the_example_driver_falls_short_as_the_page_says() -> None:
    program = ensure_binaries(DRA_EXAMPLE_DRIVER)["dra-example-kubeletplugin"]
    found = await verdicts("gpu.example.com", f"{program} {EXAMPLE}")
    assert found == dict.fromkeys(found, "PASS") | page()
