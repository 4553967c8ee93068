"""Attacks by cards and their driver: what a file below /sys may say, be, or be called."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

from npu_agent.people.simulator import FAULTS
from tests.chaos.table import attack
from tests.chaos.world import World, replaced


def folder(here: World) -> Path:
    """Where the driver describes the card npu0."""
    return (here.root / "sys/class/npu_mgmt/npu0_mgmt").resolve()


@attack()
async def every_fault(here: World) -> None:
    """Each fault that the simulator knows, one after the other, on one card.

    The other card stays healthy; the first one recovers without help.
    """
    for fault in FAULTS:
        await here.fault("npu0", fault)
        await asyncio.sleep(1.5)
        await here.works("npu1")
        await here.fault("npu0", "back")
        await here.well()


@attack(short=True)
async def noise_from_a_card(here: World) -> None:
    """Random bytes in every file of a card's folder, 30 times.

    The other card stays healthy; control characters reach no log and no page.
    """
    files = {
        path: path.read_bytes()
        for path in folder(here).iterdir()
        if path.is_file() and not path.is_symlink()
    }
    chance = random.Random(1)
    for _ in range(30):
        for path in files:
            noise = chance.randbytes(chance.choice((0, 1, 30, 5000)))
            path.write_bytes(b"\x1b]0;attack\x07" + noise)
        await asyncio.sleep(0.1)
    await here.pages()
    await here.works("npu1")
    for path, content in files.items():
        path.write_bytes(content)
    await here.well()


@attack(short=True)
async def files_without_end(here: World) -> None:
    """A card's files are sparse ones of 4 GiB, and links to /dev/zero.

    At most 16 MiB more memory; the other card stays healthy.
    """
    with here.grows_by(16):
        for name in ("device_uuid", "alive", "heartbeat", "busname", "fw_version"):
            for what in ("sparse", "/dev/zero"):
                with replaced(folder(here) / name, what):
                    await asyncio.sleep(1.5)
                    await here.works("npu1")


@attack()
async def files_that_are_something_else(here: World) -> None:
    """Each of a card's files in turn is a pipe, a folder, a link to itself, missing.

    The other card stays healthy; the first one recovers.
    """
    for path in sorted(folder(here).iterdir()):
        if path.is_symlink() or not path.is_file():
            continue
        for what in ("pipe", "folder", "loop", "missing"):
            with replaced(path, what):
                await asyncio.sleep(0.3)
                await here.works("npu1")


NAMES = (
    b"npu-1_mgmt", b"npu99999999999999999999_mgmt", b"npu_mgmt", b"npu0_mgmt.old", b"npu01_mgmt",
    b"\xff\xfe", b"npu7_mgmt\n", b"npu8_mgmt\x1b[2J", "npu\u0663_mgmt".encode(), b"..npu9_mgmt",
    b"npu 2_mgmt", b"npu3pe0-99999999", b"x" * 255, b"rngd!npu5mgmt", b"npu0pe0pe0",
)  # fmt: skip


@attack()
async def hostile_names(here: World) -> None:
    """Folders of the driver and nodes in /dev with names that are no cards': signs, digits, bytes.

    Only real cards are served; the names reach no log as they are.
    """
    made = []
    for directory in (here.root / "sys/class/npu_mgmt", here.root / "dev"):
        for name in NAMES:
            path = os.path.join(os.fsencode(directory), name)  # noqa: PTH118 (bytes)
            if not os.path.lexists(path):
                os.mkdir(path)  # noqa: PTH102
                made.append(path)
    await asyncio.sleep(12)  # the agent searches every ten seconds
    await here.pages()
    await here.pod()
    for path in made:
        os.rmdir(path)  # noqa: PTH106


@attack()
async def thousands_of_names(here: World) -> None:
    """20,000 foreign entries beside the cards in the driver's folder.

    Probes are answered, and Pods get NPUs.
    """
    directory = here.root / "sys/class/npu_mgmt"
    for number in range(20_000):
        (directory / f"foreign{number}").touch()
    for _ in range(12):
        await asyncio.sleep(1)
        assert await here.alive()
    await here.pod()


@attack(short=True, config="allocation: {method: cdi}\n")
async def hostile_identities(here: World) -> None:
    """A card's UUID is a path, has quotes, control characters, 5,000 characters, no characters.

    The other card stays healthy; no file is written outside of the CDI directory; pages are well.
    """
    uuid = folder(here) / "device_uuid"
    content = uuid.read_bytes()
    before = {path for path in here.root.parent.rglob("*") if "sys" not in path.parts}
    for said in (
        b"../../../escape", b'"}\n# HELP x', b"\x1b[2J\x07", b"A" * 5000, b"", b"\xff\xff",
        "\u202eUUID".encode(), b"a b c", b"-", b"%s%n{}", b"<script>alert(1)</script>",
    ):  # fmt: skip
        uuid.write_bytes(said)
        await here.fault("npu1", "ok")
        await asyncio.sleep(1.2)
        await here.works("npu1")
        for page, body in (await here.pages()).items():
            assert b"<script>alert" not in body or page == "/status.json", page
        await here.granted("a-pod")
        here.kubelet.taken.clear()
    uuid.write_bytes(content)
    await here.well()
    after = {path for path in here.root.parent.rglob("*") if "sys" not in path.parts}
    known = ("plugins", "cdi", ".npu-simulator", "serviceaccount", "pod-resources")
    new = [path for path in after - before if not set(known) & set(path.parts)]
    assert not new, new


@attack()
async def card_flaps(here: World) -> None:
    """A card dies and recovers 20 times, twice a second, and another one comes and goes.

    At most a message to the kubelet for each change; all is well at the end.
    """
    for number in range(40):
        await here.fault("npu0", ("dead", "ok")[number % 2])
        await here.fault("npu1", ("gone", "back")[number % 2])
        await asyncio.sleep(0.5)
    await here.well()
    for known in here.kubelet.plugins.value.values():
        assert known.messages < 250, f"{known.messages} messages"


@attack(short=True)
async def driver_vanishes(here: World) -> None:
    """All of /sys vanishes and comes back, five times.

    The cards are served again without help.
    """
    sys = here.root / "sys"
    for _ in range(5):
        sys.rename(here.root / "away")
        await here.healthy(0)
        (here.root / "away").rename(sys)
        await here.well()


@attack(short=True)
async def ends_while_a_card_hangs(here: World) -> None:
    """SIGTERM while both cards hang.

    It ends all the same.
    """
    await here.fault("npu0", "hang")
    await here.fault("npu1", "hang")
    await here.healthy(0)
    await here.ends()
    for card in ("npu0", "npu1"):
        await here.fault(card, "ok")
    await here.start_again()


@attack(cards="warboy=12")
async def many_cards(here: World) -> None:
    """Twelve cards, which all hang, then die, then vanish.

    Probes are answered; all are served again.
    """
    for fault in ("dead", "hang", "gone"):
        for number in range(12):
            await here.fault(f"npu{number}", fault)
        await here.healthy(0)
        assert await here.alive()
        for number in range(12):
            await here.fault(f"npu{number}", "back")
        await here.well()
