"""Resolved configuration of a run: frozen dataclasses, and recipes (named presets).

A recipe is a complete Config. Every field can be overridden from the command line by its dotted path
(`--env.kind household`); unknown keys are refused before any work.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from training.recipes import paper_recipes


@dataclass(frozen=True)
class SearchConfig:
    """What a search of Search-QA finds."""

    retriever: str | None = None  # address of a retrieval server, or a passage file; None: BM25 over those of env.data
    passages: int = 3  # of one search
    passage_tokens: int = 160  # of the policy, after which a passage is cut
    timeout: float = 8.0  # seconds of one request to a server


@dataclass(frozen=True)
class ShopConfig:
    """What WebShop's pages show."""

    products: int = 10  # on one page of results


@dataclass(frozen=True)
class EnvConfig:
    kind: Literal["household", "alfworld", "webshop", "searchqa"] = "household"
    data: str | None = None  # folder with games; None: generated, or $ALFWORLD_DATA (alfworld)
    split: str = "train"
    max_turns: int = 50
    history: int = 2  # previous turns shown under `windowed`
    show_admissible: bool = True  # list the admissible commands in the prompt
    workers: int = 2
    timeout: float = 60.0  # seconds a reset or a step may take
    search: SearchConfig = field(default_factory=SearchConfig)
    shop: ShopConfig = field(default_factory=ShopConfig)


@dataclass(frozen=True)
class ModelConfig:
    name: str = "tiny"  # "tiny", "smollm2-135m", a local folder, or a hub name
    reference: str | None = None  # KL anchor; None: the weights the run starts from
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"


@dataclass(frozen=True)
class SamplerConfig:
    protocol: Literal["append", "windowed"] = "windowed"
    temperature: float = 1.0
    max_new_tokens: int = 512  # of one reply
    max_context: int = 2560  # tokens of one segment; an episode that would pass it stops with `context_limit`
    batch_size: int = 64  # live rows at once
    engine: Literal["hf", "vllm"] = "hf"  # vllm: a server on this machine, for weights that stay as they are


@dataclass(frozen=True)
class ObjectiveConfig:
    """The reward objective shared by all methods (GRPO)."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl_coefficient: float = 0.01
    entropy_coefficient: float = 0.001
    invalid_penalty: float = 0.1
    advantage_scope: Literal["trajectory", "turn_rows"] = "trajectory"
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-6
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    warmup_steps: int = 0
    mini_batch_rows: int = 256  # rows (segments) of one optimiser update
    micro_batch_tokens: int = 16384  # padded tokens of one forward; never changes the result


@dataclass(frozen=True)
class SkillsConfig:
    """The privileged text of the methods that read one."""

    library: str | None = None  # folder or file of skills; None: the environment's own
    retrieval: Literal["keyword", "ucb", "full", "random", "none"] = "keyword"
    ucb_c: float = 1.0  # exploration of "ucb"
    # what the teacher reads in the skill's place
    control: Literal["own_skill", "other_skill", "unrelated", "shuffled", "none"] = "own_skill"
    budget: int = 1024  # tokens; a longer skill is never cut, its trajectory is left out of distillation and counted


@dataclass(frozen=True)
class EvalConfig:
    panel: str = "valid_seen"
    size: int = 128  # tasks of the fixed panel; 0: the whole split
    every: int = 5  # steps; 0: never during training
    temperature: float = 0.4
    seed: int = 0


@dataclass(frozen=True)
class Config:
    recipe: str = ""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    skills: SkillsConfig = field(default_factory=SkillsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    method: str = "grpo"  # name of a file in training/methods, or a path to your own FILE.py
    method_config: Any = None  # the method's own frozen dataclass; None: its defaults; of a recipe: settings by name
    steps: int = 150
    tasks_per_step: int = 16
    group_size: int = 8
    seed: int = 0
    save_every: int = 10
    init_from: str | None = None  # a checkpoint folder to branch from: weights, optimiser state and reference


def _paper() -> Config:
    return Config(recipe="paper-alfworld", env=EnvConfig(kind="alfworld"))


def _paper_webshop() -> Config:
    """WebShop as SDAR has it: 15 turns, 1000 training tasks and 128 others to be tested on, small updates."""
    return Config(
        recipe="paper-webshop",
        env=EnvConfig(kind="webshop", split="sdar_train", max_turns=15),
        sampler=SamplerConfig(max_context=4096 + 512),
        optim=OptimConfig(mini_batch_rows=64),
        eval=EvalConfig(panel="sdar_valid"),
    )


def _paper_search() -> Config:
    """Search-QA as SDAR has it: all four turns in the prompt, more tasks a step, a gentler start."""
    return Config(
        recipe="paper-search",
        env=EnvConfig(kind="searchqa", max_turns=4, history=4),
        sampler=SamplerConfig(max_context=4096 + 512),
        objective=ObjectiveConfig(invalid_penalty=0.01),
        optim=OptimConfig(warmup_steps=15),  # a tenth of the steps
        eval=EvalConfig(size=512),
        tasks_per_step=128,
    )


def _tiny() -> Config:
    """Sizes that train on two CPU cores; the tiny policy plays one growing conversation."""
    return Config(
        recipe="tiny-grpo",
        env=EnvConfig(kind="household", max_turns=30, show_admissible=False),
        sampler=SamplerConfig(protocol="append", max_new_tokens=32, max_context=2048),
        optim=OptimConfig(lr=1e-4, mini_batch_rows=32, micro_batch_tokens=4096),
        eval=EvalConfig(every=10),
        steps=40,
        tasks_per_step=8,
    )


def _tiny_search() -> Config:
    """Search-QA's invented world for the tiny policy that was taught its format."""
    base = _tiny()
    return replace(
        base,
        recipe="tiny-search-grpo",
        env=EnvConfig(kind="searchqa", max_turns=4, show_admissible=False),
        model=ModelConfig(name="tiny-search"),
        sampler=replace(base.sampler, max_new_tokens=48, max_context=1024),
    )


def _tiny_webshop() -> Config:
    """WebShop's invented shop for the tiny policy that was taught its format: one product on a page of results."""
    base = _tiny()
    return replace(
        base,
        recipe="tiny-webshop-grpo",
        env=EnvConfig(kind="webshop", max_turns=12, show_admissible=False, shop=ShopConfig(products=1)),
        model=ModelConfig(name="tiny-webshop"),
        sampler=replace(base.sampler, max_new_tokens=48),
        eval=replace(base.eval, panel="sdar_valid"),
    )


RECIPES: dict[str, Config] = {
    "tiny-grpo": _tiny(),
    "tiny-pr-opd": replace(_tiny(), recipe="tiny-pr-opd", method="pr_opd"),
    "tiny-search-grpo": _tiny_search(),
    "tiny-search-pr-opd": replace(_tiny_search(), recipe="tiny-search-pr-opd", method="pr_opd"),
    "tiny-webshop-grpo": _tiny_webshop(),
    "tiny-webshop-pr-opd": replace(_tiny_webshop(), recipe="tiny-webshop-pr-opd", method="pr_opd"),
    **paper_recipes({"alfworld": _paper(), "webshop": _paper_webshop(), "search": _paper_search()}),
}
