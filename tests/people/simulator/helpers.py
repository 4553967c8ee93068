import stat
from pathlib import Path

from npu_agent.people.simulator.tree import STATE_DIR


def listing(root: Path) -> str:
    """Every path of a tree with what it is: one line each, contents as Python literals."""
    lines = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if name.parts[0] == STATE_DIR:
            continue
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            lines.append(f"{name} -> {path.readlink()}")
        elif stat.S_ISDIR(mode):
            lines.append(f"{name}/")
        elif stat.S_ISFIFO(mode):
            lines.append(f"{name} | pipe")
        elif stat.S_ISCHR(mode):
            lines.append(f"{name} = character device")
        elif name.parts[0] == "dev":
            lines.append(f"{name} = plain file")
        else:
            data = path.read_bytes()
            lines.append(f"{name}: {_literal(data)}")
    return "\n".join(lines) + "\n"


def _literal(data: bytes) -> str:
    try:
        return repr(data.decode())
    except UnicodeDecodeError:
        return repr(data)
