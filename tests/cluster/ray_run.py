"""A run of three steps on real Ray, verl and gloo: `python -m tests.cluster.ray_run METHOD GAMES RUN`."""

import sys
from dataclasses import replace
from pathlib import Path

from training.config import RECIPES, Config
from training.settings import with_method

STEPS = 3


def config_of(method: str, games: str) -> Config:
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
    config = with_method(config, method)
    if method == "pr_opd":
        config = replace(config, method_config=replace(config.method_config, start_step=0))
    return config


def main(method: str, games: str, run: str) -> None:
    from training.cluster.layout import ClusterConfig
    from training.cluster.main import train_on_cluster

    try:
        train_on_cluster(config_of(method, games), Path(run), {}, ClusterConfig(gpus=1))
    except (ConnectionError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
