"""The vendor's three generations of labels, with the vendor's meanings: see docs/labels.md.

Each generation is the one of a software release; nodes may carry several.
"""

from __future__ import annotations

from npu_agent.core.vendor import Label, LabelSet, LabelSource


def _old_name(family: str) -> str:
    return "renegade" if family == "rngd" else family


def _version(what: str, fact: LabelSource, **parts: str) -> tuple[Label, ...]:
    """Labels for the parts of a version: the whole, its three numbers, and `parts` by their key."""
    parts = {part: part for part in ("major", "minor", "patch")} | parts
    return (
        Label(key=f"{what}.version", source=fact),
        *(
            Label(key=f"{what}.version.{key}", source=fact, part=part)
            for key, part in parts.items()
        ),
    )


SETS: dict[str, LabelSet] = {
    "alpha": LabelSet(
        about="SDK 0.5",
        prefix="alpha.furiosa.ai/",
        labels=(
            Label(key="npu.family", source=LabelSource.FAMILY, named=_old_name, sample=_old_name),
            Label(
                key="npu.hwtype",
                source=LabelSource.FAMILY,
                named=lambda _: "haps",
                sample=lambda _: "u250",
            ),
        ),
    ),
    "beta": LabelSet(
        about="0.8",
        prefix="beta.furiosa.ai/",
        labels=(
            Label(key="npu.count", source=LabelSource.COUNT),
            Label(key="npu.product", source=LabelSource.PRODUCT),
            Label(key="npu.family", source=LabelSource.FAMILY, named=_old_name),
            Label(key="machine.vendor", source=LabelSource.MACHINE_VENDOR),
            Label(key="machine.name", source=LabelSource.MACHINE_NAME),
            *_version("driver", LabelSource.DRIVER),
            Label(key="driver.reference", source=LabelSource.DRIVER, part="commit"),
        ),
    ),
    "current": LabelSet(
        about="2025 on",
        prefix="furiosa.ai/",
        labels=(
            Label(key="npu.count", source=LabelSource.COUNT),
            Label(key="npu.family", source=LabelSource.FAMILY),
            Label(key="npu.product", source=LabelSource.PRODUCT),
            *_version("driver", LabelSource.DRIVER, metadata="commit", prerelease="prerelease"),
            *_version("firmware", LabelSource.FIRMWARE, metadata="commit", prerelease="prerelease"),
        ),
    ),
}
