"""One look for all figures: sized for a paper column, readable in grey and for colour-blind readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import seaborn as sns

COLUMN, PAGE = 3.35, 6.9  # inches: one column, full text width

# Okabe and Ito's palette; every series also differs by marker or line.
CHANNELS = {"hidden_change": "#0072B2", "output_change": "#D55E00"}
CHANNEL_LABELS = {"hidden_change": "hidden state", "output_change": "token probability"}
CONTEXT_LINES: dict[str, Any] = {"own_skill": "-", "unrelated": (0, (4, 1.5)), "floor": (0, (1, 1.2))}
CONTEXT_LABELS = {"own_skill": "own skill", "unrelated": "unrelated text", "floor": "same context, re-run"}
ARMS: dict[str, tuple[str, str, str]] = {  # arm -> label, colour, marker
    "student": ("no skill", "#555555", "o"),
    "own_skill": ("own skill in context", "#009E73", "D"),
    "alignment": ("alignment only", "#0072B2", "s"),
    "pr_opd": ("PR-OPD", "#CC79A7", "^"),
    "grpo": ("GRPO continued", "#E69F00", "v"),
}

_RC: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same glyphs on every machine
    "font.size": 7,
    "axes.titlesize": 7.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.2,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#333333",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.5,
    "axes.axisbelow": True,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,  # text stays text in the PDF
}


@contextmanager
def style() -> Iterator[None]:
    """Draw inside this context; the caller's own settings come back afterwards."""
    settings: dict[Any, Any] = {**sns.axes_style("ticks"), **_RC}
    with mpl.rc_context(settings):
        yield
