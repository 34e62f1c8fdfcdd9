"""L2-regularised logistic regression of many label vectors at once; the objective is that of scikit-learn.

Label vectors, values of C and subsets of the rows are columns of one problem: they share the features, so that every
iteration of all of them is two matrix products. `Rotation` takes the features to their principal axes first, where the
penalty is the same, rows fewer than columns leave as many axes as rows, and the curvature is nearly diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TOLERANCE = 1e-6  # of the certified distance to the optimum, relative to the objective
MAX_ITERATIONS = 500
HISTORY = 8  # pairs of steps and gradient changes that shape a direction
_ARMIJO = 1e-4  # share of the promised decrease that a step must bring


@dataclass(frozen=True, eq=False)
class Scaler:
    """Mean and standard deviation of each feature, of the training rows alone; a constant feature has scale 1."""

    mean: Float[Tensor, "d"]
    scale: Float[Tensor, "d"]

    @classmethod
    def fit(cls, x: Float[Tensor, "n d"]) -> Scaler:
        """Source: scikit-learn StandardScaler (population standard deviation, its rule for what is constant)."""
        mean = x.mean(0)
        variance = (x - mean).square().mean(0)
        eps = torch.finfo(x.dtype).eps
        constant = variance <= len(x) * eps * variance + (len(x) * mean * eps) ** 2  # rounding alone
        return cls(mean, torch.where(constant, 1.0, variance.sqrt()))

    def __call__(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m d"]:
        return (x - self.mean) / self.scale


@dataclass(frozen=True, eq=False)
class Rotation:
    """Principal axes of the training rows: x @ axes keeps every distance and every penalty, in min(n, d) numbers."""

    axes: Float[Tensor, "d r"]
    energy: Float[Tensor, "r"]  # sum of squares of the training rows along each axis

    @classmethod
    def fit(cls, x: Float[Tensor, "n d"]) -> Rotation:
        n, d = x.shape
        if d <= n:
            energy, axes = torch.linalg.eigh(x.T @ x)
            return cls(axes, energy.clamp(min=0))
        energy, rows = torch.linalg.eigh(x @ x.T)
        # 1e-12: such axes hold a millionth of the largest spread and move the objective by less than 1e-9 of itself
        kept = energy > 1e-12 * energy[-1].clamp(min=torch.finfo(x.dtype).tiny)
        return cls(x.T @ rows[:, kept] / energy[kept].sqrt(), energy[kept])

    def __call__(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m r"]:
        return x @ self.axes


@dataclass(frozen=True, eq=False)
class LogisticFit:
    """One weight vector and intercept a column. A column whose targets are all equal has weights 0, intercept ±inf."""

    weight: Float[Tensor, "d p"]
    intercept: Float[Tensor, "p"]
    objective: Float[Tensor, "p"]  # see fit_logistic
    gap: Float[Tensor, "p"]  # certified distance to the optimum, relative to the objective
    iterations: Int[Tensor, "p"]

    @property
    def converged(self) -> Bool[Tensor, "p"]:
        return self.gap <= TOLERANCE

    def decision(self, x: Float[Tensor, "m d"]) -> Float[Tensor, "m p"]:
        """Log-odds of the target being 1."""
        return x @ self.weight + self.intercept


def fit_logistic(
    x: Float[Tensor, "n d"],
    target: Bool[Tensor, "n p"],
    c: Float[Tensor, "p"],
    rows: Bool[Tensor, "n p"] | None = None,
    energy: Float[Tensor, "d"] | None = None,
) -> LogisticFit:
    """Fits every column to its optimum.

    objective = c sum_i log(1 + exp(-y_i (x_i w + b))) + |w|^2 / 2, y = +1 where the target is True, else -1; the
    intercept b is not penalised.
    Source: the objective is scikit-learn's LogisticRegression(C=c). Solver ours: L-BFGS in each column, started from
    the curvature bound x'x / 4 + 1 / c of the logistic loss on its diagonal, one Newton step along each direction.
    Args: x, scaled features, float64; rows, those that count in each column (None: all); energy, the diagonal of x'x
    (None: computed). The diagonal is all of x'x when x comes out of a Rotation.
    Returns: LogisticFit; gap follows from strong convexity, f - min f <= |gradient in w|^2 / 2 at the best intercept;
    what a Newton step of the intercept would bring is added, which makes it a bound to first order.
    Raises: ValueError on a c that is not positive, or a column without a row.
    """
    n, d = x.shape
    p = target.shape[1]
    weight = torch.ones(n, p, dtype=x.dtype, device=x.device) if rows is None else rows.to(x.dtype)
    positive, total = (weight * target).sum(0), weight.sum(0)
    if not bool((c > 0).all()) or not bool((total > 0).all()):
        raise ValueError("fit_logistic expects a positive c and at least one row in every column")
    energy = x.square().sum(0) if energy is None else energy
    x = torch.cat([x, x.new_ones(n, 1)], 1)  # the last coordinate is the intercept
    energy = torch.cat([energy, energy.new_full((1,), n)])
    penalty = torch.cat([x.new_ones(d), x.new_zeros(1)])[:, None] / c
    theta = x.new_zeros(d + 1, p)
    theta[-1] = (positive / (total - positive)).log()  # optimal for w = 0; ±inf where the targets are all equal
    objective, gap = x.new_zeros(p), x.new_zeros(p)
    iterations = torch.zeros(p, dtype=torch.int64, device=x.device)

    live = ((positive > 0) & (positive < total)).nonzero()[:, 0]
    problem = _Columns(
        x, theta[:, live], target[:, live].to(x.dtype), weight[:, live], penalty[:, live], energy, total[live] / n
    )
    for iteration in range(MAX_ITERATIONS + 1):
        if not len(live):
            break
        distance = problem.distance() / problem.value
        done = distance <= TOLERANCE
        if iteration == MAX_ITERATIONS:
            done = torch.ones_like(done)
        if done.any():
            finished = live[done]
            theta[:, finished], iterations[finished] = problem.theta[:, done], iteration
            objective[finished], gap[finished] = problem.value[done] * c[finished], distance[done]
            live = live[~done]
            problem.keep(~done)
        if len(live):
            problem.step()
    return LogisticFit(theta[:-1], theta[-1], objective, gap, iterations)


class _Columns:
    """L-BFGS on the columns that are not at their optimum yet; its objective is that of fit_logistic over c."""

    def __init__(
        self, x: Tensor, theta: Tensor, target: Tensor, weight: Tensor, penalty: Tensor, energy: Tensor, share: Tensor
    ) -> None:
        self.x, self.theta, self.target, self.weight, self.penalty = x, theta, target, weight, penalty
        self.scale = 1 / (energy[:, None] * (share / 4) + penalty)  # inverse of the bound's diagonal
        self.margin = x @ theta
        self.value = self._value(self.margin, theta)
        self.gradient, self.curvature = self._gradient()
        self.history: list[tuple[Tensor, Tensor, Tensor]] = []  # step, change of gradient, 1 / their product

    def keep(self, columns: Tensor) -> None:
        """Goes on with some of the columns."""
        self.theta, self.target, self.weight = self.theta[:, columns], self.target[:, columns], self.weight[:, columns]
        self.penalty, self.scale = self.penalty[:, columns], self.scale[:, columns]
        self.margin, self.gradient = self.margin[:, columns], self.gradient[:, columns]
        self.value, self.curvature = self.value[columns], self.curvature[columns]
        self.history = [(s[:, columns], y[:, columns], rho[columns]) for s, y, rho in self.history]

    def distance(self) -> Tensor:
        """Bound of value - minimum: |g|^2 c / 2 of the weights, g^2 / 2h of the intercept."""
        squares = self.gradient.square()
        return (squares[:-1] / self.penalty[:-1]).sum(0) / 2 + squares[-1] / self.curvature / 2

    def step(self) -> None:
        direction = self._direction()
        move = self.x @ direction
        slope = (self.gradient * direction).sum(0)
        length = self._newton_length(direction, move)
        slack = 1e-14 * self.value  # rounding of the sum
        for _ in range(30):
            theta, margin = self.theta + length * direction, self.margin + length * move
            value = self._value(margin, theta)
            short = value > self.value + _ARMIJO * length * slope + slack
            if not short.any():
                break
            length = torch.where(short, length.clamp(max=1.0) / 2, length)
        before = self.gradient
        self.theta, self.margin, self.value = theta, margin, value
        self.gradient, self.curvature = self._gradient()
        step, change = length * direction, self.gradient - before
        product = (step * change).sum(0)
        self.history = [*self.history[-HISTORY + 1 :], (step, change, torch.where(product > 0, 1 / product, 0.0))]

    def _direction(self) -> Tensor:
        """The two-loop recursion; a pair without positive curvature (rounding) is passed over."""
        q = -self.gradient
        taken = []
        for step, change, rho in reversed(self.history):
            taken.append(rho * (step * q).sum(0))
            q = q - taken[-1] * change
        q = q * self.scale
        if self.history:
            step, change, rho = self.history[-1]
            q = q * torch.where(rho > 0, 1 / (rho * (change.square() * self.scale).sum(0)), 1.0)
        for (step, change, rho), alpha in zip(self.history, reversed(taken), strict=True):
            q = q + (alpha - rho * (change * q).sum(0)) * step
        return q

    def _newton_length(self, direction: Tensor, move: Tensor) -> Tensor:
        """Length of the step that a Newton step from length 1 along the direction leads to, within 1/10 .. 10."""
        probability = torch.sigmoid(self.margin + move)
        slope = (self.weight * move * (probability - self.target)).sum(0)
        slope += (self.penalty * direction * (self.theta + direction)).sum(0)
        bend = (self.weight * move.square() * probability * (1 - probability)).sum(0)
        bend += (self.penalty * direction.square()).sum(0)
        return (1 - slope / bend).clamp(0.1, 10.0)

    def _value(self, margin: Tensor, theta: Tensor) -> Tensor:
        loss = torch.nn.functional.softplus(margin, threshold=40.0) - self.target * margin
        return (self.weight * loss).sum(0) + (self.penalty * theta.square()).sum(0) / 2

    def _gradient(self) -> tuple[Tensor, Tensor]:
        """The gradient, and the curvature along the intercept."""
        probability = torch.sigmoid(self.margin)
        gradient = self.x.T @ (self.weight * (probability - self.target)) + self.penalty * self.theta
        return gradient, (self.weight * probability * (1 - probability)).sum(0)
