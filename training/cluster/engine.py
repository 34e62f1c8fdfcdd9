"""verl's FSDP2 engine with our forward, loss and update: a mini-batch of rows instead of padded prompts and responses.

verl drives it as any of its engines: set_loss_fn gives the loss, train_batch clears the gradients, calls
forward_backward_batch and then optimizer_step. Those are the functions of training/update.py here, on shards.
It is registered for the device "undertow", which the worker asks for (VERL_ENGINE_DEVICE): verl looks engines up by
device, and its own one for language models is registered for GPUs only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from diagnostics.paired import PairedPass
from training.batch import Batch, Denominators
from training.cluster.sharded import open_root
from training.method import Needs
from training.monitor import Means
from training.objective import Objective
from training.update import Learner, accumulate, method_loss, take_step

DEVICE = "undertow"
ROWS, UPDATE = "row", "undertow"  # keys of a mini-batch: its rows, and the rest (Update)

if not torch.cuda.is_available():  # verl keeps a reference in pinned host memory, which only a GPU has
    transformer_impl.CPUOffloadPolicy = lambda pin_memory: None  # type: ignore[assignment, misc]


class Update(NamedTuple):
    """What a mini-batch is learnt with, besides its rows."""

    needs: Needs
    of: Denominators  # of the whole mini-batch, of all workers


class Micro(NamedTuple):
    """verl's `data` of one micro-batch."""

    learner: Learner
    needs: Needs
    batch: Batch


def micro_loss(model_output: PairedPass, data: Micro, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Our loss with the signature of verl's."""
    result = method_loss(data.learner, data.needs, data.batch, model_output)
    return result.loss, result.metrics


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device=DEVICE)
class PairedEngine(transformer_impl.FSDPEngineWithLMHead):
    """Set `learner` before the first mini-batch."""

    learner: Any = None  # a Learner

    def initialize(self) -> None:
        super().initialize()
        open_root(self.module)

    def optimizer_zero_grad(self) -> None:
        if self.learner is not None:
            self.learner.clear()

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        """The gradients of this worker's rows. The metrics are sums, which the first process adds up over workers."""
        task, self.means = tu.get(data, UPDATE), Means()

        def loss(learner: Learner, needs: Needs, batch: Batch, pair: PairedPass) -> Objective:
            return Objective(*loss_function(model_output=pair, data=Micro(learner, needs, batch), dp_group=None))

        learns = accumulate(self.learner, task.needs, list(data[ROWS]), task.of, self.means, loss)
        self.learns = self.learner.lying.anywhere(learns)
        return {"model_output": {}, "loss": [], "metrics": {}}

    def optimizer_step(self) -> float:
        if self.learns:
            take_step(self.learner, self.means)
        return self.means.result().get("optim/grad_norm/model", 0.0)

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        outputs = super().train_batch(data, loss_function)
        outputs["metrics"][UPDATE] = [self.means.sums()]
        return outputs

    def lr_scheduler_step(self) -> float:
        """Nothing: the rate follows the step, as on the local engine (update.take_step)."""
        return float(self.learner.learned.optimizer.param_groups[0]["lr"])
