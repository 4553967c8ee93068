"""``python -m npu_agent`` is ``npu-agent``."""

import sys

from npu_agent.cli.main import main

sys.exit(main())
