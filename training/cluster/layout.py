"""How a run is laid over GPUs: what the user says (ClusterConfig), and what follows from memory (Layout)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from training.cluster.shapes import Shape

# none: all stays on the GPU. idle: weights and optimiser leave it while episodes are played. cpu: weights, gradients
# and optimiser live in host memory (FSDP's CPU offload): slow, but it fits.
Offload = Literal["none", "idle", "cpu"]
SHARES = (0.3, 0.45, 0.6)  # of a GPU's memory, for vLLM while episodes are played
MICRO_TOKENS = (16384, 8192, 4096)  # of one forward on one GPU; never changes the result


@dataclass(frozen=True)
class ClusterConfig:
    """Where a run goes. Nothing here changes what is computed."""

    gpus: int = 8  # of each node
    nodes: int = 1
    gpu: str = "H100-80GB"  # what the plan counts with: a name in training/cluster/gpus.py
    ray: str | None = None  # address of a Ray cluster to join, or "auto"; None: Ray is started here

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.nodes < 1:
            raise ValueError(f"a cluster needs gpus and nodes of 1 or more, got {self.gpus} and {self.nodes}")

    @property
    def world(self) -> int:
        """GPUs of all nodes."""
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Layout:
    offload: Offload
    tensor_parallel: int  # GPUs that share one copy of the policy while episodes are played
    micro_tokens: int
    share: float  # vLLM's, of a GPU's memory


def layouts(shape: Shape, cluster: ClusterConfig, longest: int, wanted: int) -> Iterator[Layout]:
    """All layouts worth a try, the fastest first, but for vLLM's share.

    Args: longest, tokens of the longest row, which a micro-batch must hold; wanted, tokens of a micro-batch that the
    configuration asks for, never exceeded but for `longest`.
    """
    sizes = sorted({max(longest, min(size, wanted)) for size in MICRO_TOKENS}, reverse=True)
    splits = [size for size in (1, 2, 4, 8) if cluster.gpus % size == 0 and shape.heads % size == 0]
    offloads: tuple[Offload, ...] = ("none", "idle", "cpu")
    for offload in offloads:
        for micro_tokens in sizes:
            for tensor_parallel in splits:
                yield Layout(offload, tensor_parallel, micro_tokens, SHARES[0])
