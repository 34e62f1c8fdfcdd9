"""The rows of the three papers' main tables as recipes: `paper-<environment>-<size>-<method>`, made from one table.

    SDAR    (arXiv 2605.15155)  ALFWorld, WebShop, Search-QA x Qwen2.5-3B, Qwen2.5-7B, Qwen3-1.7B
    PCSD    (arXiv 2608.01837)  ALFWorld, WebShop            x Qwen2.5-3B, Qwen3-1.7B
    PR-OPD  (arXiv 2609.36642)  ALFWorld, WebShop            x Qwen2.5-3B, Qwen3-1.7B

A row is trained with the settings of its environment, on the model of its size; the same without a size, for a few
methods, leaves the model to the user. Rows that train nothing (vanilla, SkillPrompt) are protocols of `undertow eval`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.config import Config

MODELS = {"1.7b": "Qwen/Qwen3-1.7B", "3b": "Qwen/Qwen2.5-3B-Instruct", "7b": "Qwen/Qwen2.5-7B-Instruct"}
SDAR = ("grpo", "opsd", "grpo_opsd", "skill_grpo", "skill_sd", "rlsd", "sdar")
OTHERS = ("pcsd", "pr_opd")
# settings of a method that differ between environments: PR-OPD's length of Stage I
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {("webshop", "pr_opd"): {"start_step": 120}}


def rows() -> Iterator[tuple[str, str, str]]:
    """(environment, size, method) of every trained row."""
    for env in ("alfworld", "webshop", "search"):
        for size in MODELS:
            for method in SDAR:
                yield env, size, method
            for method in OTHERS:
                if env != "search" and size != "7b":
                    yield env, size, method


def paper_recipes(settings: Mapping[str, Config]) -> dict[str, Config]:
    """Every row as a recipe, and the rows without a size that other recipes and studies start from.

    Args: settings, of each environment, as the papers have them; the model and the method are put in.
    """
    made: dict[str, Config] = {}

    def add(name: str, env: str, method: str, config: Config) -> None:
        own = SETTINGS.get((env, method))
        made[name] = replace(config, recipe=name, method=method, method_config=own)

    for env, method in (
        *((env, method) for env in settings for method in ("grpo", "sdar")),
        *((env, "pr_opd") for env in settings if env != "search"),
    ):
        add(f"paper-{env}-{method.replace('_', '-')}", env, method, settings[env])
    for env, size, method in rows():
        config = settings[env]
        model = replace(config.model, name=MODELS[size], dtype="bfloat16", device="cuda")
        add(f"paper-{env}-{size}-{method.replace('_', '-')}", env, method, replace(config, model=model))
    return made
