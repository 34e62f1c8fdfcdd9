"""Runs of three steps on real Ray, verl and gloo, one after the other. Starting verl takes longer than all of them.

python -m tests.cluster.ray_run GAMES FOLDER CASE...
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from training.config import RECIPES, Config
from training.settings import with_method

STEPS = 3


def config_of(case: str, games: str) -> Config:
    """The configuration of a case: the name of a method, "windowed" (pr_opd under the other protocol) or a .py file."""
    tiny = RECIPES["tiny-grpo"]
    config = replace(
        tiny,
        steps=STEPS,
        tasks_per_step=2,
        group_size=2,
        save_every=1,
        env=replace(tiny.env, data=games, max_turns=5, workers=1),
        optim=replace(tiny.optim, mini_batch_rows=4, micro_batch_tokens=4096),
        eval=replace(tiny.eval, every=STEPS, size=2, temperature=0.0),
    )
    if case == "windowed":
        config = replace(config, sampler=replace(config.sampler, protocol="windowed"))
    config = with_method(config, "pr_opd" if case == "windowed" else case)
    if config.method == "pr_opd":
        config = replace(config, method_config=replace(config.method_config, start_step=0))
    return config


def main(games: str, folder: str, *cases: str) -> None:
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    from training.cluster.dry_run import dry_run
    from training.cluster.layout import ClusterConfig
    from training.cluster.main import compose
    from training.cluster.weights import origin
    from training.start import record

    runs = [Path(folder) / Path(case).stem for case in cases]
    for case, run in zip(cases, runs, strict=True):
        record(config_of(case, games), run, {})
    first = config_of(cases[0], games)
    values = dry_run(first, runs[0], ClusterConfig(gpus=1), origin(first)).settings
    values |= {"trainer.v1.trainer_mode": "in_turn", "undertow.runs": [str(run) for run in runs]}
    base = TaskRunnerV1.__ray_metadata__.modified_class

    class Runner(base):  # type: ignore[misc, valid-type]
        def run(self, config: Any) -> None:
            import tests.cluster.in_turn  # noqa: F401 - makes verl know the trainer

            super().run(config)

    run_ppo(compose(values), task_runner_class=ray.remote(Runner))


if __name__ == "__main__":
    main(*sys.argv[1:])
