"""The tiny policies of Search-QA and WebShop as they are shipped: whole, small, made by the recipes in the tree, and
as good as they were measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from diagnostics.records import Trajectory
from training.config import RECIPES
from training.models.load import load_policy, model_source
from training.models.policies import POLICIES
from training.session import Session

# Success on the whole panel under the recipe's evaluation, three evaluation seeds: docs/log.md.
MEASURED = {"tiny-search": 0.292, "tiny-webshop": 0.253}
EPISODES = 32
RARE = 1e-4  # a policy of the measured rate falls outside this seldom


@pytest.fixture(scope="module", params=[name for name in POLICIES if name != "tiny"])
def name(request: pytest.FixtureRequest) -> str:
    try:
        model_source(request.param)
    except ValueError:
        pytest.skip(f"the policy {request.param} is not part of this checkout")
    return request.param


@pytest.fixture(scope="module")
def loaded(name: str) -> tuple[Any, Any]:
    return load_policy(name)


@pytest.fixture(scope="module")
def played(name: str, loaded: tuple[Any, Any]) -> list[Trajectory]:
    config = RECIPES[f"{name}-grpo"]
    config = replace(config, env=replace(config.env, workers=1), eval=replace(config.eval, size=EPISODES))
    with Session(config, *loaded) as session:
        return session.evaluate(0)


def test_the_asset_is_what_its_record_says(name: str, loaded: tuple[Any, Any]) -> None:
    folder, (model, tokenizer) = Path(model_source(name)[0]), loaded
    record = json.loads((folder / "build.json").read_text())
    assert record["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert record["recipe"] == asdict(POLICIES[name][0])  # the recipe in the tree makes it
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 8 * 2**20
    assert not {file.suffix for file in folder.iterdir()} & {".bin", ".pt", ".pkl", ".py"}
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    pieces = POLICIES[name][1].whole()
    assert [piece for piece in pieces if len(tokenizer.tokenize(piece)) != 1] == []


def test_it_plays_as_well_as_was_measured(name: str, played: list[Trajectory]) -> None:
    won = sum(trajectory.success for trajectory in played)
    assert binomtest(won, len(played), MEASURED[name]).pvalue > RARE
    assert all(trajectory.error is None for trajectory in played)
    turns = sum(len(trajectory.turns) for trajectory in played)
    assert sum(trajectory.n_invalid for trajectory in played) <= 0.1 * turns


def test_its_replies_leave_room_to_learn(played: list[Trajectory]) -> None:
    """Some tasks are won and some are lost: groups differ, so that a group-relative advantage is not zero."""
    assert 0.1 * len(played) < sum(trajectory.success for trajectory in played) < 0.9 * len(played)
