"""One training run from its configuration: checks before any work, the run folder, and train() with all it needs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from diagnostics.artifact import load_trajectories
from diagnostics.progress import progress
from training.checkpoint import latest_complete
from training.config import Config
from training.envs.panels import disjoint
from training.episodes import panel_episodes
from training.evaluate import as_metrics, summarise
from training.method import describe, load_method
from training.models.load import load_policy
from training.session import Session
from training.settings import refuse_changes
from training.subject import find_subject, first_step, write_json
from training.train import train


def start(config: Config, run: Path, args: Mapping[str, Any]) -> Path:
    """Train, or continue, a run; returns the folder of its last checkpoint.

    Every evaluation on the way keeps its episodes under <run>/trajectories.
    Args: args, what was passed, for the record.
    Raises: ValueError when the folder was started with other settings, or the games, the panel, the model or the
    checkpoint to branch from are not there.
    """
    if config.sampler.engine != "hf":
        raise ValueError(
            f"sampler.engine {config.sampler.engine} is for weights that stay as they are: train with hf, or with "
            "--engine cluster, which plays with vLLM by itself"
        )
    if config.init_from is not None:
        config = replace(config, init_from=find_subject(config.init_from, config).source)
    refuse_changes(config, run)
    weights = latest_complete(run) or config.init_from or config.model.name
    model, tokenizer = load_policy(weights, "float32", config.model.device)
    reference = None
    if config.model.reference is not None:
        reference, _ = load_policy(config.model.reference, "float32", config.model.device)
    before = first_step(config)
    parents = [] if config.init_from is None else [Path(config.init_from).parent.parent]
    with Session(config, model, tokenizer) as session:
        tasks = session.train_tasks  # read before anything is written: a refused run leaves no folder
        if config.eval.every:
            disjoint(tasks, session.panel)
        record(config, run, args)

        def evaluate(step: int) -> dict[str, float]:
            session.step = before + step
            artifact = panel_episodes(session, run, config.eval.seed, elsewhere=parents if step == 0 else ())
            return as_metrics(summarise(load_trajectories(artifact.path)))

        with progress("train", config.steps) as report:
            return train(
                config,
                run,
                model=model,
                tokenizer=tokenizer,
                rollout_fn=session.rollout,
                write_skills_fn=session.write_skills,
                write_step_skills_fn=session.write_step_skills,
                skill_source=session.skill_source,
                evaluate_fn=evaluate,
                reference=reference,
                progress=report,
            )


def record(config: Config, run: Path, args: Mapping[str, Any]) -> None:
    """config.json (resolved), args.json (as passed), method.json (what it needs, and how it departs from its paper),
    code.diff (what differs from the last commit), and the file of a method from outside."""
    method = load_method(config.method)
    write_json(run / "config.json", asdict(config))
    write_json(run / "args.json", args)
    write_json(run / "method.json", {**describe(method), "doc": sys.modules[method.config.__module__].__doc__})
    if config.method.endswith(".py"):
        shutil.copyfile(config.method, run / "method.py")
    (run / "code.diff").write_text(_code_diff(), encoding="utf-8")


def _code_diff() -> str:
    """What differs from the last commit of this source tree; "" when it is not a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return ""
    answer = subprocess.run(["git", "-C", str(root), "diff", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout
