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

import npu_agent
from npu_agent.cli.main import main
from npu_agent.kube import credentials

PACKAGE = Path(npu_agent.__file__).parent
COUNTED = "counted.json"
"""Beside the service account's directory."""


def _count(*_: object) -> None:
    # On the thread of the event loop, between two steps of it.
    counted = {
        "tasks": len(asyncio.all_tasks()),
        "objects": len(gc.get_objects()),
        "modules": sorted(map(str, _loaded())),
    }
    new = credentials.DIRECTORY.with_name(f"{COUNTED}.new")
    new.write_text(json.dumps(counted), encoding="utf-8")
    new.replace(new.with_name(COUNTED))


def _loaded() -> list[Path]:
    """The package's modules in this process, but for the generated ones."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    ours = {Path(file) for file in files if file and Path(file).is_relative_to(PACKAGE)}
    return [file for file in ours if "wire" not in file.parts]


if __name__ == "__main__":
    os.environ.pop("SSL_CERT_FILE", None)  # which a developer's shell may have, and no Pod
    # As in the image: kubernetes_asyncio imports it where there is one: 2 MiB.
    sys.modules["kubernetes_validate"] = None  # type: ignore[assignment]
    credentials.DIRECTORY = Path(sys.argv.pop(1))
    signal.signal(signal.SIGUSR1, _count)
    sys.exit(main())
