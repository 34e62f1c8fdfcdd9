"""The same environments, methods and losses on verl: Ray, FSDP and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.cluster.layout import ClusterConfig
    from training.config import Config


def train_on_cluster(config: Config, run: Path, args: Mapping[str, Any], cluster: ClusterConfig) -> Path:
    """training.cluster.main.train_on_cluster, where verl is installed. Raises ValueError where it is not."""
    if find_spec("verl") is None:
        raise ValueError(
            'the engine cluster needs verl, Ray and vLLM: pip install "undertow[cluster]" (docs/cluster.md); --dry-run '
            "shows what would run without them"
        )
    from training.cluster import main

    return main.train_on_cluster(config, run, args, cluster)
