"""Tables of a matched ablation, from the folders that analysis.ablation lets the commands fill.

success, types      each arm's last weights, all evaluations           differences   paired, against the base arm
scores, score_differences            the same of the score, where the environment grades its episodes
main, main_paper    in the columns of the papers' main table, and what papers print there for the arms' methods
evaluations         final, best, mean of the last three, apart         cost          tokens, FLOPs, seconds
curves, equal       success along training, at equal steps / compute   signals       losses, weights, gaps, states
power               what so many episodes cannot show                  paper, notes  published values; what to mind
study               what the study is called and asks
starred             with a library's skills in the prompt
unseen_types, unseen_differences     types (and "all") and differences on the tasks of the unseen split
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import stats
from analysis.arms import PLAN
from analysis.compute import COUNTED, cost_table, curve_frame, equal_table, parameters
from analysis.differences import difference_table
from analysis.frames import episode_frame, metrics_frame, played
from analysis.main_table import ALL, main_table, named_methods, published_table
from analysis.reference import PAPER_VALUES
from analysis.scores import MEAN, graded, score_table
from analysis.tables import save_tables, success_table
from diagnostics.artifact import MANIFEST, Artifact, load_artifact

NAME = "ablation"
STARRED = "_skill_prompt"  # how evaluations with a library's skills are named
UNSEEN = "valid_unseen"  # the panel of a study's second evaluation
_BESIDE = (("accuracy/", "score/"), ("gain/", "score_gain/"))  # quantity -> that of the score
SIGNALS = ("loss/", "kl/", "weight/", "gap/", "states/", "distill/", "reward/success")  # of metrics.jsonl


def tabulate(folder: Path) -> tuple[dict[str, pd.DataFrame], list[Artifact]]:
    """All tables of an ablation that can be made yet, as a table artifact under <folder>/tables; and their inputs.

    Raises: ValueError when no arm has been evaluated.
    """
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    episodes, inputs = arm_episodes(folder, plan)
    if episodes.empty:
        raise ValueError(f"no arm of {folder} has been evaluated yet; the folder logs/ in it says how far it came")
    arms = [arm for arm in plan["arms"] if arm["arm"] in set(episodes["arm"])]
    pairs = [(arm["base"], arm["arm"]) for arm in arms]
    types = success_table(episodes, by=("arm",))
    scores = score_table(episodes, by=("arm",)) if graded(episodes) else pd.DataFrame()
    tables = {"success": success_by_arm(episodes, types, arms), "types": types[types["type"] != ALL]}
    tables |= {"differences": difference_table(episodes, pairs), "scores": scores}
    if len(scores):
        tables["score_differences"] = difference_table(episodes, pairs, "score")
    logs = {(arm, seed): metrics_frame(run) for arm, seed, run in _runs(folder, arms, plan["seeds"])}
    sizes = {(arm, seed): _parameters(run) for arm, seed, run in _runs(folder, arms, plan["seeds"])}
    tables["evaluations"] = evaluation_table(logs)
    curves = curve_frame(logs, sizes)
    tables |= {"cost": cost_table(curves, arms), "equal": equal_table(curves, arms)}
    tables |= {"power": power_table(tables["success"], tables["differences"]), "curves": curves}
    starred, with_skills = arm_episodes(folder, plan, STARRED)
    if not starred.empty:
        tables["starred"] = _starred(episodes, starred)
    unseen, elsewhere = arm_episodes(folder, plan, panel=UNSEEN) if plan.get("unseen") else (pd.DataFrame(), [])
    if not unseen.empty:
        tables["unseen_types"] = success_table(unseen, by=("arm",))
        tables["unseen_differences"] = difference_table(unseen, pairs)
    tables |= {"signals": signal_table(logs), "paper": paper_table(plan)}
    env, names = episodes["env"].iloc[0], named_methods(tables["success"]["arm"], tables["paper"])
    tables["main"] = main_table(types, scores, env)
    tables["main_paper"] = published_table(names, env, set(tables["types"]["type"]))
    tables["notes"] = pd.DataFrame({"note": _notes(plan, tables)})
    tables["study"] = pd.DataFrame([{name: plan[name] for name in ("study", "paper", "about")}])
    tables = {name: table for name, table in tables.items() if not table.empty}
    inputs += [*with_skills, *elsewhere]
    save_tables(folder / "tables" / NAME, tables, inputs)
    return tables, inputs


def has_results(folder: Path) -> bool:
    """Whether the last weights of any arm have been evaluated."""
    plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    return not arm_episodes(folder, plan)[0].empty


def success_by_arm(episodes: pd.DataFrame, types: pd.DataFrame, arms: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Success of each arm over all training and evaluation seeds.

    Args: types, success_table of the episodes by arm.
    Columns: arm, method, steps (of Stage I and its own), success, low, high (as named in `interval`: Wilson, or a
    bootstrap by task where tasks were played more than once), wilson_low, wilson_high (as if all episodes were
    independent), lowest_seed, highest_seed (success of single training seeds), n_training_seeds, n_episodes, n_tasks,
    n_errors, invalid_share, turns, interval.
    """
    table = types[types["type"] == ALL].set_index("arm")
    rows = []
    for arm in arms:
        row, mine = table.loc[arm["arm"]], played(episodes[episodes["arm"] == arm["arm"]])
        pooled = stats.wilson(int(mine["success"].sum()), len(mine))
        seeds = mine.groupby("training_seed")["success"].mean()
        rows.append(
            {
                "arm": arm["arm"],
                "method": arm["method"],
                "steps": arm["start"] + arm["steps"],
                **row[["success", "low", "high"]],
                "wilson_low": pooled.low,
                "wilson_high": pooled.high,
                "lowest_seed": seeds.min(),
                "highest_seed": seeds.max(),
                "n_training_seeds": len(seeds),
                **row[["n_episodes", "n_tasks", "n_errors", "invalid_share", "turns", "interval"]],
            }
        )
    return pd.DataFrame(rows)


def evaluation_table(logs: Mapping[tuple[str, int], pd.DataFrame]) -> pd.DataFrame:
    """The evaluations along training (one seed of evaluation), by arm and training seed, and their mean.

    The best of a curve is no result (case B72), so final, best and mean_last_3 stand apart; the shared weights before
    the first step are in none of them. Columns: arm, training_seed ("mean": over them), final, best, best_step,
    mean_last_3, n_last (how many there are, at most 3).
    """
    rows = []
    for (arm, seed), log in logs.items():
        found = log[(log["metric"] == "eval/success") & (log["step"] > 0)].set_index("step")["value"].sort_index()
        if len(found):
            row = {"final": found.iloc[-1], "best": found.max(), "best_step": found.idxmax()}
            row |= {"mean_last_3": found.iloc[-3:].mean(), "n_last": min(len(found), 3)}
            rows.append({"arm": arm, "training_seed": str(seed), **row})
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    means = table.groupby("arm", sort=False)[["final", "best", "best_step", "mean_last_3", "n_last"]].mean()
    return pd.concat([table, means.reset_index().assign(training_seed="mean")], ignore_index=True)


def power_table(success: pd.DataFrame, differences: pd.DataFrame) -> pd.DataFrame:
    """What the episodes of two arms can and cannot show, at two-sided 5 % with 80 % power.

    Columns: base, arm, rate (of the base), n_episodes (of the smaller arm), detectable (smallest difference, were all
    episodes independent), difference (observed), episodes_needed (an arm, for a difference of that size). Pairing and
    shared tasks move the limit a little; repeated play of one task by one policy adds less than new tasks would.
    """
    rows = []
    counts = success.set_index("arm")["n_episodes"]
    for row in differences.itertuples():
        n = int(min(counts[row.base], counts[row.arm]))
        needed = stats.episodes_per_arm(row.a, row.b)
        rows.append(
            {
                "base": row.base,
                "arm": row.arm,
                "rate": row.a,
                "n_episodes": n,
                "detectable": stats.detectable_difference(row.a, n),
                "difference": row.difference,
                "episodes_needed": math.ceil(needed) if math.isfinite(needed) else np.nan,
            }
        )
    return pd.DataFrame(rows)


def power_note(rate: float, episodes: int, difference: float) -> str:
    """In a sentence: what so many episodes an arm cannot show, and what the observed difference would need."""
    limit, needed = stats.detectable_difference(rate, episodes), stats.episodes_per_arm(rate, rate + difference)
    limits = f"less than {100 * limit:.1f} points" if limit == limit else "any difference"
    text = f"{episodes} episodes an arm cannot show {limits} from {100 * rate:.1f} % (two-sided 5 %, power 80 %)"
    if math.isfinite(needed):
        text += f"; {100 * abs(difference):.1f} points need {math.ceil(needed):,} episodes an arm"
    return f"{text}."


def signal_table(logs: Mapping[tuple[str, int], pd.DataFrame]) -> pd.DataFrame:
    """What was logged while training, step by step: arm, metric, step, value (mean over training seeds), lowest,
    highest, n_training_seeds; the metrics of SIGNALS (loss/kl: distance to the reference, loss/entropy: minus it)."""
    named = [log.assign(arm=arm) for (arm, _), log in logs.items()]
    log = pd.concat(named) if named else pd.DataFrame(columns=["arm", "metric", "step", "value"])
    log = log[log["metric"].str.startswith(SIGNALS) & (log["step"] > 0)]
    grouped = log.groupby(["arm", "metric", "step"], sort=False)["value"]
    columns = {"value": "mean", "lowest": "min", "highest": "max", "n_training_seeds": "count"}
    return grouped.agg(**columns).reset_index()  # type: ignore[call-overload, no-any-return]


def signal_ends(signals: pd.DataFrame) -> pd.DataFrame:
    """First, last and mean value of every signal: arm, metric, first, last, mean."""
    grouped = signals.sort_values("step").groupby(["arm", "metric"], sort=False)["value"]
    return grouped.agg(first="first", last="last", mean="mean").reset_index()


def paper_table(plan: Mapping[str, Any]) -> pd.DataFrame:
    """Published values that the study's arms name, with the score or its gain that stands beside a success: arm and
    the fields of reference.PaperValue."""
    rows = []
    for arm in plan["arms"]:
        names = {arm["paper"], *(arm["paper"].replace(*pair) for pair in _BESIDE if arm["paper"].startswith(pair[0]))}
        found = [asdict(value) for value in PAPER_VALUES if value.quantity in names]
        rows += [{"arm": arm["arm"], **value} for value in found if value["source"].startswith(plan["paper"])]
    return pd.DataFrame(rows)


def summary(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The tables that are printed at the end, with the columns that matter."""
    success = ["arm", "success", "low", "high", "n_episodes", "n_tasks", "n_training_seeds"]
    chosen = {"success of the last weights": tables["success"][success]}
    if "differences" in tables:
        columns = ["base", "arm", "difference", "low", "high", "p", "seeds_better", "n_training_seeds"]
        chosen["paired differences"] = tables["differences"][columns]
    if "scores" in tables:
        rows = tables["scores"]
        columns = ["arm", "type", "score", "score_low", "score_high", "n_episodes", "n_tasks"]
        chosen["score of the last weights"] = rows.loc[rows["type"].isin((ALL, MEAN)), columns]
    if "score_differences" in tables:
        columns = ["base", "arm", "a", "b", "difference", "low", "high", "p", "seeds_better", "n_training_seeds"]
        chosen["paired differences of the score"] = tables["score_differences"][columns]
    if "evaluations" in tables:
        means = tables["evaluations"]
        chosen["evaluations along training"] = means[means["training_seed"] == "mean"].drop(columns="training_seed")
    if "unseen_differences" in tables:
        columns = ["base", "arm", "a", "b", "difference", "low", "high", "p", "n_tasks"]
        chosen["paired differences on the unseen split"] = tables["unseen_differences"][columns]
    if "starred" in tables:
        chosen["with a library's skills in the prompt"] = tables["starred"]
    columns = ["arm", "flops", "flops_over_base", "seconds", "seconds_over_base", "tokens_rollout", "tokens_read"]
    return chosen | {"cost of the arm's training": tables["cost"][columns]}


def _starred(plain: pd.DataFrame, starred: pd.DataFrame) -> pd.DataFrame:
    """Success with skills in the prompt, and its paired difference to the same weights without."""
    found = pd.concat([plain, starred.assign(arm=starred["arm"] + "*")])
    names = list(dict.fromkeys(starred["arm"]))
    table = difference_table(found, [(name, f"{name}*") for name in names])
    columns = {"base": "arm", "b": "success", "a": "without"}
    return table[[*columns, "difference", "low", "high", "p"]].rename(columns=columns)


def _notes(plan: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> list[str]:
    notes = [plan["about"]] if plan["about"] else []
    seeds = int(tables["success"]["n_training_seeds"].max())
    if seeds == 1:
        notes.append("One training seed: the intervals cover evaluation (tasks and evaluation seeds), not training.")
    else:
        notes.append(
            f"{seeds} training seeds: their spread is only roughly known, intervals over seeds are too narrow."
        )
    if not tables["power"].empty:
        row = tables["power"].iloc[tables["power"]["difference"].abs().argmax()]
        largest = f"Largest difference ({row['arm']} against {row['base']}): "
        notes.append(largest + power_note(row["rate"], int(row["n_episodes"]), row["difference"]))
    if not tables["paper"].empty:
        notes.append("Published values were measured on other models and environments, with one evaluation each.")
    return [*notes, COUNTED]


def arm_episodes(
    folder: Path, plan: Mapping[str, Any], suffix: str = "", panel: str | None = None
) -> tuple[pd.DataFrame, list[Artifact]]:
    """The episodes of the arms' last weights, with the columns arm and training_seed; and where they came from.

    Args: suffix, of evaluations by another protocol; panel, None for the one played along training."""
    frames, inputs = [], []
    for arm in plan["arms"]:
        for name, seed, run in _runs(folder, [arm], plan["seeds"]):
            config = json.loads((run / "config.json").read_text(encoding="utf-8"))
            split, step = panel or config["eval"]["panel"], arm["start"] + arm["steps"]
            for eval_seed in plan["eval_seeds"]:
                path = run / "trajectories" / f"{config['env']['kind']}_{split}_step{step}_seed{eval_seed}{suffix}"
                if (path / MANIFEST).is_file():
                    inputs.append(load_artifact(path, "trajectories"))
                    frames.append(episode_frame(inputs[-1], arm=name).assign(training_seed=seed))
    return (pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()), inputs


def _runs(folder: Path, arms: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> Iterator[tuple[str, int, Path]]:
    """Arm, training seed and folder of every run that was begun."""
    for arm in arms:
        for seed in seeds:
            run = folder / f"seed{seed}" / arm["arm"]
            if (run / "metrics.jsonl").is_file() and (run / "config.json").is_file():
                yield arm["arm"], seed, run


def _parameters(run: Path) -> float:
    checkpoints = sorted((run / "checkpoints").glob(f"*/{MANIFEST}"))
    return parameters(checkpoints[0].parent) if checkpoints else np.nan
