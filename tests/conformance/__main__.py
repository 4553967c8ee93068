"""`python -m tests.conformance`: judges one driver."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from grpclib.exceptions import GRPCError

from tests.conformance.items import ITEMS, Item, NotApplicable
from tests.conformance.world import World, last_words, world
from tests.outputs.deviceplugin.helpers import short_directory

EXAMPLE = """\
The command is run in a shell. It finds the kubelet's directory as $KUBELET_DIR, the one for CDI
specs as $CDI_DIR (which is $HOST_ROOT/var/run/cdi), and $KUBECONFIG and $NODE_NAME as in a Pod:

  python -m tests.conformance --driver-name gpu.example.com --driver-command \\
    'dra-example-kubeletplugin --cdi-root $CDI_DIR --kubelet-plugins-directory-path \\
     $KUBELET_DIR/plugins --kubelet-registrar-directory-path $KUBELET_DIR/plugins_registry'

etcd and the API server are built first where they are in no cache. Root is not needed for them.
"""


@dataclass(frozen=True)
class Verdict:
    """`word` is PASS, FAIL or NOT APPLICABLE."""

    item: Item
    word: str
    came: str

    def __str__(self) -> str:
        expected = f"expected: {self.item.expected}"
        return f"{self.word:<14}  {self.item.name}\n    {expected}\n    came: {self.came}"


async def judge(name: str, command: str, directory: Path) -> AsyncIterator[Verdict]:
    """Starts the driver in an empty directory with a short path, and asks each item of it.

    Raises:
        AssertionError: it does not register at all; with the last lines that it has logged.
    """
    async with world(name, command, directory) as judged:
        judged.start()
        try:
            await judged.registered()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{last_words(directory)}") from None
        for item in ITEMS:
            yield await _verdict(item, judged)
            if not judged.runs or not judged.manager.instances.value:
                await judged.restart()


async def _verdict(item: Item, judged: World) -> Verdict:
    try:
        return Verdict(item, "PASS", await item.ask(judged))
    except NotApplicable as reason:
        return Verdict(item, "NOT APPLICABLE", str(reason))
    except GRPCError as error:
        return Verdict(item, "FAIL", f"the call is refused: {error.status.name}: {error.message}")
    except TimeoutError:
        return Verdict(item, "FAIL", "it does not come in time")
    except (AssertionError, OSError, RuntimeError) as error:
        return Verdict(item, "FAIL", f"{error}" or type(error).__name__)


async def _print(name: str, command: str) -> int:
    fails = 0
    with short_directory() as directory:
        async for verdict in judge(name, command, directory):
            print(verdict, flush=True)
            fails += verdict.word == "FAIL"
    return int(bool(fails))


def main() -> int:
    """Prints a verdict for each item; returns 1 if one fails."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--driver-name", required=True, metavar="NAME")
    parser.add_argument("--driver-command", required=True, metavar="COMMAND")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    return asyncio.run(_print(options.driver_name, options.driver_command))


if __name__ == "__main__":
    sys.exit(main())
