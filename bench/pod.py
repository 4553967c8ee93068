"""`python -m bench.pod DIRECTORY run ...`: npu-agent as in a Pod, with its service account there.

In a Pod the directory is a fixed one, below /var/run, which a bench had better not write to. On
SIGUSR1 it counts what only the process itself can count: see `bench.process.Inside`.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from pathlib import Path

from npu_agent.cli.main import main
from npu_agent.kube import serviceaccount

COUNTED = "counted.json"
"""Beside the service account's directory."""


def _count(*_: object) -> None:
    # On the thread of the event loop, between two steps of it.
    counted = {"tasks": len(asyncio.all_tasks()), "objects": len(gc.get_objects())}
    new = serviceaccount.DIRECTORY.with_name(f"{COUNTED}.new")
    new.write_text(json.dumps(counted))
    new.replace(new.with_name(COUNTED))


if __name__ == "__main__":
    os.environ.pop("SSL_CERT_FILE", None)  # which a developer's shell may have, and no Pod
    serviceaccount.DIRECTORY = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, _count)
    sys.exit(main())
