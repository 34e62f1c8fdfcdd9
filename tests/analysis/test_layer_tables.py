"""Change by layer and context, against explicit loops over tokens."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.layer_tables import CHANNELS, layer_change_table
from diagnostics.change import Change
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.records import Provenance, TokenClass

LENGTHS = {"x": 5, "y": 2, "z": 9}
CONTEXTS = ("unrelated", "own_skill", "none")
LAYERS, WIDTH = 12, 4  # two digits: layers must not be ordered as text


@pytest.fixture(scope="module")
def states() -> dict[tuple[str, str], tuple[np.ndarray, np.ndarray]]:
    """(context, trajectory) -> states [L, M, D] of both branches; under `none` they are equal."""
    rng = np.random.default_rng(0)
    student = {name: rng.standard_normal((LAYERS, length, WIDTH)) for name, length in LENGTHS.items()}
    size = {"unrelated": 0.2, "own_skill": 0.6, "none": 0.0}
    return {
        (context, name): (h, h + size[context] * rng.standard_normal(h.shape))
        for context in CONTEXTS
        for name, h in student.items()
    }


@pytest.fixture(scope="module")
def rows(states) -> pd.DataFrame:
    return measured(states, CONTEXTS)


def measured(states, contexts) -> pd.DataFrame:
    change = Change()
    for context in contexts:
        for name, length in LENGTHS.items():
            ids, positions = np.arange(length + 1, dtype=np.int32), np.arange(1, length + 1)
            pair = PairedSegment(
                student_ids=ids,
                teacher_ids=ids,
                student_positions=positions,
                teacher_positions=positions,
                response_ids=ids[1:],
                turn=np.zeros(length, np.int16),
                token_class=np.full(length, TokenClass.THINK, np.int8),
                trajectory_id=name,
                task_id=name,
                context=context,
            )
            change.update([pair], passed(states[context, name], length))
    table = change.result(Provenance(model="tiny"))["measurements"].to_pandas()
    return table.assign(reader="tiny")


def passed(states, length: int) -> PairedPass:
    student, teacher = (torch.tensor(h) for h in states)
    return PairedPass(
        row=torch.zeros(length, dtype=torch.long),
        has_teacher=torch.ones(length, dtype=torch.bool),
        student_logprobs=torch.full((length,), -0.1, dtype=torch.float64),
        teacher_logprobs=torch.full((length,), -0.2, dtype=torch.float64),
        student_states=student,
        teacher_states=teacher,
    )


def changes(states, context: str, layer: int) -> dict[str, list[float]]:
    """1 - cos of every token, by trajectory, in plain loops."""
    found = {}
    for name, length in LENGTHS.items():
        a, b = states[context, name]
        found[name] = [
            1 - a[layer, k] @ b[layer, k] / (np.linalg.norm(a[layer, k]) * np.linalg.norm(b[layer, k]))
            for k in range(length)
        ]
    return found


def test_means_and_ratios_are_those_of_loops_over_tokens(states, rows):
    table = layer_change_table(rows)
    assert set(table["channel"]) == set(CHANNELS) and set(table["context"]) == set(CONTEXTS)
    assert table["layer"].tolist()[: LAYERS + 1] == [*map(str, range(LAYERS)), "mean"]
    raw = table[table["channel"] == "hidden_change"].set_index(["context", "layer"])
    for layer in range(LAYERS):
        means = {c: np.mean(list(chain(*changes(states, c, layer).values()))) for c in CONTEXTS}
        for context in CONTEXTS:
            row = raw.loc[(context, str(layer))]
            assert row["mean"] == pytest.approx(means[context], abs=1e-12)
            assert row["ratio_to_unrelated"] == pytest.approx(means[context] / means["unrelated"], abs=1e-9)
            assert row["n_tokens"] == sum(LENGTHS.values()) and row["n_trajectories"] == len(LENGTHS)
    for context in CONTEXTS:
        layers = raw.loc[context].drop("mean")["mean"]
        assert raw.loc[(context, "mean"), "mean"] == pytest.approx(layers.mean())


def test_intervals_are_those_of_every_resample_of_three_trajectories(states, rows):
    """Three trajectories have 27 resamples: the bootstrap's quantiles are among their values, at the right ranks."""
    table = layer_change_table(rows).query("channel == 'hidden_change' and context == 'own_skill'").set_index("layer")
    own, unrelated = (changes(states, context, 0) for context in ("own_skill", "unrelated"))
    means, ratios = [], []
    for drawn in np.stack(np.meshgrid(*[list(LENGTHS)] * 3), -1).reshape(-1, 3):
        a, b = (list(chain(*(values[name] for name in drawn))) for values in (own, unrelated))
        means.append(np.mean(a))
        ratios.append(np.mean(a) / np.mean(b))
    for values, low, high in ((means, "low", "high"), (ratios, "ratio_low", "ratio_high")):
        row = table.loc["0"]
        assert row[low] == pytest.approx(np.quantile(values, 0.025, method="lower"))
        assert row[high] == pytest.approx(np.quantile(values, 0.975, method="higher"))


def test_unrelated_text_is_its_own_measure_and_an_unchanged_context_is_zero(rows):
    table = layer_change_table(rows).set_index(["context", "channel"])
    same = table.loc["unrelated"]
    assert (same[["ratio_to_unrelated", "ratio_low", "ratio_high"]] == 1).all(axis=None)
    equal = table.loc[[("none", channel) for channel in CHANNELS]]
    assert (equal[["mean", "low", "high", "ratio_to_unrelated"]] == 0).all(axis=None)


def test_shares_stand_where_they_were_counted(rows):
    table = layer_change_table(rows).query("channel == 'hidden_change'")
    assert table.query("context == 'own_skill'")["share_above_null"].notna().all()
    by_layer = table.query("context == 'unrelated' and layer != 'mean'")
    assert by_layer["share_above_null"].isna().all() and by_layer["share_low"].isna().all()
    share = rows.query("context == 'own_skill' and metric == 'hidden_change/share_above_null' and layer == '3'")
    share = share[share["token_class"] == "all"].set_index("trajectory")["value"]
    expected = sum(share[name] * length for name, length in LENGTHS.items()) / sum(LENGTHS.values())
    found = table.query("context == 'own_skill' and layer == '3'")["share_above_null"].item()
    assert found == pytest.approx(expected)


def test_without_unrelated_text_there_is_no_ratio(states):
    table = layer_change_table(measured(states, ("own_skill",)))
    assert table["ratio_to_unrelated"].isna().all() and table["share_above_null"].isna().all()
    assert table["mean"].notna().all() and table["low"].notna().all()


def test_a_single_trajectory_has_no_interval(rows):
    table = layer_change_table(rows[rows["trajectory"].isin(["x", ""])])
    assert table["mean"].notna().all() and table[["low", "high", "ratio_low", "ratio_high"]].isna().all(axis=None)


def test_readers_stand_apart(rows):
    both = layer_change_table(pd.concat([rows, rows.assign(reader="larger")]))
    alone = layer_change_table(rows)
    for reader in ("tiny", "larger"):
        mine = both[both["reader"] == reader].reset_index(drop=True)
        pd.testing.assert_frame_equal(mine.drop(columns="reader"), alone.drop(columns="reader"))


def test_nothing_measured_is_an_empty_table(rows):
    assert layer_change_table(rows[rows["metric"] == "tokens"]).empty
