"""Tables with the columns that the figures read, filled with plausible invented numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

READERS = ("tiny", "smollm2-135m")
GRID = np.geomspace(1e-7, 1.0, 200)


@pytest.fixture(scope="session")
def changes() -> pd.DataFrame:
    rows = []
    for reader in READERS:
        for channel, shares in {
            "hidden_change": (0.74, 0.81, 0.66, 0.7),
            "output_change": (0.21, 0.34, 0.04, 0.02),
        }.items():
            for token_class, share, tokens in zip(
                ("all", "think", "action", "format"), shares, (9120, 4010, 2690, 2420), strict=True
            ):
                for context, value in {"own_skill": share, "unrelated": 0.01, "floor": 0.002}.items():
                    rows.append(
                        {
                            "reader": reader,
                            "channel": channel,
                            "token_class": token_class,
                            "context": context,
                            "threshold": {"hidden_change": 2e-3, "output_change": 0.05}[channel],
                            "share": value,
                            "low": value * 0.9,
                            "high": min(value * 1.08, 1.0),
                            "n_tokens": tokens,
                            "n_trajectories": 24,
                        }
                    )
    return pd.DataFrame(rows)


@pytest.fixture(scope="session")
def thresholds() -> pd.DataFrame:
    frames = []
    for reader in READERS:
        for channel, middle in {"hidden_change": -2.2, "output_change": -2.6}.items():
            for context, shift in {"own_skill": 0.0, "unrelated": -1.2, "floor": -3.6}.items():
                width = 0.35 if channel == "hidden_change" else 0.9
                share = 1 / (1 + np.exp((np.log10(GRID) - middle - shift) / width))
                frames.append(
                    pd.DataFrame(
                        {
                            "reader": reader,
                            "channel": channel,
                            "token_class": "all",
                            "context": context,
                            "threshold": GRID,
                            "share": share,
                            "low": share * 0.93,
                            "high": np.minimum(share * 1.05, 1),
                        }
                    )
                )
    return pd.concat(frames, ignore_index=True)


@pytest.fixture(scope="session")
def curves() -> pd.DataFrame:
    levels = {
        "student": [0.45],
        "own_skill": [0.61],
        "alignment": [0.45, 0.48, 0.51, 0.53, 0.54],
        "pr_opd": [0.45, 0.52, 0.58, 0.6, 0.63],
        "grpo": [0.45, 0.5, 0.54, 0.6, 0.6],
    }
    rows = []
    for arm, successes in levels.items():
        for index, success in enumerate(successes):
            end = index == len(successes) - 1
            rows.append(
                {
                    "arm": arm,
                    "step": 10 * index,
                    "success": success,
                    "low": success - (0.05 if end else 0.085),
                    "high": success + (0.05 if end else 0.085),
                    "n_episodes": 384 if end else 128,
                    "n_tasks": 128,
                    "n_seeds": 3 if end else 1,
                    "interval": "bootstrap" if end else "wilson",
                }
            )
    return pd.DataFrame(rows)
