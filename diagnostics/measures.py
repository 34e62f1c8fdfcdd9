"""The measures by name. A measure is added here by one line; its module exports it as MEASURE."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module

from diagnostics.measure import Measure

MEASURES: dict[str, str] = {
    "change": "diagnostics.change",
    "probe": "diagnostics.probe_stream",
    "cka": "diagnostics.cka",
    "patching": "diagnostics.patching",
    "audit": "diagnostics.audit",
    "gaps": "diagnostics.gaps",
    "tokens": "diagnostics.tokens",
    "perturbation": "diagnostics.perturbation",
    "agreement": "diagnostics.agreement",
}
ALL = "all"


def measure(name: str) -> Measure:
    """The measure of that name. Raises ValueError with the nearest name when there is none."""
    if name not in MEASURES:
        near = difflib.get_close_matches(name, [*MEASURES, ALL], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"measures are {', '.join(MEASURES)}, or {ALL}"
        raise ValueError(f"unknown measure {name!r}; {hint}")
    found: Measure = import_module(MEASURES[name]).MEASURE
    return found


def measures(names: Sequence[str]) -> list[Measure]:
    """The measures of those names, each once; "all" stands for every one."""
    asked = [each for name in names for each in (MEASURES if name == ALL else [name])]
    return [measure(name) for name in dict.fromkeys(asked)]
