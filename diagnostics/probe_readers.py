"""Readers of probes: batched logistic regressions, principal components and a small network, each held out by group."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from torch import Tensor

from diagnostics.logistic import Rotation, Scaler, fit_logistic
from diagnostics.probe_labels import Folds

GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # values of C, for scaled features
ALPHAS = (10.0, 0.1)  # weight decay of the network
HIDDEN, STEPS = 16, 100  # units of its one hidden layer, iterations of its solver
COMPONENTS = 64
TIE = 1e-9  # log-odds closer than this are equal: far below what any fit resolves

Transform = Callable[[Tensor], Tensor]  # fitted on training rows, applied to all


@dataclass(frozen=True, eq=False)
class Reader:
    """Features of every row, and what they go through before the scaler, fitted on the training part."""

    features: str  # "hidden", or the name of an output feature
    layer: str  # "" for output features
    load: Callable[[], Float[np.ndarray, "rows d"]]
    before: Callable[[Tensor], Transform] | None = None
    network: bool = False  # a small network instead of a logistic regression; no permutations


@dataclass(frozen=True, eq=False)
class Reading:
    """What the held-out decisions are worth under each of J label vectors."""

    credit: Float[np.ndarray, "n J"]  # 1 right, 0 wrong, 1/k where k classes are equally likely and one is right
    chosen: Float[np.ndarray, "folds tuned"]  # C, or weight decay, of each label vector that was tuned
    unconverged: int  # fits that stopped before their optimum


def held_out(
    x: Float[Tensor, "n d"],
    values: Int[np.ndarray, "n J"],
    n_classes: int,
    folds: Folds,
    tuned: int,
    before: Callable[[Tensor], Transform] | None = None,
) -> Reading:
    """Reads every sample by logistic regressions that saw none of its group.

    Two classes are one regression, more are one against the rest each, the likeliest one is the answer. C minimises
    the log-loss of the inner folds, the smaller C at a tie.
    Source: scikit-learn's LogisticRegression in a Pipeline with StandardScaler and GridSearchCV is the reference.
    Args: x, float64; values, label vectors; tuned, how many of the first ones choose their own C (the others, which
    are permutations, are fitted at the C of the first one); before, fits a transform on a training part.
    Departures: the inner folds reuse the scaler of their outer training part; no held-out sample has a part in it.
    """
    n, count = values.shape
    credit = np.empty((n, count))
    chosen = np.empty((len(folds.inner), tuned))
    grid, unconverged = torch.tensor(GRID, dtype=x.dtype, device=x.device), 0
    kinds = torch.tensor([1] if n_classes == 2 else range(n_classes), device=x.device)
    target = torch.as_tensor(values, device=x.device)[:, :, None] == kinds  # [n, J, kinds]
    for fold, inner in enumerate(folds.inner):
        train = torch.as_tensor(folds.outer != fold, device=x.device)
        features = x if before is None else before(x[train])(x)
        features = Scaler.fit(features[train])(features)
        rotation = Rotation.fit(features[train])
        z = rotation(features)
        parts = torch.as_tensor(inner, device=x.device)[train]
        fits = _Fits(z[train], rotation.energy)
        losses = fits.inner_losses(target[train][:, :tuned], parts, grid)
        best = losses.cpu().numpy().argmin(1)
        chosen[fold] = np.array(GRID)[best]
        c = grid[torch.as_tensor(np.append(best, np.repeat(best[:1], count - tuned)), device=x.device)]
        scores = fits.decisions(target[train], c, z[~train])
        if n_classes == 2:
            scores = torch.cat([-scores, scores], -1)
        credit[~train.cpu().numpy()] = _credit(scores.cpu().numpy(), values[~train.cpu().numpy()])
        unconverged += fits.unconverged
    return Reading(credit, chosen, unconverged)


@dataclass
class _Fits:
    """Regressions on one training part."""

    x: Float[Tensor, "n d"]
    energy: Float[Tensor, "d"]
    unconverged: int = 0

    def inner_losses(
        self, target: Bool[Tensor, "n J K"], parts: Int[Tensor, "n"], grid: Float[Tensor, "G"]
    ) -> Float[Tensor, "J G"]:
        """Log-loss of each label vector at each C over the inner folds, by fits on the other ones."""
        n, count, kinds = target.shape
        folds = int(parts.max()) + 1
        shape = (n, count, kinds, len(grid), folds)
        targets = target[..., None, None].expand(shape).reshape(n, -1)
        rows = (parts[:, None] != torch.arange(folds, device=parts.device))[:, None, None, None].expand(shape)
        fit = fit_logistic(
            self.x, targets, grid[:, None].expand(shape[1:]).reshape(-1), rows.reshape(n, -1), self.energy
        )
        self.unconverged += int((~fit.converged).sum())
        against = torch.where(targets, -1.0, 1.0) * fit.decision(self.x)
        loss = torch.nn.functional.softplus(against).masked_fill(rows.reshape(n, -1), 0.0)
        return loss.reshape(shape).sum((0, 2, 4))

    def decisions(
        self, target: Bool[Tensor, "n J K"], c: Float[Tensor, "J"], test: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m J K"]:
        n, count, kinds = target.shape
        fit = fit_logistic(self.x, target.reshape(n, -1), c.repeat_interleave(kinds), energy=self.energy)
        self.unconverged += int((~fit.converged).sum())
        return fit.decision(test).reshape(len(test), count, kinds)


def components(x: Float[Tensor, "n d"]) -> Transform:
    """The leading principal components of the training rows, at most 64: scikit-learn's PCA."""
    model = PCA(min(COMPONENTS, *x.shape), random_state=0).fit(x.cpu().numpy())
    mean, axes = (torch.as_tensor(part, device=x.device) for part in (model.mean_, model.components_.T))
    return lambda rows: (rows - mean) @ axes


def network_held_out(
    x: Float[Tensor, "n d"],
    values: Int[np.ndarray, "n J"],
    n_classes: int,
    folds: Folds,
    before: Callable[[Tensor], Transform] | None,
    seed: int,
) -> Reading:
    """As held_out, by a network of one hidden layer: scikit-learn's MLPClassifier; its weight decay alpha takes the
    place of 1 / C, the larger alpha at a tie."""
    n, count = values.shape
    credit, chosen = np.empty((n, count)), np.empty((len(folds.inner), count))
    for fold, inner in enumerate(folds.inner):
        train = folds.outer != fold
        features = x if before is None else before(x[torch.as_tensor(train, device=x.device)])(x)
        rows = Scaler.fit(features[torch.as_tensor(train, device=x.device)])(features).cpu().numpy()
        for j in range(count):
            value = values[:, j]
            losses = np.zeros(len(ALPHAS))
            for part in range(inner.max() + 1):
                fit, rest = train & (inner != part), inner == part
                for index, alpha in enumerate(ALPHAS):
                    scores = _network(rows[fit], value[fit], rows[rest], n_classes, alpha, seed)
                    losses[index] -= np.take_along_axis(scores, value[rest, None], 1).sum()
            chosen[fold, j] = ALPHAS[losses.argmin()]
            scores = _network(rows[train], value[train], rows[~train], n_classes, chosen[fold, j], seed)
            credit[~train, j] = _credit(scores[:, None], value[~train, None])[:, 0]
    return Reading(credit, chosen, 0)


def _network(
    x: np.ndarray, value: np.ndarray, test: np.ndarray, n_classes: int, alpha: float, seed: int
) -> Float[np.ndarray, "m K"]:
    """Log-probabilities; -inf for a class that was not there to learn."""
    scores = np.full((len(test), n_classes), -np.inf)
    if len(np.unique(value)) == 1:
        scores[:, value[0]] = 0.0
        return scores
    model = MLPClassifier((HIDDEN,), solver="lbfgs", alpha=alpha, max_iter=STEPS, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the number of steps is part of the reader
        model.fit(x, value)
    scores[:, model.classes_] = np.log(model.predict_proba(test).clip(min=1e-20))  # no single sample decides alpha
    return scores


def _credit(scores: Float[np.ndarray, "m J K"], values: Int[np.ndarray, "m J"]) -> Float[np.ndarray, "m J"]:
    likely = scores >= scores.max(-1, keepdims=True) - TIE
    return np.take_along_axis(likely, values[..., None], -1)[..., 0] / likely.sum(-1)
