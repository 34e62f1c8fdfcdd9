"""CKA between two sets of weights: themselves, a damaged copy, another depth, other tokens."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from diagnostics.across import OTHER_WEIGHTS, compare_models
from diagnostics.records import Provenance
from diagnostics.similarity import debiased_cka
from tests.diagnostics.tiny import random_pair, tiny_model

PAIRS = [random_pair(seed, responses=12) for seed in range(24)]
BATCHES = [PAIRS[:9], PAIRS[9:]]


def values(tables, metric: str) -> dict[str, float]:
    rows = tables["measurements"].to_pylist()
    assert {row["context"] for row in rows} == {OTHER_WEIGHTS}
    return {row["layer"]: row["value"] for row in rows if row["metric"] == metric}


def test_a_model_is_like_itself_and_unlike_a_copy_from_the_layer_that_was_changed() -> None:
    model = tiny_model()
    same = values(compare_models(model, model, BATCHES, Provenance()), "cka/debiased")
    assert same == pytest.approx(dict.fromkeys("012", 1.0), abs=1e-9)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.normal_(generator=torch.Generator().manual_seed(0))
    found = values(compare_models(model, other, BATCHES, Provenance()), "cka/debiased")
    assert found["0"] == pytest.approx(1, abs=1e-9) and found["1"] < 0.9 and found["2"] < 0.95


def test_another_depth_has_a_map_and_no_same_layer_value() -> None:
    shallow, deep = tiny_model(layers=2), tiny_model(layers=3, seed=1)
    tables = compare_models(shallow, deep, BATCHES, Provenance())
    assert not values(tables, "cka/debiased") and values(tables, "cka/rows") == {"": 24 * 12}
    cells = [row for row in tables["cka_map"].to_pylist() if row["coordinates"] == "all"]
    assert len(cells) == 2 * 3
    states = [torch.cat([_states(model, pair) for pair in PAIRS], 1) for model in (shallow, deep)]
    for cell in cells:
        one, two = (x[int(cell[f"{name}_layer"])] for x, name in zip(states, ("student", "teacher"), strict=True))
        assert cell["debiased"] == pytest.approx(debiased_cka(one, two), abs=1e-5)


def _states(model, pair) -> torch.Tensor:
    hooked: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _m, _i, o: hooked.append(o if isinstance(o, torch.Tensor) else o[0]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(torch.from_numpy(pair.student_ids)[None].long())
    for handle in handles:
        handle.remove()
    return torch.stack([h[0, np.asarray(pair.student_positions) - 1] for h in hooked])
