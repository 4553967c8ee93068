"""`python -m bench.pod DIRECTORY run ...`: npu-agent as in a Pod, with its service account there.

In a Pod the directory is a fixed one, below /var/run, which a bench had better not write to.
"""

import os
import sys
from pathlib import Path

from npu_agent.cli import main
from npu_agent.kube import serviceaccount

if __name__ == "__main__":
    os.environ.pop("SSL_CERT_FILE", None)  # which a developer's shell may have, and no Pod
    serviceaccount.DIRECTORY = Path(sys.argv.pop(1))
    sys.exit(main())
