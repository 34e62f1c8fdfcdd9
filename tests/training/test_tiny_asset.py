"""The tiny policy as it is shipped: made by the recipe in the tree, small, whole, and at home in the games."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diagnostics import render
from training.envs.rooms import rooms
from training.models.tiny import CONTROL, NUMBERS, TAGS, Recipe

ASSET = Path(__file__).resolve().parents[2] / "training" / "models" / "assets" / "tiny"


@pytest.fixture(scope="module")
def asset() -> Path:
    if not (ASSET / "build.json").is_file():
        pytest.skip("the tiny policy is not part of this checkout (training/models/assets/tiny)")
    return ASSET


def test_the_asset_is_what_its_record_says(asset: Path) -> None:
    record = json.loads((asset / "build.json").read_text())
    assert record["sha256"] == hashlib.sha256((asset / "model.safetensors").read_bytes()).hexdigest()
    assert record["recipe"] == asdict(Recipe())  # the recipe in the tree makes it
    assert sum(file.stat().st_size for file in asset.rglob("*") if file.is_file()) <= 8 * 2**20
    assert not {file.suffix for file in asset.iterdir()} & {".bin", ".pt", ".pkl", ".py"}


def test_the_asset_loads_and_knows_the_games(asset: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        asset, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )
    tokenizer = AutoTokenizer.from_pretrained(asset, local_files_only=True)
    record = json.loads((asset / "build.json").read_text())
    assert record["parameters"] == sum(p.numel() for p in model.parameters())
    assert 1_000_000 <= record["parameters"] <= 4_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    words = {name.lower() for names in (rooms()["places"], rooms()["holds"]) for name in names}
    pieces = [*TAGS, *CONTROL, *words, *(f" {w}" for w in words), *(f" {n}" for n in range(1, NUMBERS + 1))]
    assert [piece for piece in pieces if len(tokenizer.tokenize(piece)) != 1] == []
    seen = "You are in the middle of a room. Looking quickly around you, you see a shelf 1, and a desk 1."
    prompt = render.prompt_ids(tokenizer, render.task_messages("put a mug in shelf.", seen, None))
    with torch.no_grad():
        next_token = model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert next_token[tokenizer.convert_tokens_to_ids("<think>")] > 0.9  # a reply begins with a thought
