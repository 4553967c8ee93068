import asyncio
import os
import shutil
from pathlib import Path

from npu_agent.kubelet.directories import until_deleted


async def test_only_a_deleted_directory_is_one(tmp_path: Path) -> None:
    """As under a mount, a descriptor still leads to it."""
    mounted, absent = tmp_path / "device-plugins", tmp_path / "absent"
    mounted.mkdir()
    descriptor = os.open(mounted, os.O_PATH)
    try:
        seen = Path(f"/proc/self/fd/{descriptor}")
        waiting = asyncio.create_task(until_deleted([absent, mounted, seen], every=0.01))
        mounted.rename(tmp_path / "renamed")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        shutil.rmtree(tmp_path / "renamed")
        mounted.mkdir()
        async with asyncio.timeout(10):
            assert await waiting == seen
    finally:
        os.close(descriptor)
