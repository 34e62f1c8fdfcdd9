"""One worker of verl in a process of its own, without Ray.

    python -m tests.cluster.parity RANK WORLD PORT FOLDER CASE...

Every process runs the same loop on the episodes stored in FOLDER; the workers' collectives keep them in step. What a
worker group does (hand each worker its share, gather the answers) is done by Group.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from diagnostics.records import Skill
from training.config import RECIPES, Config
from training.settings import with_method


def config_of(case: str, data: str, world: int = 1) -> Config:
    """A step of two updates of two rows: old log-probs, a policy that has left its anchor, a teacher that stays.

    "branch" starts from the checkpoint of sdar's run, "resumed" is pr_opd in two steps. "alone" learns from one row
    that has a skill: in one update there is nothing to learn, and one of two workers has nothing for extra updates.
    """
    method = {"branch": "grpo", "resumed": "pr_opd", "alone": "pr_opd"}.get(case, case)
    tiny = RECIPES["tiny-grpo"]
    config = replace(
        tiny,
        steps=2 if case == "resumed" else 1,
        tasks_per_step=2,
        group_size=2,
        save_every=1,
        env=replace(tiny.env, data=data, max_turns=5, workers=1),
        optim=replace(tiny.optim, mini_batch_rows=2, micro_batch_tokens=2048),
        eval=replace(tiny.eval, every=0),
        init_from=str(Path(data).parent / "local/sdar/checkpoints/step_1") if case == "branch" else None,
    )
    config = with_method(config, method)
    if case == "alone":
        own = {"start_step": 0, "reward_coefficient": 0.0, "projector_updates": 2 if world > 1 else 0}
        return replace(config, method_config=replace(config.method_config, **own))
    if method == "pr_opd":
        return replace(config, method_config=replace(config.method_config, start_step=0, coefficient=1.0))
    return config if method == "grpo" else replace(config, method_config=replace(config.method_config, coefficient=1.0))


def skills_of(case: str, skills: dict[str, Skill]) -> dict[str, Skill]:
    return dict(list(skills.items())[:1]) if case == "alone" else skills


class Group:
    """What ClusterLearner asks of a worker group, for the worker of this process."""

    def __init__(self, worker: Any, rank: int, world: int) -> None:
        self.worker, self.rank, self.world_size = worker, rank, world

    def log_probs(self, shares: list[Any]) -> list[Any]:
        import torch.distributed as dist

        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, self.worker.log_probs(shares[self.rank]))
        return answers

    def update_actor(self, batch: Any) -> Any:
        return self.worker.update_actor(batch.chunk(self.world_size)[self.rank])

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: [getattr(self.worker, name)(*arguments)]


def main(rank: int, world: int, port: int, folder: Path, cases: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import torch

    from diagnostics.artifact import load_skills, load_trajectories
    from training.cluster.dry_run import dry_run
    from training.cluster.layout import ClusterConfig
    from training.cluster.main import compose
    from training.cluster.weights import load_weights, origin
    from training.models.load import load_policy
    from training.skills.source import SkillSource
    from training.train import Sources, run_steps

    torch.set_num_threads(1)
    data = str(folder / "games")
    first = config_of(cases[0], data)
    settings = dry_run(first, folder, ClusterConfig(gpus=world), origin(first)).settings
    verl = compose(settings)
    from training.cluster.learner import ClusterLearner
    from training.cluster.worker import UndertowWorker

    worker = UndertowWorker(verl.actor_rollout_ref, role="actor_rollout_ref", distillation_config=verl.distillation)
    worker.init_model()
    played = load_trajectories(folder / "episodes")
    skills = load_skills(folder / "skills")
    _, tokenizer = load_policy("tiny")

    for case in cases:
        config = config_of(case, data, world)
        written = skills_of(case, skills)
        run = folder / f"world{world}" / case
        for steps in range(1, config.steps + 1):  # each step by a learner that begins anew
            load_weights(worker.actor.engine.module, origin(config))  # as in new workers
            load_weights(worker.ref.engine.module, origin(config))
            part = replace(config, steps=steps)
            learner = ClusterLearner(Group(worker, rank, world), part, run)
            sources = Sources(
                lambda *_, written=written: written, None, SkillSource(config.skills, "household", config.seed)
            )
            log = run if rank == 0 else folder / "nowhere" / case  # one process writes
            run_steps(learner, log, tokenizer, lambda step: played, sources)
            torch.distributed.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:])
