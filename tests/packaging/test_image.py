"""The image: what it says of itself, what is in it, and that it runs with nothing writable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from npu_agent import __version__
from tests.kube.helpers import Authority
from tests.packaging import host as on
from tests.packaging.container import Container
from tests.packaging.host import Host

SBOM = Path("usr/share/doc/npu-agent/sbom.spdx.json")
COMMAND = ("/opt/npu-agent/bin/npu-agent",)


def container(image: Path) -> Container:
    """As its own configuration says; no /tmp, as in the DaemonSet."""
    told = config(image)["config"]
    environment = dict(entry.split("=", 1) for entry in told["Env"])
    return Container(root=image / "rootfs", environment=environment)


def config(image: Path) -> Any:
    """Of the OCI layout."""
    return blob(image, manifest(image)["config"]["digest"])


def manifest(image: Path, name: str = "one") -> Any:
    index = json.loads((image / name / "index.json").read_text(encoding="utf-8"))
    return blob(image, index["manifests"][0]["digest"], name)


def blob(image: Path, digest: str, name: str = "one") -> Any:
    return json.loads(
        (image / name / "blobs" / digest.replace(":", "/")).read_text(encoding="utf-8")
    )


def test_labels_and_the_command_say_the_same_commit(image: Path) -> None:
    labels = config(image)["config"]["Labels"]
    told = {key.removeprefix("org.opencontainers.image."): value for key, value in labels.items()}
    assert told["title"] == "npu-agent"
    assert told["version"] == __version__
    assert re.fullmatch("[0-9a-f]{40}", told["revision"])
    assert told["created"] == "2023-11-14T22:13:20Z"
    assert told["licenses"] == "Apache-2.0"
    assert told["source"] == "https://example.com/npu-agent"
    assert told["base.name"].startswith("localhost/python-base:")
    said = f"npu-agent {__version__} (commit {told['revision']})\n"
    assert container(image).ran(*COMMAND, "version") == (0, said, "")


def test_the_same_commit_gives_the_same_image(image: Path) -> None:
    assert manifest(image, "one") == manifest(image, "two")


def test_sbom_has_all_that_is_in_it(image: Path) -> None:
    inside = (image / "rootfs" / SBOM).read_text(encoding="utf-8")
    assert inside == (image / "npu-agent-image.spdx.json").read_text(encoding="utf-8")
    parts = {part["SPDXID"]: part for part in json.loads(inside)["packages"]}
    installed = image.glob("rootfs/opt/npu-agent/lib/python*/site-packages/*.dist-info")
    names = {path.name.split("-")[0].replace("_", "-").lower() for path in installed}
    ours = {id_.removeprefix("SPDXRef-pypi-") for id_ in parts if id_.startswith("SPDXRef-pypi-")}
    assert ours | {"npu-agent"} == names
    status = (image / "rootfs/var/lib/dpkg/status").read_text(encoding="utf-8")
    packages = [id_ for id_ in parts if id_.startswith("SPDXRef-deb-")]
    assert len(packages) == status.count("\nStatus: install ok installed\n") > 50
    assert parts["SPDXRef-generic-npu-agent"]["versionInfo"] == __version__
    (libc,) = (part for part in parts.values() if part["name"] == "libc6")
    assert libc["externalRefs"][0]["referenceLocator"].startswith("pkg:deb/debian/libc6@2.")


def test_the_image_has_no_setuid_files_installers_or_compilers(image: Path) -> None:
    root = image / "rootfs"
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 1000
    # Nothing of the build is left.
    assert [path.name for path in (root / "opt").iterdir()] == ["npu-agent"]
    assert not [gone for gone in ("src", "root/.cache") if (root / gone).exists()]
    pip = root / "etc/pip.conf"  # an empty file where it was mounted
    assert not pip.exists() or not pip.stat().st_size
    assert [path for path in files if path.stat().st_mode & 0o6000] == []
    programs = {path.name for path in files if path.parent.name in ("bin", "sbin")}
    tools = ("pip", "gcc", "g++", "cc", "clang", "ld", "as", "make", "go", "rustc")
    assert [name for name in programs if re.sub(r"[\d.-]*$", "", name) in tools] == []
    assert [path for path in root.rglob("pip") if path.is_dir()] == []
    assert [path for path in root.rglob("ensurepip") if path.is_dir()] == []


def test_provenance_says_what_it_was_made_from(image: Path) -> None:
    statement = json.loads((image / "npu-agent-image.provenance.json").read_text(encoding="utf-8"))
    (subject,) = statement["subject"]
    digest = manifest(image)["config"]["digest"]  # of buildah, podman and docker the image's ID
    assert subject["digest"] == {"sha256": digest.removeprefix("sha256:")}
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["base"].startswith("localhost/python-base:")
    source, base = definition["resolvedDependencies"]
    assert re.fullmatch("[0-9a-f]{40}", source["digest"]["gitCommit"])
    assert source["uri"] == "git+https://example.com/npu-agent"
    assert base["uri"].startswith("localhost/python-base:")


def test_all_that_the_agent_loads_is_compiled(image: Path) -> None:
    """Else it is compiled at each start, as there is no place to keep it."""
    look = (
        "import sys, pathlib; import npu_agent.agent.run; from npu_agent.cli import main; "
        "from npu_agent.cli import run; from npu_agent.people.commands import view; "
        "import npu_agent.outputs.web.connections; import npu_agent.outputs.web.page; "
        "import kubernetes_asyncio.config; "
        "files = [m.__spec__ for m in sys.modules.values() if getattr(m, '__spec__', None)]; "
        "files = [s for s in files if s.origin and s.origin.startswith('/opt') and s.cached]; "
        "assert len(files) > 200, len(files); "
        "print(*(s.name for s in files if not pathlib.Path(s.cached).exists()))"
    )
    python = "/opt/npu-agent/bin/python"
    code, out, errors = container(image).ran(python, "-c", look)
    assert (code, out.strip()) == (0, ""), errors


async def test_runs_read_only_and_without_capabilities(
    image: Path, host: Host, ca: Authority
) -> None:
    await on.serves(container(image), COMMAND, host, ca)
