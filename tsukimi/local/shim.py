"""Runs a command that dies when its parent does: `python shim.py PARENT_PID COMMAND...`.

Linux sends the signal set by PR_SET_PDEATHSIG when the parent's thread ends, however it ends. The setting survives exec,
and the pid stays the same. This file imports nothing of this project, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"the launcher {parent} was gone before {command[0]} began")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
