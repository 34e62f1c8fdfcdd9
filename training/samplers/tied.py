"""Runs a command that ends with the process that started it, however that one ends: a left server would hold a GPU.

python tied.py COMMAND ...        started with a pipe as standard input, which breaks when the other side is gone
"""

import os
import signal
import subprocess
import sys
import threading


def _end_together() -> None:
    sys.stdin.read()  # until the pipe breaks
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_together, daemon=True).start()
    code = child.wait()
    os._exit(code if code >= 0 else 128 - code)  # the shell's way to tell a signal: 137 is a kill
