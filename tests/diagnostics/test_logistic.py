"""The batched logistic solver against scikit-learn: the same objective, optimum, scaler and decisions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from diagnostics import logistic
from diagnostics.logistic import LogisticFit, Rotation, Scaler, fit_logistic

GRID = [1e-4, 1e-2, 1.0, 100.0]


def data(n: int, d: int, seed: int = 0, signal: float = 1.0) -> tuple[Tensor, Tensor]:
    """Features of falling variance in mixed directions, scaled; targets that follow one of them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)) @ (rng.standard_normal((d, d)) / np.sqrt(np.arange(1, d + 1))[:, None])
    target = signal * x[:, 0] / x[:, 0].std() + rng.standard_normal(n) > 0.3
    return Scaler.fit(torch.from_numpy(x))(torch.from_numpy(x)), torch.from_numpy(target)


def objective(x: Tensor, target: Tensor, c: float, weight: Tensor, intercept: Tensor) -> float:
    """As in scikit-learn's documentation, term by term."""
    sign = target.double() * 2 - 1
    margins = sign * (x @ weight + intercept)
    return float(c * torch.log1p(torch.exp(-margins)).sum() + weight @ weight / 2)


def sklearn_fit(x: Tensor, target: Tensor, c: float) -> tuple[float, np.ndarray]:
    """Objective at the optimum and decisions."""
    model = LogisticRegression(C=c, tol=1e-9, max_iter=50_000).fit(x.numpy(), target.numpy())
    weight, intercept = torch.from_numpy(model.coef_[0]), torch.from_numpy(model.intercept_)
    return objective(x, target, c, weight, intercept), model.decision_function(x.numpy())


@pytest.mark.parametrize(("n", "d"), [(300, 20), (120, 60), (60, 150), (200, 1)])
@pytest.mark.parametrize("signal", [0.0, 3.0])
def test_the_optimum_is_that_of_scikit_learn(n: int, d: int, signal: float) -> None:
    x, target = data(n, d, signal=signal)
    rotation = Rotation.fit(x)
    c = torch.tensor(GRID, dtype=torch.float64)
    plain = fit_logistic(x, target[:, None].expand(-1, 4), c)
    turned = fit_logistic(rotation(x), target[:, None].expand(-1, 4), c, energy=rotation.energy)
    for fit, features in ((plain, x), (turned, rotation(x))):
        assert fit.converged.all()
        for index, value in enumerate(GRID):
            best, decisions = sklearn_fit(x, target, value)
            ours = objective(features, target, value, fit.weight[:, index], fit.intercept[index])
            assert fit.objective[index].item() == pytest.approx(ours, rel=1e-12)
            assert ours == pytest.approx(best, rel=1e-6)
            assert np.abs(fit.decision(features)[:, index].numpy() - decisions).max() < 0.02 * np.abs(decisions).max()
            assert (ours - best) / ours <= 1.1 * fit.gap[index].item() + 1e-12  # what is certified is true


def test_the_optimum_is_close_in_every_decision_at_a_tight_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logistic, "TOLERANCE", 1e-13)
    x, target = data(200, 30)
    fit = fit_logistic(x, target[:, None], torch.tensor([0.1], dtype=torch.float64))
    assert np.abs(fit.decision(x)[:, 0].numpy() - sklearn_fit(x, target, 0.1)[1]).max() < 1e-5


def test_columns_with_their_own_rows_and_c_are_their_own_problems() -> None:
    x, target = data(150, 40)
    rng = np.random.default_rng(1)
    targets = torch.from_numpy(rng.random((150, 6)) < 0.4) ^ target[:, None]
    rows = torch.from_numpy(rng.random((150, 6)) < 0.7)
    c = torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0, 0.1], dtype=torch.float64)
    together = fit_logistic(x, targets, c, rows)
    for j in range(6):
        kept = rows[:, j]
        best, _ = sklearn_fit(x[kept], targets[kept, j], c[j].item())
        assert together.objective[j].item() == pytest.approx(best, rel=1e-6)
        alone = fit_logistic(x[kept], targets[kept, j : j + 1], c[j : j + 1])
        assert alone.objective[0].item() == pytest.approx(together.objective[j].item(), rel=1e-6)


def test_a_rotation_keeps_distances_in_as_few_numbers_as_there_are_rows() -> None:
    for n, d in ((50, 20), (20, 50)):
        x, _ = data(n, d)
        rotation = Rotation.fit(x)
        z = rotation(x)
        assert z.shape[1] == min(n - (n < d), d)  # centred rows span one dimension less than there are
        assert torch.allclose(z @ z.T, x @ x.T, atol=1e-8)
        assert torch.allclose(z.square().sum(0), rotation.energy, rtol=1e-6)
        assert torch.allclose(rotation.axes.T @ rotation.axes, torch.eye(z.shape[1]).double(), atol=1e-8)


def test_the_scaler_is_that_of_scikit_learn() -> None:
    x = np.random.default_rng(0).standard_normal((40, 4)) * [1, 1e4, 1e-6, 1]
    x[:, 3] = 0.1  # constant: 0 after scaling, not rounding noise blown up
    ours = Scaler.fit(torch.from_numpy(x))(torch.from_numpy(x)).numpy()
    assert ours == pytest.approx(StandardScaler().fit_transform(x), abs=1e-12)
    assert np.abs(ours[:, 3]).max() < 1e-12


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_b62_a_massive_coordinate_changes_nothing_after_scaling(factor: float) -> None:
    x, target = data(200, 30)
    x = x * torch.tensor([factor] + [1.0] * 29, dtype=torch.float64)
    fit = fit_logistic(Scaler.fit(x)(x), target[:, None], torch.tensor([1.0], dtype=torch.float64))
    assert fit.converged.all() and fit.iterations.max() < 60
    assert fit.objective[0].item() == pytest.approx(sklearn_fit(data(200, 30)[0], target, 1.0)[0], rel=1e-6)


def test_equal_rows_of_both_classes_leave_the_weights_at_exactly_zero() -> None:
    x = torch.cat([data(80, 30)[0]] * 2)
    target = torch.arange(160) < 80
    rotation = Rotation.fit(x)
    c = torch.tensor(GRID, dtype=torch.float64)
    fit = fit_logistic(rotation(x), target[:, None].expand(-1, 4), c, energy=rotation.energy)
    assert not fit.weight.any() and not fit.intercept.any() and not fit.decision(rotation(x)).any()


def test_targets_that_are_all_equal_have_no_finite_optimum() -> None:
    x, target = data(50, 5)
    targets = torch.stack([torch.ones(50, dtype=torch.bool), torch.zeros(50, dtype=torch.bool), target], 1)
    fit = fit_logistic(x, targets, torch.ones(3, dtype=torch.float64))
    assert fit.intercept[:2].tolist() == [np.inf, -np.inf] and not fit.weight[:, :2].any()
    assert fit.objective[2].item() == pytest.approx(sklearn_fit(x, target, 1.0)[0], rel=1e-6)


def test_a_fit_that_was_stopped_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    x, target = data(100, 50, signal=3.0)
    c = torch.tensor([1e-6, 100.0], dtype=torch.float64)
    monkeypatch.setattr(logistic, "MAX_ITERATIONS", 3)
    fit: LogisticFit = fit_logistic(x, target[:, None].expand(-1, 2), c)
    assert fit.converged.tolist() == [True, False] and fit.iterations[1] == 3


def test_errors_name_what_is_wrong() -> None:
    x, target = data(20, 3)
    with pytest.raises(ValueError, match="a positive c"):
        fit_logistic(x, target[:, None], torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="at least one row"):
        fit_logistic(x, target[:, None], torch.ones(1, dtype=torch.float64), torch.zeros(20, 1, dtype=torch.bool))
