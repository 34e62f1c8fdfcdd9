"""CKA: worked numbers, invariances, bias and its removal, streamed and blockwise forms against the plain reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from diagnostics.similarity import (
    BlockSums,
    Moments,
    block_sums,
    cka_between,
    debiased_cka,
    linear_cka,
    massive_coordinates,
    unbiased_hsic,
)

X = torch.tensor([[1.0, 2.0], [2.0, 0.0], [0.0, 1.0], [3.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
Y = torch.tensor([[1.0, 0.0], [0.0, 2.0], [2.0, 1.0], [1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def related(n: int, d: int, shared: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two representations that share `shared` of their d coordinates."""
    x, y = normal(2, n, d, seed=seed)
    y[:, :shared] = x[:, :shared]
    return x, y


def moments(x: Tensor, y: Tensor, parts: int | list[int] = 1, **drop: Tensor) -> Moments:
    """One layer, streamed in parts."""
    kept = {"drop_x": torch.zeros(x.shape[1], dtype=torch.bool), "drop_y": torch.zeros(y.shape[1], dtype=torch.bool)}
    kept |= drop
    stream = Moments(x[:3].mean(0)[None], y[:3].mean(0)[None], **{name: mask[None] for name, mask in kept.items()})
    for a, b in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
        stream.add(a[None], b[None])
    return stream


# --- worked numbers --------------------------------------------------------------------------------------------------


def test_b56_worked_numbers_in_every_form() -> None:
    """Case B56."""
    assert unbiased_hsic(X @ X.T, Y @ Y.T) == pytest.approx(0.133333, abs=5e-7)
    assert debiased_cka(X, Y) == pytest.approx(0.174078, abs=5e-7)
    assert linear_cka(X, Y) == pytest.approx(0.417195, abs=5e-7)
    streamed = moments(X, Y, 2).similarity(0)
    assert (streamed.debiased, streamed.plug_in) == pytest.approx((debiased_cka(X, Y), linear_cka(X, Y)), abs=1e-14)
    assert (streamed.n, streamed.d, streamed.undefined) == (5, 2, "")
    assert cka_between(X[None], Y[None]).item() == pytest.approx(debiased_cka(X, Y), abs=1e-14)


def test_unbiased_hsic_is_the_mean_over_all_quadruples() -> None:
    """The definition as a U-statistic, summed over all ordered quadruples of different rows."""
    k, m = (X @ X.T).numpy(), (Y @ Y.T).numpy()
    total, count = 0.0, 0
    for i, j, q, r in np.ndindex(5, 5, 5, 5):
        if len({i, j, q, r}) == 4:
            total += k[i, j] * (m[i, j] + m[q, r] - 2 * m[i, q])
            count += 1
    assert unbiased_hsic(X @ X.T, Y @ Y.T) == pytest.approx(total / count, abs=1e-12)


def test_b56_small_negative_values_are_shown() -> None:
    """Case B56: never a NaN of a root, never cut at 0."""
    values = [debiased_cka(*normal(2, 40, 6, seed=seed)) for seed in range(20)]
    assert min(values) < 0 < max(values) and all(math.isfinite(value) for value in values)


# --- bias ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, plug_in, debiased", [(32, 0.985, 0.018), (128, 0.941, 0.004), (256, 0.889, 0.0), (1024, 0.667, 0.0)]
)
def test_b55_unrelated_data_of_width_2048(n: int, plug_in: float, debiased: float) -> None:
    """Case B55: the plug-in value is d / (d + n), the debiased one is noise around 0."""
    x, y = torch.randn(2, n, 2048, generator=torch.Generator().manual_seed(n))
    assert linear_cka(x, y) == pytest.approx(plug_in, abs=2e-3)
    assert plug_in == pytest.approx(2048 / (2048 + n), abs=6e-4)
    assert abs(debiased_cka(x, y) - debiased) < 5 / n  # the noise of one draw is about 1.4 / n


def test_debiased_has_no_bias_where_plug_in_has() -> None:
    """n = d: 200 draws of unrelated data, and the mean over draws against its own standard error."""
    draws = [normal(2, 24, 24, seed=seed) for seed in range(200)]
    debiased = np.array([debiased_cka(x, y) for x, y in draws])
    assert abs(debiased.mean()) < 3 * debiased.std() / len(draws) ** 0.5 < 0.02
    assert np.mean([linear_cka(x, y) for x, y in draws]) == pytest.approx(0.5, abs=0.02)


def test_both_agree_on_related_data_with_many_rows() -> None:
    """Half of the coordinates shared: the population value is 1/2."""
    x, y = related(20_000, 8, 4)
    assert linear_cka(x, y) == pytest.approx(0.5, abs=0.01)
    assert debiased_cka(x[:4000], y[:4000]) == pytest.approx(0.5, abs=0.02)


def test_row_shuffle_leaves_only_the_bias() -> None:
    x, y = related(300, 200, 200)
    shuffled = y[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    assert debiased_cka(x, y) == 1.0 and abs(debiased_cka(x, shuffled)) < 0.02
    assert linear_cka(x, shuffled) == pytest.approx(200 / 500, abs=0.03)


# --- invariances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", [linear_cka, debiased_cka], ids=lambda f: f.__name__)
def test_rotation_scale_and_translation_change_nothing(measure) -> None:
    x, y = related(60, 10, 5)
    rotation = torch.linalg.qr(normal(10, 10, seed=5))[0]
    value = measure(x, y)
    assert measure(3 * x @ rotation + 7, y) == pytest.approx(value, abs=1e-12)
    assert measure(x, y @ rotation - normal(10, seed=6)) == pytest.approx(value, abs=1e-12)
    assert measure(x, x @ rotation) == pytest.approx(1, abs=1e-12)
    assert measure(y, x) == pytest.approx(value, abs=1e-14)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    assert measure(x[order], y[order]) == pytest.approx(value, abs=1e-12)
    assert abs(measure(x * torch.linspace(0.1, 3, 10), y) - value) > 0.01  # a scale for each coordinate does


@pytest.mark.parametrize("form", ["stream", "blocks"])
def test_large_means_cost_no_digits(form: str) -> None:
    x, y = related(80, 6, 3)
    far = x + 1e5 * normal(6, seed=4), y + 1e5 * normal(6, seed=5)
    found = moments(*far, 4).similarity(0).debiased if form == "stream" else cka_between(far[0][None], far[1][None])
    assert float(found) == pytest.approx(debiased_cka(x, y), abs=1e-8)


def test_equal_representations_are_exactly_one() -> None:
    x = normal(50, 7).float()
    assert linear_cka(x, x.clone()) == 1.0 and debiased_cka(x, x.clone()) == 1.0
    streamed = moments(x, x.clone(), 3).similarity(0)
    assert streamed.plug_in == 1.0 and streamed.debiased == 1.0
    assert cka_between(x[None], x.clone()[None]).item() == pytest.approx(1, abs=1e-14)  # to rounding


# --- streams and blocks against the reference ------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 7, [2, 3, 60, 100]])
@pytest.mark.parametrize("n, d, e", [(150, 20, 20), (30, 50, 40), (80, 300, 140)])
def test_moments_equal_the_reference_however_the_rows_come(parts: int | list[int], n: int, d: int, e: int) -> None:
    """Case B59 beside it: a last batch of any size, even an empty one, is merged."""
    x, y = normal(n, d) + 3, normal(n, e, seed=1)
    y[:, :10] += x[:, :10]
    found = moments(x, y, parts).similarity(0)
    assert found.debiased == pytest.approx(debiased_cka(x, y), abs=1e-12)
    assert found.plug_in == pytest.approx(linear_cka(x, y), abs=1e-12)
    assert (found.n, found.d) == (n, max(d, e))


def test_moments_of_layers_are_apart_and_the_trimmed_version_is_that_of_the_kept_coordinates() -> None:
    x, y = normal(2, 3, 90, 12)
    y[1] += x[1]
    drop_x, drop_y = torch.zeros(2, 3, 12, dtype=torch.bool)
    drop_x[1, [2, 5]], drop_y[1, 7] = True, True
    stream = Moments(x.mean(1), y.mean(1), drop_x, drop_y)
    stream.add(x, y)
    for layer in range(3):
        assert stream.similarity(layer).debiased == pytest.approx(debiased_cka(x[layer], y[layer]), abs=1e-12)
    kept = x[1][:, ~drop_x[1]], y[1][:, ~drop_y[1]]
    trimmed = stream.similarity(1, "trimmed")
    assert trimmed.debiased == pytest.approx(debiased_cka(*kept), abs=1e-12)
    assert trimmed.plug_in == pytest.approx(linear_cka(*kept), abs=1e-12) and trimmed.d == 11
    assert stream.similarity(0, "trimmed") == stream.similarity(0)


@pytest.mark.parametrize("gram_rows", [1, 5, 64])
def test_block_sums_equal_the_reference_of_the_rows_that_stay(gram_rows: int) -> None:
    """Every pair of three representations of different widths, whole and without each of the unequal blocks."""
    a, b, c = normal(40, 5), normal(40, 9, seed=1), normal(40, 3, seed=2)
    b[:, :5] += a
    blocks = torch.tensor([0] * 3 + [1] * 20 + [2] * 1 + [3] * 16)
    sums = block_sums([a, b, c], blocks, gram_rows)
    for without in (None, 0, 1, 2, 3):
        stay = blocks != (-1 if without is None else without)
        expected = [[debiased_cka(x[stay], y[stay]) for y in (a, b, c)] for x in (a, b, c)]
        assert torch.allclose(sums.cka(without), torch.tensor(expected, dtype=torch.float64), atol=1e-11)


def test_b58_layer_maps_have_ones_on_their_diagonal_whatever_the_batch() -> None:
    """Case B58, 512 rows: sums of unbiased HSICs over batches keep the value; plug-in ratios depend on the batch."""
    x, y = related(512, 60, 22, seed=3)
    full = debiased_cka(x, y)
    assert full == pytest.approx(0.3662, abs=0.02) and linear_cka(x, y) == pytest.approx(0.432, abs=0.02)
    for size, plug_in in ((8, 0.928), (16, 0.869), (32, 0.778), (64, 0.670)):
        batches = [(p @ p.T, q @ q.T) for p, q in zip(x.split(size), y.split(size), strict=True)]
        cross, own, other = (
            sum(unbiased_hsic(*pair) for pair in pairs)
            for pairs in (batches, [(k, k) for k, _ in batches], [(m, m) for _, m in batches])
        )
        assert cross / (own * other) ** 0.5 == pytest.approx(full, abs=0.02)
        ratios = [linear_cka(p, q) for p, q in zip(x.split(size), y.split(size), strict=True)]
        assert np.mean(ratios) == pytest.approx(plug_in, abs=0.02)
        sums = block_sums([x, y], torch.zeros(512, dtype=torch.long), size)  # the form used here: no batch in it at all
        assert sums.cka()[0, 1].item() == pytest.approx(full, abs=1e-12)
        assert sums.cka().diagonal().tolist() == pytest.approx([1, 1], abs=1e-14)


def test_map_between_models_finds_the_planted_layer() -> None:
    """Depth and width differ; layer 1 of the second is layer 2 of the first, turned."""
    a, b = normal(3, 200, 10), normal(2, 200, 14, seed=1)
    b[1] = a[2] @ torch.linalg.qr(normal(14, 10, seed=2))[0].T
    found = cka_between(a, b)
    assert found.shape == (3, 2) and found[2, 1].item() == pytest.approx(1, abs=1e-12)
    found[2, 1] = 0
    assert found.abs().max() < 0.1


# --- what is undefined -----------------------------------------------------------------------------------------------


def test_b59_too_few_rows_are_an_error() -> None:
    """Case B59."""
    for call in (
        debiased_cka,
        lambda x, y: unbiased_hsic(x @ x.T, y @ y.T),
        lambda x, y: cka_between(x[None], y[None]),
    ):
        with pytest.raises(ValueError, match="at least 4 rows, got 3"):
            call(X[:3], Y[:3])
        assert math.isfinite(float(call(X[:4], Y[:4])))
    with pytest.raises(ValueError, match="at least 2 rows, got 1"):
        linear_cka(X[:1], Y[:1])
    assert moments(X[:3], Y[:3]).similarity(0).undefined == "too_few_rows"
    assert block_sums([X, Y], torch.tensor([0, 0, 0, 1, 1])).cka(1).isnan().all()  # 3 rows stay


@pytest.mark.parametrize("value", [0.0, 0.1, 1234.567])
def test_b59_a_constant_layer_is_undefined_with_a_reason(value: float) -> None:
    """Case B59: not 0/0, and not the rounding of equal rows taken for data."""
    x, flat = normal(40, 6), torch.full((40, 6), value, dtype=torch.float64)
    for pair in ((x, flat), (flat, x), (flat, flat)):
        assert math.isnan(linear_cka(*pair)) and math.isnan(debiased_cka(*pair))
        stream = Moments(*(normal(1, 6, seed=s) for s in (1, 2)), *torch.zeros(2, 1, 6, dtype=torch.bool))
        stream.add(pair[0][None], pair[1][None])
        found = stream.similarity(0)
        assert math.isnan(found.debiased) and math.isnan(found.plug_in) and found.undefined == "constant"
    found = cka_between(torch.stack([x, flat]), torch.stack([x, flat]))
    assert found[0, 0].item() == pytest.approx(1) and found.isnan().sum() == 3  # the other layer is drawn


def test_self_hsic_that_is_not_positive_is_undefined() -> None:
    """Case B56: rows around a point at equal distances say nothing about each other once the bias is gone."""
    simplex = torch.eye(5, dtype=torch.float64)
    assert unbiased_hsic(simplex, simplex) <= 0
    assert math.isnan(debiased_cka(simplex, normal(5, 3))) and linear_cka(simplex, simplex) == pytest.approx(1)
    assert moments(simplex, normal(5, 3)).similarity(0).undefined == "not_positive"


def test_what_only_the_left_out_block_holds_is_undefined_without_it() -> None:
    x = torch.zeros(20, 3, dtype=torch.float64)
    x[:5] = normal(5, 3)
    sums = block_sums([x, normal(20, 3, seed=1)], torch.tensor([0] * 5 + [1] * 15))
    assert isinstance(sums, BlockSums) and sums.cka()[0, 0].item() == pytest.approx(1)
    assert sums.cka(0)[0].isnan().all() and math.isfinite(sums.cka(0)[1, 1].item())


# --- massive coordinates ---------------------------------------------------------------------------------------------


def test_r7_a_shared_massive_coordinate_and_its_trimming() -> None:
    """Case R7: two independent 512 x 256 matrices plus one common column x 200."""
    common = 200 * normal(512, 1, seed=9)
    x, y = (torch.cat([part, common], dim=1) for part in normal(2, 512, 256))
    assert linear_cka(x, y) == pytest.approx(0.9999998, abs=2e-6) and debiased_cka(x, y) > 0.99999
    drop_x, drop_y = massive_coordinates(x.var(0)), massive_coordinates(y.var(0))
    assert drop_x.tolist() == drop_y.tolist() == [False] * 256 + [True]
    trimmed = moments(x, y, 5, drop_x=drop_x, drop_y=drop_y).similarity(0, "trimmed")
    assert trimmed.plug_in == pytest.approx(0.336, abs=0.01) and abs(trimmed.debiased) < 0.01
    assert moments(x, y, drop_x=drop_x, drop_y=drop_y).similarity(0).debiased > 0.99999


def test_massive_is_a_hundred_times_the_median_of_what_varies() -> None:
    variance = torch.tensor([[1.0, 1.0, 2.0, 100.0, 101.0, 0.5], [0.0, 0.0, 0.0, 3.0, 3.0, 400.0]])
    assert massive_coordinates(variance).tolist() == [[False] * 4 + [True, False], [False] * 5 + [True]]
    assert not massive_coordinates(torch.zeros(4)).any()
    assert not massive_coordinates(normal(100, seed=1).square()).any()
