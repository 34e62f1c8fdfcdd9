"""Does a run fit on a named GPU: pure arithmetic over the model's sizes, the configuration and a layout.

Weights, gradients and both AdamW moments are float32 and sharded over all GPUs (16 bytes a parameter); compute is
bfloat16; blocks are recomputed in the backward pass; the head is applied to response tokens alone, piece by piece. The
reference stays in host memory (verl reads it through FSDP's CPU offload). Training and vLLM take turns on the same
GPUs, so that the plan has two phases, and the larger one decides. Activations are counted, not measured: MARGIN is what
the count leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from training.cluster.gpus import Gpu, find_gpu
from training.cluster.layout import SHARES, ClusterConfig, Layout, layouts
from training.cluster.shapes import Shape
from training.config import Config
from training.method import Needs

GIB = 2**30
CONTEXT = 1.5  # GiB: CUDA context and NCCL buffers of a process
MARGIN = 0.08  # of a GPU's memory, kept free for fragmentation
LOGITS = 2**25  # of one piece of the head, as in diagnostics/forward.py
LOGIT_BYTES = 14  # of each: bfloat16, float32, its log-softmax, the gradient
SYNC = 2.0  # GiB: the bucket in which weights travel to vLLM
CHECKPOINT = 12  # bytes a parameter: weights and moments, gathered in one process
LEAST_SEQUENCES = 4  # of full length that vLLM's cache must hold, else it thrashes


@dataclass(frozen=True)
class Extra:
    """What a method adds to GRPO, as the plan needs to know it."""

    needs: Needs  # of its heaviest step
    parameters: int = 0  # of its own modules, float32, on every GPU


@dataclass(frozen=True)
class Item:
    phase: str  # "update" or "rollout"
    name: str
    gib: float  # on each GPU


@dataclass(frozen=True)
class Plan:
    """One layout on one GPU type, item by item."""

    layout: Layout
    items: tuple[Item, ...]
    budget: float  # GiB of a GPU that may be filled
    host: float  # GiB of host memory on the first node: what is offloaded, and a checkpoint when it is written
    sequences: int  # of full length that vLLM's cache holds on one replica
    live: int  # episodes that one replica plays at once

    @property
    def peak(self) -> float:
        return max(self.total("update"), self.total("rollout"))

    @property
    def fits(self) -> bool:
        return self.peak <= self.budget and self.sequences >= min(LEAST_SEQUENCES, self.live)

    def total(self, phase: str) -> float:
        return sum(item.gib for item in self.items if item.phase == phase)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.fits:
            return f"fits: {self.peak:.1f} of {self.budget:.1f} GiB a GPU at the peak"
        if self.sequences < min(LEAST_SEQUENCES, self.live):
            return (
                f"does not fit: beside the weights vLLM's share holds {self.sequences} episodes of full length, "
                f"{LEAST_SEQUENCES} are the least"
            )
        largest = max(self.items, key=lambda item: item.gib)
        return (
            f"does not fit: {self.peak:.1f} GiB, and {self.budget:.1f} are there; the largest part is {largest.name} "
            f"({largest.gib:.1f} GiB), so take more GPUs, larger ones, or a smaller sampler.max_context"
        )


def best_plan(config: Config, extra: Extra, shape: Shape, cluster: ClusterConfig) -> Plan:
    """The plan of the fastest layout that fits; where none does, that of the thriftiest, which says so.

    vLLM gets the least share whose cache holds all episodes that are played at once, else the largest that fits.
    """
    plans: list[Plan] = []
    for layout in layouts(shape, cluster, longest_row(config, extra), config.optim.micro_batch_tokens):
        plans = [plan(config, extra, shape, cluster, replace(layout, share=share)) for share in SHARES]
        fitting = [found for found in plans if found.fits]
        if fitting:
            return next((found for found in fitting if found.sequences >= found.live), fitting[-1])
    return plans[-1]


def longest_row(config: Config, extra: Extra) -> int:
    """Tokens of the longest row a forward may meet: a full context, and the skill in front of it."""
    return config.sampler.max_context + skill_budget(config, extra.needs)


def skill_budget(config: Config, needs: Needs) -> int:
    """Tokens that the longest skill adds to a teacher's context."""
    return 0 if needs.teacher == "none" else config.skills.budget


def plan(config: Config, extra: Extra, shape: Shape, cluster: ClusterConfig, layout: Layout) -> Plan:
    """Memory of one layout, by phase.

    Source: ours. Args: extra, what the method adds; cluster.gpu, the GPU's name. Raises: ValueError for an unknown GPU.
    """
    gpu = find_gpu(cluster.gpu)
    sharded = shape.parameters / cluster.world / GIB
    frozen = 4 * sharded if _frozen(extra.needs) else 0.0
    cache, live = _cache(config, shape, cluster, layout, gpu)
    items = (*_update(config, extra, shape, layout, sharded, frozen), *_rollout(layout, gpu, sharded))
    held = {"none": 0, "idle": 12, "cpu": 16}[layout.offload] + (4 if _reference(config, extra.needs) else 0)
    return Plan(
        layout,
        items,
        budget=gpu.memory * (1 - MARGIN),
        host=held * sharded * cluster.gpus + CHECKPOINT * shape.parameters / GIB,
        sequences=int(cache * GIB / (shape.kv_bytes * config.sampler.max_context / layout.tensor_parallel)),
        live=live,
    )


def _reference(config: Config, needs: Needs) -> bool:
    """Whether the weights the run started from are kept."""
    return bool(needs.regularised and config.objective.kl_coefficient) or needs.teacher == "initial"


def _frozen(needs: Needs) -> bool:
    """Whether the weights of the rollout are kept beside the policy: what they say cannot be read ahead."""
    return needs.teacher == "rollout" and (needs.states != "none" or needs.divergence != "none")


def _update(
    config: Config, extra: Extra, shape: Shape, layout: Layout, sharded: float, frozen: float
) -> Iterator[Item]:
    tokens = layout.micro_tokens
    if layout.offload != "cpu":
        yield Item("update", "weights, float32", 4 * sharded)
        yield Item("update", "gradients, float32", 4 * sharded)
        yield Item("update", "AdamW moments, float32", 8 * sharded)
    if frozen:
        yield Item("update", "weights of the rollout, float32", frozen)
    # what FSDP gathers: embedding and head stay for the whole pass, of the blocks one computes and one arrives
    yield Item("update", "gathered weights, bfloat16", 2 * (shape.ends + 2 * shape.block) / GIB)
    kept = shape.layers * shape.hidden * 2
    block = (10 * shape.hidden + 4 * shape.intermediate) * 2
    yield Item("update", "activations, recomputed by block", tokens * (kept + block) / GIB)
    branches = 1 if extra.needs.divergence == "none" else 2
    yield Item("update", "logits, piece by piece", branches * LOGITS * LOGIT_BYTES / GIB)
    responses = tokens * _response_share(config)
    if extra.needs.states != "none":
        yield Item("update", "hidden states of both branches", responses * shape.layers * shape.hidden * 2 * 2 / GIB)
    if extra.parameters:
        inner = extra.parameters / (2 * shape.hidden * shape.layers)  # width inside: two matrices a layer
        inside = 4 * (3 * shape.hidden + 2 * inner)  # float32: input, inside twice, output, its unit vector
        yield Item("update", "method's modules with AdamW, float32", 16 * extra.parameters / GIB)
        yield Item("update", "method's modules, activations", responses * shape.layers * inside / GIB)
    yield Item("update", "CUDA and NCCL", CONTEXT)


def _response_share(config: Config) -> float:
    """Of a row's tokens, at most: one reply to a full prompt, or all of a growing conversation."""
    sampler = config.sampler
    return sampler.max_new_tokens / sampler.max_context if sampler.protocol == "windowed" else 1.0


def _rollout(layout: Layout, gpu: Gpu, sharded: float) -> Iterator[Item]:
    yield Item("rollout", "vLLM: weights and cache", layout.share * gpu.memory)
    if layout.offload == "none":
        yield Item("rollout", "weights and AdamW moments, float32", 12 * sharded)
    arriving = 4 * sharded if layout.offload == "idle" else 0.0  # come back to be sent
    yield Item("rollout", "weights on their way to vLLM", SYNC + arriving)
    yield Item("rollout", "CUDA and NCCL", CONTEXT)


def _cache(config: Config, shape: Shape, cluster: ClusterConfig, layout: Layout, gpu: Gpu) -> tuple[float, int]:
    """GiB of vLLM's key/value cache on one GPU, and the episodes one replica plays at once."""
    # bfloat16 weights, its own context, and 5 % for its activations
    cache = layout.share * gpu.memory * 0.95 - 2 * shape.parameters / layout.tensor_parallel / GIB - CONTEXT
    replicas = cluster.world // layout.tensor_parallel
    live = -(-config.tasks_per_step * config.group_size // replicas)
    return max(cache, 0.0), live
