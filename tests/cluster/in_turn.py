"""verl's trainer as ours is, for several runs one after the other: the workers start once."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import open_dict
from verl.trainer.ppo.v1 import register_trainer

from training.cluster.agent_loop import settings
from training.cluster.trainer import UndertowTrainer
from training.cluster.weights import origin


@register_trainer("in_turn")
class InTurn(UndertowTrainer):
    def fit(self, agent_loop_manager: Any) -> None:
        for run in list(self.config.undertow.runs):
            path = Path(run) / "config.json"
            config = settings(str(path))
            start = origin(config)  # policy and reference as in new workers
            self.actor_rollout_wg.begin(asdict(config), start, None, start, 0, 0)
            with open_dict(self.config):
                self.config.undertow.config, self.config.undertow.run = str(path), run
            super().fit(agent_loop_manager)
