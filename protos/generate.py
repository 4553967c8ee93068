"""Generates npu_agent/kubelet/wire from the .proto files beside this one: what `make protos` runs.

Likewise tests/kubelet/golden/messages.jsonl, the samples by which tests compare it (golden.py).

``generate.py DIR`` writes the package, ``generate.py --check DIR`` only compares and exits 1 on a
difference. Needs ``betterproto[compiler]`` and ``grpcio-tools`` (requirements/protos.txt).
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from golden import golden

HERE = Path(__file__).resolve().parent
SAMPLES = HERE.parent / "tests/kubelet/golden/messages.jsonl"
INIT = '''"""Message classes and service stubs of the kubelet's APIs.

Generated from protos/ by `make protos`; never edited by hand. Only the modules that speak a
protocol import from here, so that another generator can take betterproto's place.
"""
'''


def generate(target: Path) -> None:
    """Writes the generated package into the empty directory `target`."""
    protos = sorted(HERE.glob("*.proto"))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{HERE}",
            f"--python_betterproto_out={target}",
            *map(str, protos),
        ],
        check=True,
        stderr=subprocess.DEVNULL,  # the plugin chats there; protoc's errors set the exit code
    )
    (target / "__init__.py").write_text(INIT, encoding="utf-8")


def files(root: Path) -> list[Path]:
    """The Python files below `root`, relative to it, sorted."""
    return sorted(p.relative_to(root) for p in root.rglob("*.py"))


def main() -> int:
    """Returns the exit code: 1 when --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary) / "wire"
        fresh.mkdir()
        generate(fresh)
        if not args.check:
            shutil.rmtree(args.target, ignore_errors=True)
            shutil.copytree(fresh, args.target)
            SAMPLES.write_text(golden(HERE), encoding="utf-8")
            return 0
        same = files(fresh) == files(args.target) and all(
            filecmp.cmp(fresh / p, args.target / p, shallow=False) for p in files(fresh)
        )
        same = same and SAMPLES.read_text(encoding="utf-8") == golden(HERE)
        if not same:
            print(
                f"{args.target} or {SAMPLES} is not what protos/ generates: run `make protos`",
                file=sys.stderr,
            )
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
