"""Values printed in the papers, as facts with their source; drawn as reference marks, never mixed with our numbers.

PR-OPD is arXiv 2609.36642, SDAR 2605.15155, PCSD 2608.01837. Rates are shares in [0, 1]. All success rates come from
one evaluation of 128 episodes at step 150, one seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

_PR_OPD, _SDAR, _PCSD = "PR-OPD (arXiv 2609.36642)", "SDAR (arXiv 2605.15155)", "PCSD (arXiv 2608.01837)"
_3B, _7B, _17B = "Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-1.7B"


@dataclass(frozen=True)
class PaperValue:
    """One published number. `low` equals `high` for a single value, otherwise the published range."""

    quantity: str  # e.g. "change/hidden", "success/alfworld/grpo"
    model: str
    low: float
    high: float
    source: str


def _success(paper: str, place: str, env: str, model: str, **percent: float) -> tuple[PaperValue, ...]:
    return tuple(
        PaperValue(f"success/{env}/{method}", model, value / 100, value / 100, f"{paper}, {place}")
        for method, value in percent.items()
    )


PAPER_VALUES: tuple[PaperValue, ...] = (
    # PR-OPD Fig. 1a,b: ALFWorld, GRPO checkpoint at step 100. The papers state no threshold for "changed".
    PaperValue("change/hidden", _3B, 0.813, 0.813, f"{_PR_OPD}, Fig. 1"),
    PaperValue("change/hidden", _17B, 0.933, 0.933, f"{_PR_OPD}, Fig. 1"),
    PaperValue("change/output", _3B, 0.237, 0.237, f"{_PR_OPD}, Fig. 1"),
    PaperValue("change/output", _17B, 0.164, 0.164, f"{_PR_OPD}, Fig. 1"),
    PaperValue("change/output/action", "", 0.0, 0.0, f"{_PR_OPD}, Fig. 1 (about 0)"),
    PaperValue("hidden_change/skill_over_unrelated", _3B, 9, 9, f"{_PR_OPD}, Fig. 4"),
    PaperValue("hidden_change/skill_over_unrelated", _17B, 7, 7, f"{_PR_OPD}, Fig. 4"),
    # PR-OPD Fig. 1c: WebShop; the model is not named.
    *_success(_PR_OPD, "Fig. 1c", "webshop", "", student=42.2, own_skill=56.2, alignment=64.8),
    # Alignment curves of eight runs.
    PaperValue("alignment/loss_start", "", 1.22, 1.52, f"{_PR_OPD}, alignment curves"),
    PaperValue("alignment/steps_to_0.5", "", 4, 7, f"{_PR_OPD}, alignment curves"),
    PaperValue("alignment/steps_to_0.3", "", 11, 19, f"{_PR_OPD}, alignment curves"),
    PaperValue("alignment/final_cosine", "", 0.913, 0.933, f"{_PR_OPD}, alignment curves"),
    *_success(
        _PR_OPD,
        "main table",
        "alfworld",
        _3B,
        vanilla=23.4,
        opsd=23.4,
        grpo=66.4,
        sdar=68.8,
        skill_sd=69.5,
        pr_opd=71.1,
    ),
    *_success(_PR_OPD, "main table", "alfworld", _17B, grpo=43.8, sdar=46.1, pr_opd=46.9),
    *_success(_PR_OPD, "channel ablation", "alfworld", _3B, token_opd=57.8, pr_opd_no_projector=72.7),
    *_success(_PR_OPD, "channel ablation", "alfworld", _17B, pr_opd_no_projector=36.7),
    *_success(
        _SDAR,
        "main table",
        "alfworld",
        _3B,
        vanilla=21.9,
        opsd=28.1,
        grpo=75.0,
        skill_grpo=60.2,
        grpo_opsd=81.2,
        skill_sd=73.4,
        rlsd=79.7,
        sdar=84.4,
    ),
    *_success(_SDAR, "main table", "alfworld", _7B, vanilla=12.5, grpo=81.2, grpo_opsd=80.4, sdar=85.9),
    *_success(
        _SDAR,
        "main table",
        "alfworld",
        _17B,
        vanilla=12.5,
        opsd=14.1,
        grpo=46.1,
        skill_grpo=21.1,
        grpo_opsd=32.0,
        skill_sd=52.3,
        rlsd=42.2,
        sdar=53.9,
    ),
    *_success(
        _SDAR, "gate ablation (read from a figure)", "alfworld", _3B, sdar_gap=84, sdar_soft_or=80, sdar_entropy=76
    ),
    *_success(
        _SDAR,
        "retrieval ablation",
        "alfworld",
        _7B,
        sdar_ucb=86.8,
        sdar_keyword=85.9,
        sdar_full=83.2,
        sdar_random=83.1,
        sdar_none=81.2,
    ),
    *_success(_PCSD, "main table", "alfworld", _3B, pcsd=90.6),
    *_success(_PCSD, "main table", "alfworld", _17B, pcsd=59.4),
    *_success(
        _PCSD, "component ablation", "alfworld", _3B, pcsd_no_adaptive=82.8, pcsd_no_trend=83.6, pcsd_no_decay=85.1
    ),
    *_success(
        _PCSD,
        "lambda ablation",
        "alfworld",
        _3B,
        **{"pcsd_lambda_0": 75.0, "pcsd_lambda_0.005": 87.5, "pcsd_lambda_0.01": 90.6, "pcsd_lambda_0.05": 83.6},
    ),
    # Warm-up: <steps of Stage I>_<steps after it>; gain over GRPO continued from the same checkpoint, paired, mean of
    # six evaluation seeds.
    *(
        PaperValue(f"gain/webshop/pr_opd_{steps}", _17B, gain / 100, gain / 100, f"{_PR_OPD}, warm-up")
        for steps, gain in (("100_30", 3.15), ("120_30", 9.62), ("120_10", 8.22), ("140_10", 3.63))
    ),
)


def paper_values(prefix: str) -> pd.DataFrame:
    """The published values whose quantity starts with `prefix`, one row each. Raises ValueError when there is none."""
    rows = [value.__dict__ for value in PAPER_VALUES if value.quantity.startswith(prefix)]
    if not rows:
        known = sorted({value.quantity.partition("/")[0] for value in PAPER_VALUES})
        raise ValueError(f"no published value starts with {prefix!r}; quantities start with {', '.join(known)}")
    return pd.DataFrame(rows)
