"""The tour of `npu-agent demo` without what differs from run to run."""

import re
from pathlib import Path

GOLDEN = Path(__file__).parent / "demo.txt"


def comparable(output: str) -> str:
    """The output with one name for its directory, socket, ports and claims."""
    found = re.sub(r"furiosa-npu-[0-9a-f]{8}\.sock", "furiosa-npu-01234567.sock", output)
    found = re.sub(r"/\S*/npu-demo-\w+", "/tmp/npu-demo", found)
    found = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:9100", found)
    return re.sub(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f-]{21}", "11111111-2222-4333-8444-555555555555", found
    )
