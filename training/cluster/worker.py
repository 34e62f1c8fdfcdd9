"""verl's worker (policy, reference and rollout of one GPU) with a Learner of ours in it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from diagnostics.paired import PairedSegment
from training.checkpoint import Learned
from training.cluster.engine import DEVICE, PairedEngine
from training.cluster.sharded import Sharded, log_probs
from training.cluster.weights import digest, load_optimiser, load_weights, save_checkpoint, save_reference
from training.config import Config
from training.engine import Reader
from training.method import Needs, load_method
from training.settings import from_document
from training.update import Learner

os.environ["VERL_ENGINE_DEVICE"] = DEVICE  # verl builds the policy and the reference on our engine


class UndertowWorker(ActorRolloutRefWorker):
    """Its methods are called in all workers at once, by training/cluster/learner.py."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin(
        self,
        document: dict[str, Any],
        weights: str | None,
        checkpoint: str | None,
        anchor: str | None,
        step: int,
        update: int,
    ) -> int:
        """Makes the learner of a run; returns the tokens of the model's longest context.

        Args: document, the configuration as JSON has it; weights and anchor, model folders of the policy and of the
        reference (None: the weights the workers have loaded); checkpoint, one of the same run or of the one it branches
        from, whose optimiser goes on.
        """
        load_method(document["method"])  # the command line named it
        config = from_document(Config(), document, "the run's configuration")
        method = load_method(config.method)
        engine: PairedEngine = self.actor.engine
        model: Any = engine.module
        if weights is not None:
            load_weights(model, weights)
        if anchor is not None and self.ref is not None:
            load_weights(self.ref.engine.module, anchor)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            modules: Any = method.modules(model.config, config.method_config) if method.modules else None
        decay, second = config.optim.weight_decay, None
        name = get_device_name()
        self._device = torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
        if modules is not None:
            modules.to(self._device)
            second = torch.optim.AdamW(modules.parameters(), lr=modules.lr, weight_decay=decay)
        first = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, weight_decay=decay)
        learned = Learned(model, first, modules, second)
        if checkpoint is not None:
            load_optimiser(learned, Path(checkpoint))
        reference = None if self.ref is None else self.ref.engine.module
        own = replace(config, optim=replace(config.optim, micro_batch_tokens=self._tokens))
        self._shards = Sharded(self._device)
        learner = Learner(own, method, own.method_config, learned, reference, lying=self._shards)
        learner.step, learner.update = step, update
        engine.learner, engine.optimizer = learner, first
        self.learner, self._config = learner, config
        return int(model.config.max_position_embeddings)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def log_probs(self, task: tuple[Reader, list[PairedSegment]]) -> list[np.ndarray]:
        """Of the pairs that are this worker's."""
        reader, pairs = task
        worker = self.ref if reader == "reference" else self.actor
        with worker.engine.eval_mode():
            return log_probs(self.learner, worker.engine.module, pairs, self._tokens)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def freeze(self, keep: bool) -> None:
        self.learner.freeze(keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish(self, needs: Needs) -> None:
        """The end of a step. Extra updates are left out where one of the workers has nothing to read for them."""
        if self._shards.anywhere(not self.learner.cache):
            self.learner.cache = []
        self.learner.finish(needs)
        self.learner.freeze(False)  # its memory is needed while episodes are played
        self.learner.step += 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, run: str, tokenizer: Any, state: dict[str, Any]) -> None:
        learner = self.learner
        save_checkpoint(Path(run), learner.step, learner.learned, tokenizer, state, self._config, self._device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_reference(self, run: str) -> None:
        if self.ref is not None:
            save_reference(Path(run), self.ref.engine.module, self._device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        """sha256 over the weights; the first worker knows."""
        return digest(self.actor.engine.module, self._device)

    @property
    def _tokens(self) -> int:
        return int(self.config.actor.ppo_max_token_len_per_gpu)
