"""What the kubelet's questions are answered with: devices and a request in, bytes or a Refusal out.

Pure, and quick enough for the event loop: nothing here opens a file, takes a lock or waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from npu_agent.core.offer import Device
from npu_agent.outputs.deviceplugin import encode


class Wrong(Enum):
    """What kind of wrong a request is; the service turns it into a gRPC status."""

    INVALID = "invalid argument"
    """No agent could answer it."""
    UNKNOWN = "not found"
    """It names a device that is not listed now."""
    UNFIT = "failed precondition"
    """It names a device that is listed, and is not to be used."""


class RefusalError(Exception):
    """A request that is not granted. The user reads the message in the events of the Pod."""

    def __init__(self, wrong: Wrong, message: str) -> None:
        super().__init__(message)
        self.wrong = wrong


def allocate(
    requests: Sequence[Sequence[str]],
    devices: Mapping[str, Device],
    resource: str,
    *,
    by_cdi: bool = False,
) -> bytes:
    """An AllocateResponse for containers that ask for these device IDs.

    With `by_cdi` it names CDI devices and lists no device nodes.

    Raises:
        RefusalError: an ID is unknown, unhealthy or asked for twice, or there is none.
    """
    if not requests:
        raise RefusalError(Wrong.INVALID, f"Allocate for {resource} names no container")
    taken: set[str] = set()
    return b"".join(
        encode.container_response(_granted(ids, devices, resource, taken), by_cdi=by_cdi)
        for ids in requests
    )


def _granted(
    ids: Sequence[str], devices: Mapping[str, Device], resource: str, taken: set[str]
) -> list[Device]:
    if not ids:
        raise RefusalError(Wrong.INVALID, f"Allocate for {resource} names no device")
    granted = []
    for id_ in ids:
        if id_ in taken:
            raise RefusalError(Wrong.INVALID, f"device {shown(id_)} is asked for twice")
        taken.add(id_)
        device = devices.get(id_)
        if device is None:
            raise RefusalError(
                Wrong.UNKNOWN,
                f"device {shown(id_)} is not one of {resource} on this node now: "
                f"it was removed, disabled, or cut into other parts ({len(devices)} are listed)",
            )
        if not device.healthy:
            raise RefusalError(
                Wrong.UNFIT, f"device {shown(id_)} ({device.name}) is unhealthy: {device.reason}"
            )
        granted.append(device)
    return granted


def shown(id_: str) -> str:
    """An ID from outside, made fit to show."""
    return repr(id_) if len(id_) <= 80 else f"{id_[:80]!r}..."
