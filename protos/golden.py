"""Samples of each message in protos/, as JSON and as google.protobuf encodes them.

`generate.py` writes them, and tests/kubelet/test_wire.py reads them: whatever generates
npu_agent/kubelet/wire has to encode the same bytes. Needs ``grpcio-tools``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import (
    descriptor,
    descriptor_pb2,
    descriptor_pool,
    json_format,
    message_factory,
)

_Field = descriptor.FieldDescriptor
_EXTREMES = {
    _Field.TYPE_INT32: -(2**31),
    _Field.TYPE_INT64: -(2**63),
    _Field.TYPE_UINT32: 2**32 - 1,
    _Field.TYPE_UINT64: 2**64 - 1,
}


def golden(protos: Path) -> str:
    """A JSON object a line: ``message``, ``value`` (protobuf's JSON) and ``encoded`` (hex).

    Keys are sorted: google.protobuf gives those of a map in another order in each process.
    """
    lines = (json.dumps(each, ensure_ascii=False, sort_keys=True) for each in _samples(protos))
    return "".join(f"{line}\n" for line in lines)


def _samples(protos: Path) -> Iterator[dict[str, Any]]:
    pool = descriptor_pool.DescriptorPool()
    for file in _compiled(protos).file:
        found = pool.Add(file) or pool.FindFileByName(file.name)
        for _, kind in sorted(found.message_types_by_name.items()):
            made = message_factory.GetMessageClass(kind)
            for extreme in (False, True):
                message = made()
                _fill(message, extreme)
                value = json_format.MessageToDict(message, preserving_proto_field_name=True)
                encoded = message.SerializeToString(deterministic=True).hex()
                yield {"message": kind.full_name, "value": value, "encoded": encoded}


def _compiled(protos: Path) -> descriptor_pb2.FileDescriptorSet:
    with tempfile.NamedTemporaryFile() as output:
        words = [sys.executable, "-m", "grpc_tools.protoc", f"-I{protos}", "--include_imports"]
        files = map(str, sorted(protos.glob("*.proto")))
        subprocess.run([*words, f"--descriptor_set_out={output.name}", *files], check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(Path(output.name).read_bytes())


def _fill(message: Any, extreme: bool) -> None:
    """Sets every field; `extreme`: to the ends of its range, messages to empty ones."""
    for field in message.DESCRIPTOR.fields:
        at = getattr(message, field.name)
        if field.message_type and field.message_type.GetOptions().map_entry:
            _fill_map(at, field.message_type.fields_by_name["value"])
        elif field.message_type:
            for each in [at.add(), at.add()] if field.is_repeated else [at]:
                each.SetInParent()
                if not extreme:
                    _fill(each, extreme=False)
        elif field.is_repeated:
            at.extend([_value(field, extreme), _value(field, not extreme)])
        else:
            setattr(message, field.name, _value(field, extreme))


def _fill_map(entries: Any, value: Any) -> None:
    """No value is empty: google.protobuf writes such a value, betterproto leaves it out."""
    for key in ("a/b", "c"):
        if value.message_type:
            _fill(entries[key], extreme=False)
        else:
            entries[key] = _value(value, extreme=False)


def _value(field: Any, extreme: bool) -> Any:
    match field.type:
        case type_ if type_ in _EXTREMES:
            return _EXTREMES[type_] if extreme else 300 + field.number
        case _Field.TYPE_BOOL:
            return not extreme
        case _Field.TYPE_STRING:
            return "" if extreme else f"{field.name} é"
        case _Field.TYPE_BYTES:
            return b"" if extreme else b"\x00\xff"
        case _Field.TYPE_ENUM:
            return field.enum_type.values[0 if extreme else -1].number
    raise ValueError(f"{field.full_name}: golden.py has no sample of type {field.type}")
