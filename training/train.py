"""The training loop. It reads a method's `needs` and knows nothing else about it.

One step: roll out, score against the group, (Stage II of a distilling method: write skills, build pairs), then one
AdamW update a mini-batch of rows. A step depends on the weights and on (seed, step) only, so a run that was stopped
continues bit for bit from its last complete checkpoint.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diagnostics.paired import build_pairs
from diagnostics.records import Skill, Trajectory
from training.batch import Row, build_rows, turn_advantages
from training.checkpoint import (
    Learned,
    checkpoint_path,
    latest_complete,
    load_checkpoint,
    load_weights,
    reference_folder,
    run_of,
    save_reference,
)
from training.config import Config
from training.engine import Engine, generator, read_steps, score
from training.method import Needs, load_method
from training.monitor import Log, Means
from training.privileged import WriteSkills, teacher_texts, write_samples, written_tokens
from training.skills.source import SkillSource
from training.skills.step_level import build_step_pairs
from training.update import Learner

log = logging.getLogger(__name__)

Rollout = Callable[[int], Sequence[Trajectory]]  # step -> the step's trajectories, `group` counting its tasks
WriteStepSkills = Callable[[Sequence[Trajectory], int], Mapping[str, Mapping[int, Skill]]]  # by id and turn
Evaluate = Callable[[int], Mapping[str, float]]  # steps done -> metrics of the current weights


class Sources(NamedTuple):
    """Where privileged texts come from; None where nobody gives them."""

    write: WriteSkills | None
    write_steps: WriteStepSkills | None
    library: SkillSource | None


def train(
    config: Config,
    run: str | Path,
    *,
    model: Any,
    tokenizer: Any,
    rollout_fn: Rollout,
    write_skills_fn: WriteSkills | None = None,
    write_step_skills_fn: WriteStepSkills | None = None,
    skill_source: SkillSource | None = None,
    evaluate_fn: Evaluate | None = None,
    reference: Any = None,
    progress: Callable[..., None] | None = None,
) -> Path:
    """Train `model` in place for `config.steps` steps and return the folder of the last checkpoint.

    A run folder that has checkpoints is continued; otherwise `config.init_from` starts a branch from another run's
    checkpoint (weights, optimiser state and KL anchor) at step 0.
    Args: model, a Hugging Face causal language model with float32 weights; reference, the KL anchor (None: the run's
    own, else the branched run's, else the weights training starts from); progress(step, **values) after every step.
    Raises: ValueError on a run folder of another method or seed, or what a method needs and nobody gives;
    FloatingPointError on a gradient that is not finite. Ctrl-C leaves the last complete checkpoint.
    """
    learner = _start(config, Path(run), model, reference, skill_source)
    sources = Sources(write_skills_fn, write_step_skills_fn, skill_source)
    return run_steps(learner, Path(run), tokenizer, rollout_fn, sources, evaluate_fn, progress)


def run_steps(
    engine: Engine,
    run: Path,
    tokenizer: Any,
    rollout_fn: Rollout,
    sources: Sources,
    evaluate_fn: Evaluate | None = None,
    progress: Callable[..., None] | None = None,
) -> Path:
    """The steps that are left of a run, on any engine; returns the folder of the last checkpoint. Args: as in train."""
    config = engine.config
    write_log = Log(run, engine.step)
    evaluated = evaluate_fn if config.eval.every else None
    if evaluated and 0 not in write_log.steps:
        write_log.write(0, evaluated(0))
    while engine.step < config.steps:
        metrics = _step(engine, tokenizer, rollout_fn, sources, run)
        done = engine.step
        if evaluated and (done % config.eval.every == 0 or done == config.steps):
            started = time.perf_counter()
            metrics |= {**evaluated(done), "time/eval": time.perf_counter() - started}
        write_log.write(done, metrics)  # before the checkpoint: a row without one is dropped and made again
        if done % config.save_every == 0 or done == config.steps:
            state: dict[str, Any] = {"update": engine.update, "method": config.method, "seed": config.seed}
            if sources.library is not None:
                state["skills"] = sources.library.state()
                sources.library.save_library(run / "library.json")
            engine.save(run, tokenizer, state)
        if progress:
            progress(done, success=metrics["reward/success"])
    return checkpoint_path(run, engine.step)


def _start(config: Config, run: Path, model: Any, reference: Any, skill_source: SkillSource | None) -> Learner:
    method = load_method(config.method)
    method_config = method.config() if config.method_config is None else config.method_config
    narrow = next((name for name, p in model.named_parameters() if p.dtype != torch.float32), None)
    if narrow is not None:
        raise ValueError(
            f"weight {narrow} is not float32; load the model in float32 to train it, a step of lr {config.optim.lr} "
            "vanishes in half precision (model.dtype bfloat16 is the precision of the forward pass)"
        )
    model.eval()  # no dropout: student, teacher and sampler read the same function
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # the default torch initialisation of a method's modules draws from here
        modules: Any = method.modules(model.config, method_config) if method.modules else None
    module_optimizer = None
    if modules is not None:
        modules.to(model.device)
        module_optimizer = torch.optim.AdamW(
            modules.parameters(), lr=modules.lr, weight_decay=config.optim.weight_decay
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay)
    learned = Learned(model, optimizer, modules, module_optimizer)
    learner = Learner(config, method, method_config, learned, reference)
    resumed = latest_complete(run)
    if resumed is not None:
        state = load_checkpoint(resumed, learner.learned)
        for name, ours in (("method", config.method), ("seed", config.seed)):
            if state[name] != ours:
                raise ValueError(
                    f"{run} was trained with {name} {state[name]!r}, not {ours!r}; choose another run folder"
                )
        learner.step, learner.update = state["step"], state["update"]
        if skill_source is not None and "skills" in state:
            skill_source.restore(state["skills"])
    elif config.init_from is not None:
        load_checkpoint(config.init_from, learner.learned)
    teachers = {method.needs(method_config, step).teacher for step in range(config.steps)}
    if learner.reference is None and (config.objective.kl_coefficient or "initial" in teachers):
        learner.reference = copy.deepcopy(model)
        origin = run if resumed is not None else run_of(config.init_from) if config.init_from is not None else None
        anchor = reference_folder(origin) if origin is not None else None
        if anchor is not None:
            load_weights(learner.reference, anchor)
        elif resumed is not None:
            raise ValueError(
                f"{run} has checkpoints but no folder reference/, the weights it began with; copy it again"
            )
    if learner.reference is not None:
        learner.reference.requires_grad_(False).eval()
        if resumed is None:
            save_reference(run, learner.reference)
    return learner


def _step(engine: Engine, tokenizer: Any, rollout_fn: Rollout, sources: Sources, run: Path) -> dict[str, float]:
    config, step = engine.config, engine.step
    started = time.perf_counter()
    trajectories = list(rollout_fn(step))
    played = [trajectory for trajectory in trajectories if trajectory.error is None]
    rolled_out = time.perf_counter()

    needs = engine.method.needs(engine.method_config, step)
    texts, over = teacher_texts(config, tokenizer, needs, played, step, sources.write, sources.library)
    turn_skills: Mapping[str, Mapping[int, Skill]] = {}
    if needs.step_skill and played:
        if sources.write_steps is None:
            raise ValueError(f"method {config.method!r} needs skills of single turns; give write_step_skills_fn")
        turn_skills = sources.write_steps(played, step)
        of_turns = written_tokens(tokenizer, (skill for turns in turn_skills.values() for skill in turns.values()))
        over["tokens/skills"] = over.get("tokens/skills", 0.0) + of_turns
    wrote = time.perf_counter()
    metrics = {
        "tokens/rollout": float(sum(trajectory.n_tokens for trajectory in trajectories)),
        "time/rollout": rolled_out - started,
        "time/skills": wrote - rolled_out,
        **over,
    }
    rows, counted = _rows(engine, tokenizer, needs, played, texts, turn_skills)
    write_samples(run, step, tokenizer, [row.pair for row in rows])
    metrics |= _reward_metrics(trajectories, played) | counted
    order = torch.randperm(len(rows), generator=generator(config.seed, step))
    parts = [part.tolist() for part in order.split(config.optim.mini_batch_rows) if len(part)]
    rows = score(engine, needs, rows, len(parts))
    means = Means()
    for part in parts:
        engine.learn(needs, [rows[i] for i in part], means)
    engine.finish(needs)
    if sources.library is not None:
        metrics |= sources.library.finish(played, step, needs.grow, sources.write)
    engine.step += 1
    return {
        **metrics,
        **means.result(),
        "update": float(engine.update),
        "tokens/train": float(sum(row.n_tokens for row in rows)),
        "time/train": time.perf_counter() - wrote,
    }


def _rows(
    engine: Engine,
    tokenizer: Any,
    needs: Needs,
    played: Sequence[Trajectory],
    skills: Mapping[str, str] | None,
    turn_skills: Mapping[str, Mapping[int, Skill]],
) -> tuple[list[Row], dict[str, float]]:
    """The step's rows, with teacher contexts where there are skills, and counts of what is missing."""
    segments = [(i, s) for i, t in enumerate(played) for s in t.segments if s.response_mask.any()]
    advantages = turn_advantages(played, engine.config.objective)
    limit = engine.longest
    pairs, counts = build_pairs(
        tokenizer,
        [(played[i], segment) for i, segment in segments],
        skills,
        "none" if skills is None else "own_skill",
        limit,
        keep_unpaired=True,
    )
    rows = build_rows(segments, pairs, advantages)
    metrics = {"reward/dead_groups": advantages.dead}
    if needs.step_skill and rows:
        steps, found = build_step_pairs(
            tokenizer, [(played[i], segment) for i, segment in segments], turn_skills, limit
        )
        rows = read_steps(engine, rows, steps)
        metrics |= {f"distill/turns_{name}": float(count) for name, count in found.items()}
    if needs.teacher != "none":
        tokens = sum(row.n_tokens for row in rows if row.distilled)
        metrics |= {f"distill/{name}": float(count) for name, count in counts.items()}
        metrics["distill/tokens"] = float(tokens)
        if not tokens:
            log.warning("step %d: no token is distilled (%s); the method does nothing here", engine.step, counts)
    if not rows:
        log.warning("step %d: no trajectory to learn from, the weights stay", engine.step)
    return rows, metrics


def _reward_metrics(trajectories: Sequence[Trajectory], played: Sequence[Trajectory]) -> dict[str, float]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values) if values else float("nan")

    turns = sum(len(trajectory.turns) for trajectory in played)
    scores = [trajectory.score for trajectory in played if trajectory.score is not None]
    return {
        **({"reward/score": mean(scores)} if scores else {}),
        "reward/success": mean([float(trajectory.success) for trajectory in played]),
        "reward/mean": mean([trajectory.reward for trajectory in played]),
        "reward/invalid_share": sum(trajectory.n_invalid for trajectory in played) / max(turns, 1),
        "rollout/turns": turns / max(len(played), 1),
        "rollout/errors": float(len(trajectories) - len(played)),
    }
