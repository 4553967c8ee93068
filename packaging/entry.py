"""Where the binary starts: `npu-agent` for PyInstaller, which takes a script and no function."""

import os
import sys

from npu_agent.cli.main import main


def _environment_as_given() -> None:
    """Takes back what the bootloader set for itself.

    It points LD_LIBRARY_PATH at the unpacked libraries. That has been of use by now, and a login
    program that a kubeconfig names (`exec`) must load the host's libraries and not ours.
    """
    given = os.environ.pop("LD_LIBRARY_PATH_ORIG", None)
    if given is None:
        os.environ.pop("LD_LIBRARY_PATH", None)
    else:
        os.environ["LD_LIBRARY_PATH"] = given


if __name__ == "__main__":
    _environment_as_given()
    sys.exit(main())
