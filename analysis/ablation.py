"""A matched ablation: arms that differ in nothing but their method, each branching from the same Stage-I checkpoint.

<study>/games                   generated games, unless the study brings its own
<study>/seed<s>/stage1          GRPO, once a training seed
<study>/seed<s>/<arm>           the arm's training and its evaluations
<study>/ablation.json           what is compared, for the tables and the figure

Studies of one paper share the first two: `graph` takes their folder apart from that of the arms.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
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


@dataclass(frozen=True)
class Part:
    """A study inside a graph: where its arms lie, and how its stages are called."""

    study: Study
    folder: Path
    prefix: str = ""  # of the names of its stages
    starred: bool = False  # also evaluate every arm with a library's skills in its prompt


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
    share_cores(jobs)
    seeds = sizes.seeds if seeds is None else seeds
    graph = stages(folder, study, sizes, seeds, starred)
    for stage in graph:
        if "train" in stage.command and stage.name.startswith(f"seed{seeds[0]}-"):
            try:
                check(stage.command[stage.command.index("train") + 1 :])
            except ValueError as error:
                raise ValueError(f"study {study.name}, {stage.name.partition('-')[2]}: {error}") from error
    write_plan(folder, study, sizes, seeds, starred)
    return run_study(graph, folder, jobs)


def share_cores(jobs: int) -> None:
    """Threads of every torch process that this one starts, unless the user has set them."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min((os.cpu_count() or 1) // max(jobs, 1), 2))))


def write_plan(folder: Path, study: Study, sizes: Sizes, seeds: Sequence[int], starred: bool) -> None:
    """Write what is compared to <folder>/ablation.json."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{PLAN}.tmp"
    temporary.write_text(json.dumps(plan(study, sizes, seeds, starred), indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, folder / PLAN)


def plan(study: Study, sizes: Sizes, seeds: Sequence[int], starred: bool) -> dict[str, Any]:
    """What is compared: the study, with its arms in steps of the recipe."""
    arms = [
        {
            "arm": arm.name,
            "method": arm.method,
            "settings": dict(arm.settings),
            "start": first_step(arm, sizes),
            "steps": own_steps(arm, sizes),
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
        "unseen": study.unseen,
        "starred": starred,
        "common": dict(study.common),
        "sizes": asdict(sizes),
        "arms": arms,
    }


def stages(folder: Path, study: Study, sizes: Sizes, seeds: Sequence[int], starred: bool = False) -> list[Stage]:
    """The graph of one study, games and Stage I in its own folder."""
    return graph(folder, [Part(study, folder, starred=starred)], sizes, seeds)


def graph(shared: Path, parts: Sequence[Part], sizes: Sizes, seeds: Sequence[int], prefix: str = "") -> list[Stage]:
    """The stages in the order they run: all arms of one training seed before the next, so that what is stopped early
    still compares whole sets of arms.

    Args: shared, folder of the games and of Stage I, which is trained once a training seed for the arms of all parts;
    prefix, of the names of these stages.
    Raises: ValueError where parts differ in a setting that Stage I has too.
    """
    common = parts[0].study.common
    for part in parts[1:]:
        if part.study.common != common:
            names = f"{parts[0].study.name} and {part.study.name}"
            raise ValueError(f"studies {names} cannot branch from one Stage I: their common settings differ")
    settings: dict[str, Any] = {"eval.size": sizes.panel, "eval.seed": 0, "save_every": sizes.save_every}
    settings |= dict(sizes.settings)
    found: list[Stage] = []
    if not {"env.data", "env.kind", "recipe"} & common.keys():
        games = shared / "games"
        unseen = sizes.panel if any(part.study.unseen for part in parts) else 1
        splits = {"train": sizes.train_games, "valid_seen": sizes.panel, "valid_unseen": unseen}
        command = undertow("data", *words({"generate": "household", "out": games, **splits}))
        found.append(Stage(f"{prefix}games", command, games, weight=0.16 * sum(splits.values())))
        settings["env.data"] = games
    settings |= common
    starts = {first_step(arm, sizes) for part in parts for arm in part.study.arms}
    needs = tuple(stage.name for stage in found)
    for seed in seeds:
        settings["seed"], run = seed, shared / f"seed{seed}" / "stage1"
        stage1 = _stage1(f"{prefix}seed{seed}-stage1", run, sizes, settings, starts, needs)
        found.append(stage1)
        for part in parts:
            found += [s for arm in part.study.arms for s in _arm_stages(part, arm, sizes, settings, run, stage1.name)]
    return found


def _stage1(
    name: str,
    run: Path,
    sizes: Sizes,
    settings: Mapping[str, Any],
    starts: Collection[int],
    needs: tuple[str, ...],
) -> Stage:
    """GRPO, evaluated and saved at every step where an arm starts."""
    own: dict[str, Any] = {"steps": sizes.stage1_steps, "eval.every": math.gcd(*starts)}
    own["save_every"] = math.gcd(settings["save_every"], *starts)
    command = undertow("train", *words({"out": run, **settings, **own}))
    return Stage(name, command, run / "checkpoints", needs, _BEGIN + _step_seconds(settings) * sizes.stage1_steps)


def _arm_stages(
    part: Part, arm: Arm, sizes: Sizes, settings: Mapping[str, Any], stage1: Path, after: str
) -> list[Stage]:
    """An arm's training, then its evaluations. Args: stage1, its run; after, the name of its stage."""
    seed, study, steps = f"seed{settings['seed']}", part.study, own_steps(arm, sizes)
    run, name = part.folder / seed / arm.name, f"{part.prefix}{seed}-{arm.name}"
    checkpoint = stage1 / "checkpoints" / f"step_{first_step(arm, sizes)}"
    own = {"method": arm.method, "steps": steps, "eval.every": sizes.eval_every, "init_from": checkpoint}
    command = undertow("train", *words({"out": run, **settings, **own, **arm.settings}))
    step, output = _step_seconds(settings), run / "checkpoints" / f"step_{steps}"
    found = [Stage(name, command, output, (after,), _BEGIN + 1.4 * step * steps)]
    asked = ["--seeds", ",".join(map(str, _eval_seeds(study, sizes)))]
    if "model.device" in study.common:
        asked += ["--device", study.common["model.device"]]
    evaluations = {
        "end": (len(_eval_seeds(study, sizes)) > 1, []),  # training has played the first
        "unseen": (study.unseen, ["--panel", "valid_unseen"]),
        "starred": (part.starred, ["--protocol", "skill_prompt"]),
    }
    for kind, (wanted, more) in evaluations.items():
        if wanted:
            command = undertow("eval", run, *asked, *more)
            found.append(Stage(f"{name}-{kind}", command, run / "trajectories", (name,), _BEGIN + step))
    return found


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


def first_step(arm: Arm, sizes: Sizes) -> int:
    """Step of Stage I behind the arm's first weights."""
    return math.ceil(arm.start * sizes.stage1_steps)


def own_steps(arm: Arm, sizes: Sizes) -> int:
    """The arm's own training steps."""
    if arm.length == "end":  # as far as the others come
        return sizes.stage1_steps + sizes.stage2_steps - first_step(arm, sizes)
    return math.ceil(Fraction(arm.length) * sizes.stage2_steps)


def undertow(*given: object) -> tuple[str, ...]:
    """A command of ours as argv."""
    return (sys.executable, "-m", "undertow", *(str(word) for word in given))


def _step_seconds(settings: Mapping[str, Any]) -> float:
    return 0.4 * float(settings["tasks_per_step"] * settings["group_size"])


def _eval_seeds(study: Study, sizes: Sizes) -> list[int]:
    return list(range(study.eval_seeds or sizes.eval_seeds))
