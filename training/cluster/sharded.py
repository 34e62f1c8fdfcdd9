"""How weights lie on the cluster: FSDP2 shards in every process, gathered around each forward.

FSDP gathers the embedding, the final norm and the head in hooks around the root's own call, so every forward of ours
goes through that call: `open_root` lets the root call what it is given. All processes must make the same number of
forwards and backwards; `Sharded.alike` adds micro-batches without response tokens where a process has fewer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from diagnostics.forward import Reading, read_contexts
from diagnostics.paired import PairedSegment, run_pairs
from training.batch import Row, micro_batches
from training.update import Learner, Whole, precision

# what a forward returns is never changed in place
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def open_root(module: nn.Module) -> None:
    """Lets `module(reading=function)` call the function while the root's weights are gathered."""
    forward = module.forward

    def opened(*args: Any, reading: Any = None, **options: Any) -> Any:
        return forward(*args, **options) if reading is None else reading()

    module.forward = opened  # type: ignore[method-assign]


class Sharded(Whole):
    """Weights as DTensors of FSDP2; what is not sharded (a method's modules) is the same in every process."""

    def __init__(self, device: torch.device) -> None:
        self.processes, self._device = dist.get_world_size(), device

    def device(self, model: Any) -> torch.device:
        return self._device  # between forwards the shards may lie in host memory

    def read(self, model: Any, *contexts: Any, **options: Any) -> Reading:
        if isinstance(model, Frozen):
            with model.in_place():
                return self.read(model.model, *contexts, **options)
        return model(reading=partial(read_contexts, model, *contexts, **options))

    def copy(self, model: Any) -> Frozen:
        return Frozen(model)

    def alike(self, parts: list[list[Row]]) -> list[list[Row]]:
        count = torch.tensor(len(parts), device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return parts + [[empty_row(parts[0][0])]] * (int(count) - len(parts))

    def anywhere(self, here: bool) -> bool:
        """Whether something is so in any process."""
        found = torch.tensor(int(here), device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> float:
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            there: Any = norm.to(self._device)
            norm = there.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)

    def clip_modules(self, parameters: Sequence[Tensor], limit: float) -> float:
        for parameter in parameters if self.processes > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= self.processes
        return super().clip(parameters, limit)


class Frozen:
    """The shards of a model as they were; reading them puts them in the model's place for the time of one forward."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self._kept = [_local(parameter).clone() for parameter in model.parameters()]

    def modules(self) -> Iterator[nn.Module]:
        return self.model.modules()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self.model.reshard()  # what was gathered from the other weights is dropped
        for parameter, kept in zip(self.model.parameters(), self._kept, strict=True):
            current = _local(parameter)
            spare = current.clone()
            current.copy_(kept)
            kept.copy_(spare)


def _local(parameter: Tensor) -> Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()


def empty_row(row: Row) -> Row:
    """A row without a response token: it takes part in the forward passes and in nothing else."""
    pair = row.pair
    nothing = {name: getattr(pair, name)[:0] for name in ("student_positions", "response_ids", "turn", "token_class")}
    short = replace(pair, student_ids=pair.student_ids[:2], teacher_ids=None, teacher_positions=None, **nothing)
    arrays = {name: getattr(row, name) for name in row.__dataclass_fields__}
    empty: dict[str, Any] = {name: v[:0] for name, v in arrays.items() if isinstance(v, Tensor)}
    return replace(row, pair=short, **empty)


def log_probs(learner: Learner, model: Any, pairs: Sequence[PairedSegment], tokens: int) -> list[np.ndarray]:
    """Log-probs (nats) of the response tokens in the student's contexts, pair by pair, read by all processes together.

    Args: pairs, of this process; tokens, padded ones of one forward.
    """
    nothing = torch.zeros(0)
    rows = [Row(pair, index, nothing, nothing, nothing) for index, pair in enumerate(pairs)]
    read: dict[int, np.ndarray] = {}
    device = learner.lying.device(model)
    for part in learner.lying.alike(micro_batches(rows, tokens)):
        with precision(learner.config, device):
            passed = run_pairs(
                model,
                [row.pair for row in part],
                temperature=learner.config.sampler.temperature,
                teacher=False,
                read_with=learner.lying.read,
            )
        values = passed.student_logprobs.float().cpu().split([row.n_tokens for row in part])
        read |= {row.trajectory: part.numpy() for row, part in zip(part, values, strict=True) if row.n_tokens}
    return [read.get(index, np.zeros(0, np.float32)) for index in range(len(pairs))]
