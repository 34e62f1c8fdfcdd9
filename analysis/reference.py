"""Values printed in the papers, as facts with their source; drawn as reference marks, never mixed with our numbers.

PR-OPD is arXiv 2609.36642, SDAR 2605.15155, PCSD 2608.01837, OPID 2606.26790. Rates, scores and correlations are
shares in [-1, 1]. Success rates come from one evaluation of 128 episodes at step 150, one seed. What was read off a
picture says so in its source.

quantity                                        figure or table
change/..., success/webshop/<arm>               PR-OPD Fig. 1a-c; the model of 1c is not named
hidden_change/..., probe/..., cka/...           PR-OPD Fig. 4, 5, 6
alignment/...                                   PR-OPD alignment curves of eight runs
gain/..., score_gain/...                        PR-OPD warm-up: <steps of Stage I>_<steps after it>, over GRPO
                                                continued from the same checkpoint, paired, mean of six seeds
success/alfworld/<method>                       main tables and ablations, all tasks of the seen split
success_by_type/alfworld/<method>/<type>        main tables, one type of task
success/alfworld_unseen/<method>                PCSD Fig. 4
accuracy/webshop/<method>, score/webshop/...    main tables: share of perfect purchases, mean score
exact_match/search_qa/<method>/<data set>       SDAR main table
gap/..., gate/..., kl/..., success_by_step/...  SDAR Fig. 1a, 2, 3, 5; nats, shares; `at` is a turn, position or step
perturbation/..., weight/..., window/...        PCSD Fig. 5, 3, text
ablation/...                                    SDAR: the best of the values tried
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

DATA = Path(__file__).parent / "data"
CURVES = (
    "training logs of SDAR and GRPO in gitrxh/ADRS-arxiv (Apache-2.0): one run each, every fifth step, 128 episodes an "
    "evaluation; SDAR read general skills only"
)


@dataclass(frozen=True)
class PaperValue:
    """One published number. `low` equals `high` for a single value, otherwise the published range."""

    quantity: str  # e.g. "change/hidden", "success/alfworld/grpo"
    model: str  # "": not named, or of no single model
    low: float
    high: float
    source: str
    at: float = math.nan  # step, turn or position it stands at, where the quantity is a curve


def _read() -> tuple[PaperValue, ...]:
    with (DATA / "paper_values.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            PaperValue(
                row["quantity"],
                row["model"],
                float(row["low"]),
                float(row["high"]),
                row["source"],
                float(row["at"] or "nan"),
            )
            for row in csv.DictReader(file)
        )


PAPER_VALUES: tuple[PaperValue, ...] = _read()


def paper_values(prefix: str) -> pd.DataFrame:
    """The published values whose quantity starts with `prefix`, one row each. Raises ValueError when there is none."""
    rows = [value.__dict__ for value in PAPER_VALUES if value.quantity.startswith(prefix)]
    if not rows:
        known = sorted({value.quantity.partition("/")[0] for value in PAPER_VALUES})
        raise ValueError(f"no published value starts with {prefix!r}; quantities start with {', '.join(known)}")
    return pd.DataFrame(rows)


def paper_curves(metric: str) -> pd.DataFrame:
    """A logged curve of published training runs: method, env, model, metric, step, value, source.

    Args: metric, of success_rate (share), entropy, kl, gap_mean, distill_loss (nats), gate_mean, gate_active_share.
    Raises: ValueError for another metric.
    """
    curves = pd.read_csv(DATA / "paper_curves.csv")
    chosen = curves[curves["metric"] == metric]
    if chosen.empty:
        raise ValueError(f"no published curve of {metric!r}; there are {', '.join(sorted(set(curves['metric'])))}")
    return chosen.assign(source=CURVES).reset_index(drop=True)
