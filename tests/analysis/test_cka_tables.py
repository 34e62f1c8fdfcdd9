"""Tables of CKA: jackknife by hand and by simulation, contrasts paired by block, undefined layers as gaps."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats as scipy_stats

from analysis.cka_tables import BIASED, cka_table, contrast_table, jackknife
from analysis.measured import measured_tables
from diagnostics.artifact import Artifact, save_artifact
from diagnostics.cka import Cka, Comparison
from diagnostics.records import Provenance
from diagnostics.similarity import debiased_cka

LAYERS, WIDTH = 3, 8


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def measured(path, contexts: dict[str, torch.Tensor], student: torch.Tensor, n_blocks: int = 10) -> Artifact:
    """An artifact of the states [L, n, D] of a student and of its teachers, rows in blocks of equal size."""
    stream, n = Cka(0, {}), student.shape[1]
    for context, teacher in contexts.items():
        stream.comparisons[context] = Comparison()
        keys, blocks = np.random.default_rng(0).random(n), np.arange(n) * n_blocks // n
        stream.comparisons[context].add(student, teacher, keys, blocks)
    return save_artifact(path, "measurements", tables=stream.result(Provenance(model="tiny")))


def frames(artifact: Artifact) -> tuple[pd.DataFrame, pd.DataFrame]:
    rows, blocks = (artifact.table(name).to_pandas().assign(reader="tiny") for name in ("measurements", "cka_blocks"))
    return rows, blocks


@pytest.fixture
def student() -> torch.Tensor:
    return normal(LAYERS, 120, WIDTH, seed=0)


@pytest.fixture
def contexts(student) -> dict[str, torch.Tensor]:
    """A skill that changes layers 1 and 2, a text that changes all layers a little, and no text."""
    noise = normal(LAYERS, 120, WIDTH, seed=1) * torch.tensor([0.02, 0.5, 1.0])[:, None, None]
    return {"own_skill": student + noise, "unrelated": student + 0.1 * normal(LAYERS, 120, WIDTH, seed=2),
            "none": student.clone()}  # fmt: skip


def test_jackknife_of_a_mean_is_the_t_interval() -> None:
    """Each unit a block: the same bounds as scipy's for the mean."""
    values = np.array([1.0, 4.0, 2.0, 8.0, 5.0])
    found = jackknife(values.mean(), np.array([np.delete(values, i).mean() for i in range(5)]))
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert found.n == 5 and "5 blocks" in found.method
    for few in ([], [0.3], [0.3, np.nan]):
        assert np.isnan([jackknife(0.3, np.array(few)).low, jackknife(0.3, np.array(few)).high]).all()


def test_every_number_is_that_of_the_states(tmp_path, student, contexts) -> None:
    table = cka_table(*frames(measured(tmp_path / "m", contexts, student)))
    own = table[(table["context"] == "own_skill") & (table["coordinates"] == "all")].set_index("layer")
    assert own.index.tolist() == ["0", "1", "2", "mean"]
    values = [1 - debiased_cka(student[i], contexts["own_skill"][i]) for i in range(LAYERS)]
    assert own["dissimilarity"].tolist() == pytest.approx([*values, np.mean(values)], abs=1e-10)
    stay = np.arange(120) // 12
    left_out = np.array(
        [
            [1 - debiased_cka(student[i, stay != b], contexts["own_skill"][i, stay != b]) for i in range(LAYERS)]
            for b in range(10)
        ]
    )
    for layer, column in {"1": left_out[:, 1], "mean": left_out.mean(1)}.items():
        interval = jackknife(own.loc[layer, "dissimilarity"], column)
        assert own.loc[layer, ["low", "high"]].tolist() == pytest.approx([interval.low, interval.high], abs=1e-9)
    assert (own["n"] == 120).all() and (own["d"] == WIDTH).all() and (own["n_sampled"] == 120).all()
    assert (own["note"] == "").all() and own["null_debiased"].abs().max() < 0.15
    none = table[table["context"] == "none"]
    assert (none["dissimilarity"] == 0).all() and none[["low", "high"]].abs().max().max() < 1e-12


def test_own_skill_against_each_control_is_paired(tmp_path, student, contexts) -> None:
    artifact = measured(tmp_path / "m", contexts, student)
    table, levels = contrast_table(*frames(artifact)), cka_table(*frames(artifact))
    table = table[table["coordinates"] == "all"].set_index(["control", "layer"])
    levels = levels[levels["coordinates"] == "all"].set_index(["context", "layer"])
    assert table.index.get_level_values("control").unique().tolist() == ["unrelated", "none"]
    assert table.loc[("unrelated", "0"), "high"] < 0 < table.loc[("unrelated", "1"), "low"]
    for layer in ("0", "2", "mean"):
        a, b = levels.loc[("own_skill", layer)], levels.loc[("unrelated", layer)]
        row = table.loc[("unrelated", layer)]
        assert row["difference"] == pytest.approx(a["dissimilarity"] - b["dissimilarity"])
        assert row["ratio"] == pytest.approx(a["dissimilarity"] / b["dissimilarity"])
        assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
        same = levels.loc[("own_skill", layer)]
        assert table.loc[("none", layer), ["low", "high"]].tolist() == pytest.approx(same[["low", "high"]].tolist())
    assert table.loc["none", "ratio"].isna().all()  # nothing to divide by
    equal = contrast_table(*frames(measured(tmp_path / "e", {"own_skill": student, "unrelated": student}, student)))
    assert (equal["difference"] == 0).all()
    alone = {"unrelated": contexts["unrelated"]}
    assert contrast_table(*frames(measured(tmp_path / "a", alone, student))).empty


def test_b59_an_undefined_layer_is_a_gap_with_a_reason(tmp_path, student, contexts) -> None:
    """Case B59: the mean is that of the layers that are defined."""
    student[1] = 0.5
    table = cka_table(*frames(measured(tmp_path / "m", contexts, student)))
    own = table[(table["context"] == "own_skill") & (table["coordinates"] == "trimmed")].set_index("layer")
    assert np.isnan(own.loc["1", "dissimilarity"]) and own.loc["1", "note"] == "undefined: constant"
    assert own.loc["mean", "dissimilarity"] == pytest.approx(own.loc[["0", "2"], "dissimilarity"].mean())
    assert own.loc["mean", ["low", "high"]].notna().all() and own.loc["mean", "note"] == "undefined: constant"


def test_b55_fewer_rows_than_coordinates_are_named(tmp_path) -> None:
    """Case B55: the plug-in value of unrelated states is near 1, the debiased one and the note say what it is worth."""
    x, y = normal(2, 1, 40, 200, seed=3)
    row = cka_table(*frames(measured(tmp_path / "m", {"own_skill": y}, x))).iloc[0]
    assert row["note"] == BIASED and row["plug_in"] > 0.8 and row["null_plug_in"] > 0.8
    assert abs(row["debiased"]) < 0.1 and row["low"] < 1 < row["high"]


@pytest.mark.parametrize("sampled", [240, 60])
def test_interval_covers_where_rows_depend_on_their_task(sampled: int) -> None:
    """120 draws of 20 tasks x 12 rows with task effects, the estimate of all rows, its spread of all or of a quarter.

    Of all rows the standard error is right within a fifth; of a sample it errs to the wide side; both cover.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, scale: float) -> torch.Tensor:
        return (scale * torch.randn(20, rows, 4, generator=generator)).double().expand(20, 12, 4).reshape(240, 4)

    estimates, errors, reaches = [], [], []
    for _ in range(120):
        x = draw(1, 1.0) + draw(12, 1.0)
        y = x + draw(1, 0.5) + draw(12, 0.3)
        chosen = torch.randperm(240, generator=generator)[:sampled]
        block = chosen // 12
        left_out = [debiased_cka(x[chosen[block != b]], y[chosen[block != b]]) for b in range(20)]
        interval = jackknife(debiased_cka(x, y), np.array(left_out))
        estimates.append(interval.estimate)
        reaches.append((interval.high - interval.low) / 2)
        errors.append(reaches[-1] / scipy_stats.t.ppf(0.975, 19))
    ratio = np.mean(errors) / np.std(estimates)
    assert 0.8 < ratio < 1.2 if sampled == 240 else 1.0 < ratio < 1.7
    assert np.mean(np.abs(np.array(estimates) - np.mean(estimates)) < reaches) >= 0.9


def test_tables_of_what_is_ready(tmp_path, student, contexts) -> None:
    ready = measured(tmp_path / "ready", contexts, student)
    other = save_artifact(tmp_path / "other", "measurements", tables={"measurements": ready.table("measurements")})
    tables, inputs = measured_tables({"tiny": ready.path, "later": tmp_path / "later", "other": other.path})
    assert set(tables) == {"cka", "cka_contrasts", "cka_map"} and [i.path for i in inputs] == [ready.path, other.path]
    chosen = tables["cka_map"].query("context == 'own_skill' and coordinates == 'all'")
    found = chosen.set_index(["student_layer", "teacher_layer"])["debiased"].to_dict()
    assert found == pytest.approx(
        {
            (str(i), str(j)): debiased_cka(student[i], contexts["own_skill"][j])
            for i, j in itertools.product(range(LAYERS), repeat=2)
        },
        abs=1e-10,
    )
