"""Case B65: figures are written with no display, and the user's backend is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from figures.figure import save
from figures.style import style
with style():
    figure = Figure()
    figure.add_subplot().plot([1, 2])
saved = save(figure, Path(sys.argv[1]), "f", drawn={"t": pd.DataFrame({"x": [1]})}, inputs={}, script="s", interval="")
assert saved.png.stat().st_size and saved.pdf.stat().st_size and "torch" not in sys.modules
print(matplotlib.rcParams._get("backend") if isinstance(matplotlib.rcParams._get("backend"), str) else "unset")
"""


# TkAgg cannot work without a display: matplotlib itself falls back; a choice that works stays.
@pytest.mark.parametrize("backend, kept", [("TkAgg", "unset"), ("svg", "svg")])
def test_b65_headless(tmp_path, backend, kept):
    environment = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "MPLBACKEND")}
    environment["PYTHONPATH"] = str(ROOT)
    if backend:
        environment["MPLBACKEND"] = backend
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().lower() == kept
