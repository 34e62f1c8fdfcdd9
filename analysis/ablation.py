"""A matched ablation: arms that differ in nothing but their method, each branching from the same Stage-I checkpoint.

<study>/games                   generated games, unless the study brings its own
<study>/seed<s>/stage1          GRPO, once a training seed
<study>/seed<s>/<arm>           the arm's training and its evaluations
<study>/ablation.json           what is compared, for the tables and the figure
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.arms import PLAN, Arm, Study
from analysis.study import Stage, run_study

_BEGIN = 7.0  # seconds until a stage has loaded everything


@dataclass(frozen=True)
class Sizes:
    """How large each stage is; numbers of steps, games, tasks and episodes."""

    train_games: int = 320
    panel: int = 128
    stage1_steps: int = 30
    stage2_steps: int = 5  # of an arm of length 1
    eval_every: int = 3  # steps of an arm; Stage I is evaluated where arms start
    save_every: int = 4
    eval_seeds: int = 2  # evaluations of an arm's last weights
    seeds: tuple[int, ...] = (0, 1, 2)  # training seeds unless asked otherwise
    settings: Mapping[str, Any] = field(default_factory=lambda: {"tasks_per_step": 8, "group_size": 8})


PRESETS: dict[str, Sizes] = {
    "tiny": Sizes(),  # some 80 minutes on two cores for six arms and three seeds
    "smoke": Sizes(
        train_games=8,
        panel=8,
        stage1_steps=2,
        stage2_steps=1,
        eval_every=1,
        save_every=1,
        eval_seeds=1,
        seeds=(0,),
        settings={"tasks_per_step": 2, "group_size": 2, "env.max_turns": 12},
    ),
}


def ablate_study(
    folder: Path,
    study: Study,
    sizes: Sizes,
    seeds: Sequence[int] | None = None,
    *,
    starred: bool = False,
    jobs: int = 1,
    check: Callable[[Sequence[str]], None] = lambda words: None,
) -> int:
    """Run the study and return run_study's exit code; the plan is written first, so that any part can be tabulated.

    `jobs` torch processes work at a time and share the cores; environment workers use one thread each.
    Args: seeds, training seeds (None: those of the sizes); starred, also evaluate every arm with a library's skills in
    its prompt; jobs, stages at once; check, raises ValueError for the words of a training command that cannot be.
    Raises: ValueError naming the arm, before any work.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min((os.cpu_count() or 1) // max(jobs, 1), 2))))
    seeds = sizes.seeds if seeds is None else seeds
    graph = stages(folder, study, sizes, seeds, starred)
    for stage in graph:
        if "train" in stage.command and stage.name.startswith(f"seed{seeds[0]}-"):
            try:
                check(stage.command[stage.command.index("train") + 1 :])
            except ValueError as error:
                raise ValueError(f"study {study.name}, {stage.name.partition('-')[2]}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{PLAN}.tmp"
    temporary.write_text(json.dumps(plan(study, sizes, seeds, starred), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, folder / PLAN)
    return run_study(graph, folder, jobs)


def plan(study: Study, sizes: Sizes, seeds: Sequence[int], starred: bool) -> dict[str, Any]:
    """What is compared: the study, with its arms in steps of the recipe."""
    arms = [
        {
            "arm": arm.name,
            "method": arm.method,
            "settings": dict(arm.settings),
            "start": _start(arm, sizes),
            "steps": _steps(arm, sizes),
            "base": arm.base,
            "paper": arm.paper,
        }
        for arm in study.arms
    ]
    return {
        "study": study.name,
        "about": study.about,
        "paper": study.paper,
        "seeds": list(seeds),
        "eval_seeds": _eval_seeds(study, sizes),
        "starred": starred,
        "common": dict(study.common),
        "sizes": asdict(sizes),
        "arms": arms,
    }


def stages(folder: Path, study: Study, sizes: Sizes, seeds: Sequence[int], starred: bool = False) -> list[Stage]:
    """The graph in the order it runs: all arms of one training seed before the next, so that a study that is stopped
    early still compares whole sets of arms."""
    settings: dict[str, Any] = {"eval.size": sizes.panel, "eval.seed": 0, "save_every": sizes.save_every}
    settings |= dict(sizes.settings)
    graph: list[Stage] = []
    needs: tuple[str, ...] = ()
    if not {"env.data", "env.kind", "recipe"} & study.common.keys():
        games = folder / "games"
        graph.append(Stage("games", _undertow("data", *_games(games, sizes)), games, weight=0.16 * sizes.train_games))
        settings["env.data"], needs = games, ("games",)
    settings |= study.common
    for seed in seeds:
        graph += _seed_stages(folder / f"seed{seed}", study, sizes, {**settings, "seed": seed}, needs, starred)
    return graph


def _seed_stages(
    folder: Path, study: Study, sizes: Sizes, settings: Mapping[str, Any], needs: tuple[str, ...], starred: bool
) -> list[Stage]:
    seed, stage1 = f"seed{settings['seed']}", folder / "stage1"
    starts = {_start(arm, sizes) for arm in study.arms}
    own: dict[str, Any] = {"steps": sizes.stage1_steps, "eval.every": math.gcd(*starts)}
    own["save_every"] = math.gcd(settings["save_every"], *starts)
    step = 0.4 * settings["tasks_per_step"] * settings["group_size"]  # seconds
    command = _undertow("train", *words({"out": stage1, **settings, **own}))
    graph = [Stage(f"{seed}-stage1", command, stage1 / "checkpoints", needs, _BEGIN + step * sizes.stage1_steps)]
    for arm in study.arms:
        run, name, steps = folder / arm.name, f"{seed}-{arm.name}", _steps(arm, sizes)
        checkpoint = stage1 / "checkpoints" / f"step_{_start(arm, sizes)}"
        own = {"method": arm.method, "steps": steps, "eval.every": sizes.eval_every, "init_from": checkpoint}
        command = _undertow("train", *words({"out": run, **settings, **own, **arm.settings}))
        output = run / "checkpoints" / f"step_{steps}"
        graph.append(Stage(name, command, output, (f"{seed}-stage1",), _BEGIN + 1.4 * step * steps))
        asked = ["--seeds", ",".join(map(str, _eval_seeds(study, sizes)))]
        if "model.device" in study.common:
            asked += ["--device", study.common["model.device"]]
        if len(_eval_seeds(study, sizes)) > 1:  # training has played the first
            command = _undertow("eval", run, *asked)
            graph.append(Stage(f"{name}-end", command, run / "trajectories", (name,), _BEGIN + step))
        if starred:
            command = _undertow("eval", run, *asked, "--protocol", "skill_prompt")
            graph.append(Stage(f"{name}-starred", command, run / "trajectories", (name,), _BEGIN + step))
    return graph


def words(settings: Mapping[str, Any]) -> list[str]:
    """Settings by their dotted keys as words of the command line, each key once.

    A switch becomes --key or --no-key, a list several words behind its key.
    """
    found: list[str] = []
    for key, value in settings.items():
        section, dot, leaf = key.replace("_", "-").rpartition(".")
        if isinstance(value, bool):
            found.append(f"--{section}{dot}{'' if value else 'no-'}{leaf}")
        else:
            found += [f"--{section}{dot}{leaf}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return found


def _games(folder: Path, sizes: Sizes) -> list[str]:
    splits = {"train": sizes.train_games, "valid_seen": sizes.panel, "valid_unseen": 1}
    return words({"generate": "household", "out": folder, **splits})


def _start(arm: Arm, sizes: Sizes) -> int:
    """Step of Stage I behind the arm's first weights."""
    return math.ceil(arm.start * sizes.stage1_steps)


def _steps(arm: Arm, sizes: Sizes) -> int:
    """The arm's own training steps."""
    if arm.length == "end":  # as far as the others come
        return sizes.stage1_steps + sizes.stage2_steps - _start(arm, sizes)
    return math.ceil(Fraction(arm.length) * sizes.stage2_steps)


def _eval_seeds(study: Study, sizes: Sizes) -> list[int]:
    return list(range(study.eval_seeds or sizes.eval_seeds))


def _undertow(*given: object) -> tuple[str, ...]:
    return (sys.executable, "-m", "undertow", *(str(word) for word in given))
