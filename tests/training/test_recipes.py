"""The rows of the papers' tables as recipes: which there are, and the settings that the papers give."""

import json
from dataclasses import asdict

import pytest

from training.config import RECIPES, Config
from training.recipes import MODELS, rows
from training.settings import from_document, with_method

PAPER = {name: config for name, config in RECIPES.items() if name.startswith("paper-")}


def test_every_trained_row_of_the_three_papers_is_there() -> None:
    sized = {f"paper-{env}-{size}-{method.replace('_', '-')}" for env, size, method in rows()}
    assert len(sized) == 3 * 3 * 7 + 2 * 2 * 2 and sized <= set(RECIPES)  # SDAR's table, then PCSD's and PR-OPD's own
    assert {"paper-alfworld-3b-pr-opd", "paper-webshop-1.7b-grpo", "paper-search-7b-sdar"} <= sized
    assert not any("search" in name and ("pcsd" in name or "pr-opd" in name) for name in sized)
    assert not any("-7b-" in name and ("pcsd" in name or "pr-opd" in name) for name in sized)


@pytest.mark.parametrize("name", ["paper-alfworld-grpo", "paper-alfworld-pr-opd", "paper-search-sdar"])
def test_names_without_a_size_leave_the_model_to_the_user(name: str) -> None:
    assert RECIPES[name].recipe == name and RECIPES[name].model == Config().model


def test_the_settings_of_the_papers() -> None:
    for name, config in PAPER.items():
        assert config.recipe == name
        _, env, size = name.split("-")[:3]
        assert config.steps == 150 and config.group_size == 8 and config.seed == 0
        assert config.tasks_per_step == (128 if env == "search" else 16)
        assert config.env.max_turns == {"alfworld": 50, "webshop": 15, "search": 4}[env]
        assert config.env.history == (4 if env == "search" else 2)
        assert config.sampler.max_context - 512 == (2048 if env == "alfworld" else 4096)  # the longest prompt
        assert (config.sampler.max_new_tokens, config.sampler.temperature) == (512, 1.0)
        assert config.optim.mini_batch_rows == (64 if env == "webshop" else 256)
        assert (config.optim.lr, config.optim.weight_decay, config.optim.grad_clip) == (1e-6, 0.01, 1.0)
        assert config.optim.warmup_steps == (15 if env == "search" else 0)
        assert config.objective.invalid_penalty == (0.01 if env == "search" else 0.1)
        assert (config.objective.kl_coefficient, config.objective.entropy_coefficient) == (0.01, 0.001)
        assert (config.eval.every, config.eval.temperature) == (5, 0.4)
        assert config.eval.size == (512 if env == "search" else 128)
        if size in MODELS:
            assert config.model.name == MODELS[size] and config.model.dtype == "bfloat16"


@pytest.mark.parametrize("name", PAPER)
def test_a_recipe_reads_back_with_its_method(name: str) -> None:
    made = with_method(PAPER[name], PAPER[name].method)
    assert from_document(Config(), json.loads(json.dumps(asdict(made))), name) == made


def test_the_length_of_stage_one_belongs_to_the_environment() -> None:
    def start(name: str) -> int:
        return with_method(RECIPES[name], "pr_opd").method_config.start_step

    assert start("paper-alfworld-3b-pr-opd") == 100 and start("paper-webshop-3b-pr-opd") == 120
    assert start("paper-webshop-3b-grpo") == 100  # another method's settings stay with it
    assert with_method(RECIPES["paper-webshop-3b-pr-opd"], "sdar").method_config.beta == 5.0
