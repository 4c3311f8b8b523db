"""Run as a script between launcher and child: `tether.py PARENT_PID PROGRAM ARGUMENT…` becomes PROGRAM.

The kernel then kills PROGRAM when the launcher dies, however that happens. A step of its own, since the wish (prctl)
must be made in the child, and Python code between fork and exec is not safe in a process with threads. Needs the
standard library only, so it costs some hundredths of a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
NOT_STARTED = 127


def main(parent: int, program: str, arguments: list[str]) -> int:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the wish was made
        return NOT_STARTED
    try:
        os.execv(program, [program, *arguments])
    except OSError as error:
        print(f"Error: cannot run {program}: {error.strerror}", file=sys.stderr)
    return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
