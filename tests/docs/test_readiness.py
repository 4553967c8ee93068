"""Every reason for which the agent is not ready is in the pages, in the words of the code."""

from __future__ import annotations

from dataclasses import replace

from npu_agent.core.problems import unready
from npu_agent.core.state import ConfigState, SessionPhase, SlicesState, TlsState
from tests.outputs.helpers import DRIVER, RESOURCE
from tests.outputs.web.helpers import Scene, driver

from .pages import page

REASONS = {
    f"{RESOURCE}: ": "not held open by the kubelet",
    f"DRA driver {DRIVER}: ": "by DRA, the driver is not registered or its cards are not published",
    "config: ": "the config file is refused",
    "the certificate of metrics.tls is missing": "`metrics.tls` has had no good certificate",
    "the CDI specs cannot be written: ": "CDI specs cannot be written",
}
"""How each begins, and what the table of the probes says of it."""


def everything_is_wrong() -> list[str]:
    scene = Scene(
        complete=False,
        phase=SessionPhase.REGISTERING,
        config=ConfigState(loaded_at=0.0, error="x"),
        dra=(driver(phase=SessionPhase.REGISTERING), driver(slices=SlicesState())),
    )
    state = replace(scene.state(), tls=TlsState(error="x"), cdi_error="x")
    return list(unready(state))


def test_the_table_of_the_probes_has_every_reason() -> None:
    (row,) = [
        line for line in page("docs/install.md").text.splitlines() if line.startswith("| readiness")
    ]
    found = everything_is_wrong()
    assert {begin for begin in REASONS for each in found if each.startswith(begin)} == {*REASONS}
    assert [each for each in found if not each.startswith(tuple(REASONS))] == []
    assert [words for words in REASONS.values() if words not in row] == []
