"""The cluster's engine of the training loop: the questions of the loop, asked to all workers of verl at once.

Rows travel whole, in a TensorDict without tensors: their pairs have two contexts of different lengths, which verl's
fields for one prompt and one response cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from verl.utils import tensordict_utils as tu

from diagnostics.artifact import load_artifact
from diagnostics.paired import PairedSegment
from training.batch import Row, denominators
from training.checkpoint import latest_complete
from training.cluster.engine import ROWS, UPDATE, Update, micro_loss
from training.cluster.refuse import refuse
from training.cluster.sharded import empty_row
from training.cluster.weights import anchor
from training.config import Config
from training.engine import Reader
from training.method import Needs, load_method
from training.monitor import Means


class ClusterLearner:
    """An Engine (training/engine.py). Args: workers, a worker group of UndertowWorker whose models are loaded."""

    def __init__(self, workers: Any, config: Config, run: Path) -> None:
        self.workers, self.config = workers, config
        self.method = load_method(config.method)
        self.method_config = self.method.config() if config.method_config is None else config.method_config
        refuse(config)
        self.step = self.update = 0
        self.state: dict[str, Any] = {}  # document of the checkpoint it goes on from
        resumed = latest_complete(run)
        weights, checkpoint = None, config.init_from
        if resumed is not None:
            self.state = load_artifact(resumed, "checkpoint").document("state")
            weights = checkpoint = str(resumed)
            self.step, self.update = self.state["step"], self.state["update"]
            for name, ours in (("method", config.method), ("seed", config.seed)):
                if self.state[name] != ours:
                    raise ValueError(
                        f"{run} was trained with {name} {self.state[name]!r}, not {ours!r}; choose another run folder"
                    )
        document = asdict(config) | {"method_config": asdict(self.method_config)}
        self.longest = workers.begin(document, weights, checkpoint, anchor(config, run), self.step, self.update)[0]
        workers.set_loss_fn(micro_loss)
        if resumed is None:
            workers.save_reference(str(run))

    def log_probs(self, reader: Reader, pairs: Sequence[PairedSegment]) -> Sequence[torch.Tensor]:
        if not pairs:
            return []
        world = self.workers.world_size
        order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].student_ids))
        shares = [order[rank::world] for rank in range(world)]  # like lengths in every worker
        asked = [(reader, [pairs[i] for i in share or order[:1]]) for share in shares]
        found: dict[int, torch.Tensor] = {}
        for share, read in zip(shares, self.workers.log_probs(asked), strict=True):
            found |= {i: torch.from_numpy(values.copy()) for i, values in zip(share, read, strict=False)}
        return [found[i] for i in range(len(pairs))]

    def freeze(self, keep: bool) -> None:
        self.workers.freeze(keep)

    def learn(self, needs: Needs, rows: Sequence[Row], means: Means) -> None:
        of = denominators(rows, self.config.objective.reduction)
        rows = _for_workers(rows, self.workers.world_size)
        batch = tu.get_tensordict({ROWS: rows}, {UPDATE: Update(needs, of), "mini_batch_size": len(rows), "epochs": 1})
        answer = self.workers.update_actor(batch)
        for sums in _mappings(tu.get(answer, "metrics")[UPDATE]):
            means.add(sums)
        self.update += 1

    def finish(self, needs: Needs) -> None:
        self.workers.finish(needs)

    def save(self, run: Path, tokenizer: Any, state: Mapping[str, Any]) -> None:
        self.workers.save(str(run), tokenizer, dict(state))

    def digest(self) -> str:
        """sha256 over the weights as they are now."""
        return self.workers.digest()[0]


def _for_workers(rows: Sequence[Row], world: int) -> list[Row]:
    """The rows in the order of the workers that get them, long and short ones in each, and as many in each."""
    order = sorted(rows, key=lambda row: -row.width)
    order += [empty_row(order[0])] * (-len(order) % world)
    return [row for rank in range(world) for row in order[rank::world]]


def _mappings(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict):
        yield found
    else:
        for item in found:
            yield from _mappings(item)
