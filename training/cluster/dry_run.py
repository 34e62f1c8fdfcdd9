"""What `undertow train --engine cluster --dry-run` says: verl's command, whether it fits, and how long it takes.

Nothing of verl, Ray or vLLM is imported, and no model is loaded.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from training.cluster.gpus import find_gpu
from training.cluster.layout import ClusterConfig, Layout
from training.cluster.load import step_work
from training.cluster.plan import Extra, Plan, best_plan
from training.cluster.shapes import Shape, shape_of
from training.cluster.verl_config import command, overrides
from training.config import Config
from training.method import Needs, load_method

UNPLANNED = Layout("idle", 1, 8192, 0.45)  # of a model whose sizes are not known: thrifty


@dataclass(frozen=True)
class DryRun:
    command: str  # one shell line
    settings: dict[str, Any]  # verl's, by dotted key
    layout: Layout
    plan: Plan | None  # None: on CPUs, or a model whose sizes are not known
    tables: dict[str, list[dict[str, Any]]]  # title -> rows, to be printed
    verdict: str


def dry_run(config: Config, run: Path, cluster: ClusterConfig, model: str) -> DryRun:
    """The whole answer. Args: model, what verl is given as the model's path.

    Raises: ValueError for an unknown GPU.
    """
    find_gpu(cluster.gpu)
    shape, why = _shape(config)
    layout, found = resolve(config, cluster)
    positions = None if shape is None else shape.positions
    reference = needs_reference(config)
    settings = overrides(config, run, cluster, layout, model=model, reference=reference, positions=positions)
    words = shlex.join(command(settings))
    if found is None or shape is None:
        return DryRun(words, settings, layout, None, {}, why or "on CPUs nothing is planned: the sizes are for tests")
    extra = method_extra(config, shape)
    tables: dict[str, list[dict[str, Any]]] = {
        f"memory of one {cluster.gpu}, GiB, {cluster.world} GPUs": [
            {"phase": item.phase, "what": item.name, "GiB": f"{item.gib:.1f}"} for item in found.items
        ],
        "by phase": [
            {"phase": phase, "GiB": round(found.total(phase), 1), "of": round(found.budget, 1)}
            for phase in ("update", "rollout")
        ],
        "layout": [
            {
                "offload": layout.offload,
                "tensor parallel": layout.tensor_parallel,
                "micro-batch tokens": layout.micro_tokens,
                "vLLM's share": layout.share,
                "full episodes in its cache": found.sequences,
                "episodes at once": found.live,
                "host memory of the first node, GiB": round(found.host),
            }
        ],
        "one training step, an order of magnitude": _times(config, extra, shape, cluster, layout),
    }
    return DryRun(words, settings, layout, found, tables, found.verdict)


def resolve(config: Config, cluster: ClusterConfig) -> tuple[Layout, Plan | None]:
    """The layout of a run, and the plan it comes from; on CPUs, and for unknown sizes, a plain layout and None."""
    if config.model.device == "cpu":
        return Layout("none", 1, config.optim.micro_batch_tokens, 0.5), None
    shape, _ = _shape(config)
    if shape is None:
        return UNPLANNED, None
    found = best_plan(config, method_extra(config, shape), shape, cluster)
    return found.layout, found


def needs_reference(config: Config) -> bool:
    """Whether any step reads the weights the run started from."""
    needs = _needs(config)
    anchored = config.objective.kl_coefficient and any(step.regularised for step in needs)
    return bool(anchored) or any(step.teacher == "initial" for step in needs)


def method_extra(config: Config, shape: Shape) -> Extra:
    """What the method adds, read from its own contract: the needs of its heaviest step, the size of its modules."""
    import torch

    method = load_method(config.method)
    own = _own(config)
    heaviest = max(_needs(config), key=_weight)
    modules: Any = None
    if method.modules is not None:
        with torch.device("meta"):  # counted, not made
            sizes = SimpleNamespace(num_hidden_layers=shape.layers, hidden_size=shape.hidden)
            modules = method.modules(sizes, own)
    return Extra(heaviest, 0 if modules is None else sum(weight.numel() for weight in modules.parameters()))


def _own(config: Config) -> Any:
    return load_method(config.method).config() if config.method_config is None else config.method_config


def _needs(config: Config) -> list[Needs]:
    method, own = load_method(config.method), _own(config)
    return [method.needs(own, step) for step in range(config.steps)]


def _weight(needs: Needs) -> tuple[bool, ...]:
    return needs.teacher != "none", needs.states != "none", needs.divergence != "none", needs.skill == "hindsight"


def _shape(config: Config) -> tuple[Shape | None, str]:
    try:
        return shape_of(config.model.name), ""
    except ValueError as error:
        return None, str(error)


def _times(config: Config, extra: Extra, shape: Shape, cluster: ClusterConfig, layout: Layout) -> list[dict[str, Any]]:
    work = step_work(config, extra, shape, cluster, layout)
    total = sum(w.seconds for w in work)
    rows = [{"part": w.name, "tokens": f"{w.tokens:,.0f}", "seconds": f"{w.seconds:,.0f}"} for w in work]
    hours = f"{total * config.steps / 3600:,.0f} hours"
    return [*rows, {"part": "step", "seconds": f"{total:,.0f}"}, {"part": f"{config.steps} steps", "seconds": hours}]
