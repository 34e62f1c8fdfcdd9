"""Starts a run on the cluster: our configuration in verl's words, Ray, verl's runner with our trainer.

`undertow train --engine cluster` calls train_on_cluster; `python -m training.cluster.main KEY=VALUE ...` is the command
it prints, for a run folder that has a config.json.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from training.checkpoint import latest_complete
from training.cluster.dry_run import dry_run
from training.cluster.layout import ClusterConfig
from training.cluster.refuse import refuse
from training.cluster.weights import origin
from training.config import Config
from training.envs.panels import disjoint
from training.session import Session
from training.settings import refuse_changes
from training.start import record
from training.subject import find_subject, write_json

CPU = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "training.cluster.cpu",
    "OMP_NUM_THREADS": "1",
    "RAY_prestart_worker_first_driver": "0",  # a process for each logical CPU, which nothing here would use
    "RAY_worker_niceness": "0",  # here workers do the work; Ray's own 15 makes them wait for everything else
}


def train_on_cluster(config: Config, run: Path, args: Mapping[str, Any], cluster: ClusterConfig) -> Path:
    """What training.start.start does on one machine: checks, the run folder, and the run.

    Args: as there; cluster, where it goes.
    Raises: ValueError before any work, as there, or for a method that the cluster does not have; ConnectionError as
    start().
    """
    if config.init_from is not None:
        config = replace(config, init_from=str(Path(find_subject(config.init_from, config).source).resolve()))
    if config.method.endswith(".py"):
        config = replace(config, method=str(Path(config.method).resolve()))  # workers stand in other folders
    run = run.resolve()
    refuse_changes(config, run)
    refuse(config)
    if config.eval.every:
        with Session(config, None, None) as session:
            disjoint(session.train_tasks, session.panel)
    record(config, run, args)
    said = dry_run(config, run, cluster, origin(config))
    write_json(run / "verl.json", said.settings)
    print(f"verl is started as by: {said.command}", flush=True)
    return start(compose(said.settings))


def compose(values: Mapping[str, Any]) -> DictConfig:
    """verl's configuration with our values in it, by dotted key, and the environment that verl is imported with."""
    joined = values.get("ray_kwargs.ray_init.address") is not None  # a cluster that runs already has its own rules
    variables = ({} if joined else {"RAY_AUTH_MODE": "disabled"}) | (CPU if values["trainer.device"] == "cpu" else {})
    os.environ |= variables
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    for key, value in values.items():
        OmegaConf.update(config, key, value, merge=isinstance(value, dict), force_add=True)
    OmegaConf.update(config, "ray_kwargs.ray_init.runtime_env.env_vars", variables, force_add=True)
    return config


def start(config: DictConfig) -> Path:
    """Runs verl on the configuration until the run is over; returns the folder of the last checkpoint.

    Raises: ConnectionError in one sentence when a worker or a server dies: the run can be continued; ValueError and
    FloatingPointError of our own code as on one machine.
    """
    run = Path(config.undertow.run)
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    base = TaskRunnerV1.__ray_metadata__.modified_class

    class Runner(base):  # type: ignore[misc, valid-type]
        def run(self, config: Any) -> None:
            import training.cluster.trainer  # noqa: F401 - makes verl know our trainer

            super().run(config)

    try:
        run_ppo(config, task_runner_class=ray.remote(Runner))
    except ray.exceptions.RayError as error:
        cause = _cause(error)
        if isinstance(cause, ValueError | FloatingPointError):
            raise type(cause)(str(cause)) from error
        raise ConnectionError(_sentence(cause, run)) from error
    finally:
        ray.shutdown()
    checkpoint = latest_complete(run)
    assert checkpoint is not None  # the last step of a run saves one
    return checkpoint


def _cause(error: BaseException) -> BaseException:
    """What was raised first, through however many processes it came."""
    import ray

    while isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    return error


def _sentence(cause: BaseException, run: Path) -> str:
    """What died, and where the run can go on."""
    import ray

    if isinstance(cause, ray.exceptions.ActorDiedError | ray.exceptions.WorkerCrashedError):
        what = "a worker of the cluster died (killed, or out of memory)"
    else:
        what = f"the cluster stopped: {(str(cause).strip().splitlines() or [type(cause).__name__])[-1]}"
    kept = latest_complete(run)
    rest = f"goes on from {kept.name}" if kept else "starts anew"
    return f"{what}; the same command {rest}"


def main() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = OverridesParser.create().parse_overrides(sys.argv[1:])
    try:
        print(start(compose({word.key_or_group: word.value() for word in words})))
    except (ConnectionError, ValueError, FloatingPointError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
