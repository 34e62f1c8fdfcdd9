"""Linear centred kernel alignment (CKA): how alike two representations of the same rows are, up to rotation and scale.

`linear_cka` and `debiased_cka` are the plain reference on whole matrices. `Moments` gives the same numbers of rows that
stream by, layer for layer, and `BlockSums` those of all pairs of layers, whole and with one block of rows left out.
Everything is float64. An undefined value is NaN, and `undefined_because` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

MASSIVE = 100.0  # times the median variance of the coordinates
GRAM_ROWS = 64  # rows of a Gram matrix that are held at once
VERSIONS = ("all", "trimmed")  # of the coordinates
MINIMUM = 4  # rows: the unbiased estimator divides by n - 3
# Below this share of the mean square a variance is rounding: float32 resolves 6e-8 of a value
_CONSTANT = 1e-14
# Below this share of the mean square of its Gram an unbiased self-HSIC is the rounding of terms that cancel
_NOT_POSITIVE = 1e-10
_WIDTH = 128  # columns of a symmetric product at a time: little more than half of it is made


@dataclass(frozen=True)
class Similarity:
    """How alike two representations of the same rows are."""

    n: int  # rows
    d: int  # coordinates of the wider one; with n below d the plug-in value is far above 0 for unrelated ones
    plug_in: float  # in [0, 1]
    debiased: float  # at most about 1; small negative values are legal
    undefined: str  # why `debiased` is NaN, see undefined_because; "" where it is not


def linear_cka(x: Float[Tensor, "n D"], y: Float[Tensor, "n E"]) -> float:
    """Plug-in linear CKA: |Xc' Yc|^2 / (|Xc' Xc| |Yc' Yc|), Frobenius norms, column means removed.

    Source: Kornblith et al. 2019, sec. 3. Biased upward where n is not much larger than the widths: unrelated isotropic
    data of width d have about d / (d + n).
    Args: x, y, representations of the same n rows. Returns: in [0, 1]; NaN where one of them is constant.
    Raises: ValueError below 2 rows.
    """
    if len(x) < 2:
        raise ValueError(f"linear CKA needs at least 2 rows, got {len(x)}; give more tokens")
    if _constant(x) or _constant(y):
        return float("nan")
    a, b = _centred(x), _centred(y)
    cross, self_x, self_y = ((p.T @ q).square().sum() for p, q in ((a, b), (a, a), (b, b)))
    return float(cross / (self_x * self_y).sqrt())


def debiased_cka(x: Float[Tensor, "n D"], y: Float[Tensor, "n E"]) -> float:
    """Linear CKA of unbiased HSICs: HSIC_u(K, L) / sqrt(HSIC_u(K, K) HSIC_u(L, L)), K = XX', L = YY'.

    Source: Nguyen, Raghu and Kornblith 2021, eq. 3, with the estimator of Song et al. 2012.
    Args: x, y, representations of the same n rows. Returns: at most about 1, about 0 for unrelated ones and then often
    below it; NaN where one is constant or its own HSIC_u is not positive.
    Raises: ValueError below 4 rows.
    """
    _enough(len(x))
    k, m = (z @ z.T for z in (_centred(x), _centred(y)))
    cross, self_x, self_y = unbiased_hsic(k, m), unbiased_hsic(k, k), unbiased_hsic(m, m)
    positive = self_x > _NOT_POSITIVE * k.square().mean() and self_y > _NOT_POSITIVE * m.square().mean()
    if undefined_because(len(x), _constant(x) or _constant(y), bool(positive)):
        return float("nan")
    return cross / (self_x * self_y) ** 0.5


def unbiased_hsic(gram_x: Float[Tensor, "n n"], gram_y: Float[Tensor, "n n"]) -> float:
    """Unbiased estimate of the Hilbert-Schmidt independence criterion of two Gram matrices.

    With K and L their copies with a diagonal of 0:
    HSIC_u = [tr(KL) + 1'K1 1'L1 / ((n-1)(n-2)) - 2 / (n-2) 1'KL1] / (n (n-3)).
    Source: Song et al. 2012, eq. 5.
    Args: Grams of the same n rows. Returns: in units of K times units of L; may be negative.
    Raises: ValueError below 4 rows.
    """
    n = len(gram_x)
    _enough(n)
    off = 1 - torch.eye(n, dtype=torch.float64, device=gram_x.device)
    k, m = gram_x.double() * off, gram_y.double() * off
    return float(_unbiased(n, (k * m).sum(), k.sum(), m.sum(), k.sum(0) @ m.sum(0)))


def undefined_because(n: int, constant: bool, positive: bool) -> str:
    """Why a debiased CKA does not exist: "too_few_rows", "constant", "not_positive" (a self-HSIC_u); "" if it does."""
    if n < MINIMUM:
        return "too_few_rows"
    return "constant" if constant else "" if positive else "not_positive"


def massive_coordinates(variance: Float[Tensor, "*L D"]) -> Bool[Tensor, "*L D"]:
    """The few coordinates that dominate: variance above 100 times the median of the coordinates that vary at all.

    A coordinate that two representations share and that varies this much is all that their CKA sees.
    Source: ours. Args: variance of each coordinate. Returns: True where massive: at most half of a row.
    """
    median = torch.where(variance > 0, variance.double(), torch.nan).nanmedian(-1, keepdim=True).values
    return variance > MASSIVE * median


def cka_between(a: Float[Tensor, "L n D"], b: Float[Tensor, "K n E"]) -> Float[Tensor, "L K"]:
    """Debiased CKA of every layer of one model with every layer of another, both read on the same n tokens.

    Args: states of two models, of two checkpoints, or of one model in two contexts; depth and width may differ.
    Returns: [L, K], float64, NaN where undefined. Raises: ValueError below 4 rows.
    """
    _enough(a.shape[1])
    return block_sums([*a, *b], torch.zeros(a.shape[1], dtype=torch.long)).cka()[: len(a), len(a) :]


class Moments:
    """Same-layer CKA of rows that stream by: linear_cka and debiased_cka of all of them, in memory free of n.

    With p_i = |x_i|^2, q_i = |y_i|^2, sums over rows: tr(KL) = |X'Y|^2 - sum pq, 1'K1 = |X'1|^2 - sum p, and
    1'KL1 = (X'1)' X'Y (Y'1) - (sum p y)'(Y'1) - (sum q x)'(X'1) + sum pq. Kept of a layer: X'X, Y'Y, X'Y and vectors.
    Source: ours.
    Args: shift_x, shift_y, any vectors near the mean states (CKA is free of translation; digits are not lost to large
    means); drop_x, drop_y, the coordinates that the trimmed version is without.
    """

    def __init__(
        self,
        shift_x: Float[Tensor, "L D"],
        shift_y: Float[Tensor, "L E"],
        drop_x: Bool[Tensor, "L D"],
        drop_y: Bool[Tensor, "L E"],
    ):
        self.n = 0
        self._shifts = shift_x.double(), shift_y.double()
        # 1 where a coordinate is kept, [L, D, 2]: all of them, then the trimmed version
        self._keep = tuple(torch.stack([torch.ones_like(drop), ~drop], -1).double() for drop in (drop_x, drop_y))
        (layers, width_x), width_y = shift_x.shape, shift_y.shape[1]
        new = self._shifts[0].new_zeros
        self._xx, self._yy, self._xy = (
            new(layers, *shape) for shape in ((width_x, width_x), (width_y, width_y), (width_x, width_y))
        )
        # sums of x, px and qx (both versions of p, q); the same of y; of p, q, pp, qq, pq and unshifted |x|^2, |y|^2
        self._x, self._y, self._squares = new(layers, 5, width_x), new(layers, 5, width_y), new(layers, 7, 2)

    def add(self, x: Float[Tensor, "L M D"], y: Float[Tensor, "L M E"]) -> None:
        """Adds M rows, however few, to every layer."""
        self.n += x.shape[1]
        for layer in range(len(x)):
            raw = x[layer].double(), y[layer].double()
            a, b = (rows - shift[layer] for rows, shift in zip(raw, self._shifts, strict=True))
            keep_x, keep_y = (keep[layer] for keep in self._keep)
            p, q = a.square() @ keep_x, b.square() @ keep_y  # [M, 2]
            weights = torch.cat([torch.ones_like(p[:, :1]), p, q], dim=1).T
            _add_upper(self._xx[layer], a)
            _add_upper(self._yy[layer], b)
            self._xy[layer].addmm_(a.T, b)
            self._x[layer].addmm_(weights, a)
            self._y[layer].addmm_(weights, b)
            before = raw[0].square().sum(0) @ keep_x, raw[1].square().sum(0) @ keep_y
            self._squares[layer] += torch.stack([*(z.sum(0) for z in (p, q, p * p, q * q, p * q)), *before])

    def similarity(self, layer: int, version: str = "all") -> Similarity:
        """Of all rows so far, over all coordinates or over the trimmed ones."""
        v, n = VERSIONS.index(version), self.n
        keep_x, keep_y = (keep[layer, :, v] for keep in self._keep)
        width = max(int(keep_x.sum()), int(keep_y.sum()))
        if n < MINIMUM:
            return Similarity(n, width, float("nan"), float("nan"), undefined_because(n, False, False))
        p, q, pp, qq, pq, before_x, before_y = self._squares[layer, :, v]
        x, px, qx = (self._x[layer, row] * keep_x for row in (0, 1 + v, 3 + v))
        y, py, qy = (self._y[layer, row] * keep_y for row in (0, 1 + v, 3 + v))
        cross, self_x, self_y = (
            _moment_hsic(n, moment * left[:, None] * right, *vectors, *squares)
            for moment, left, right, vectors, squares in (
                (self._xy[layer], keep_x, keep_y, (x, y, qx, py), (p, q, pq)),
                (_symmetric(self._xx[layer]), keep_x, keep_x, (x, x, px, px), (p, p, pp)),
                (_symmetric(self._yy[layer]), keep_y, keep_y, (y, y, qy, qy), (q, q, qq)),
            )
        )
        varies = p - x @ x / n > _CONSTANT * (before_x + p), q - y @ y / n > _CONSTANT * (before_y + q)
        constant = not all(bool(each) for each in varies)
        positive = all(bool(unbiased > _NOT_POSITIVE * total / n**2) for total, unbiased in (self_x, self_y))
        plug_in, debiased = (cross / (self_x * self_y).sqrt()).tolist()
        reason = undefined_because(n, constant, positive)
        nan = float("nan")
        return Similarity(n, width, nan if constant else plug_in, nan if reason else debiased, reason)


@dataclass(frozen=True, eq=False)
class BlockSums:
    """What the unbiased HSIC of every pair of R representations needs, with any of B blocks of rows left out."""

    sizes: Int[Tensor, "B"]  # rows of each block
    touching: Float[Tensor, "B R R"]  # sums of K_ij L_ij (diagonals 0), i in the block, j anywhere
    within: Float[Tensor, "B R R"]  # i and j in the block
    rows: Float[Tensor, "R n B"]  # sum of K_ij over the j of each block; rows in order of their blocks
    constant: Bool[Tensor, "R"]

    def hsic(self, without: int | None = None) -> Float[Tensor, "R R"]:
        """Unbiased HSIC of every pair, of the rows outside one block (None: of all rows); NaN below 4 rows."""
        n, pairs, sums = int(self.sizes.sum()), self.touching.sum(0), self.rows.sum(-1)
        if without is not None:
            first, size = int(self.sizes[:without].sum()), int(self.sizes[without])
            n -= size
            pairs = pairs - 2 * self.touching[without] + self.within[without]
            sums = sums - self.rows[..., without]
            sums = torch.cat([sums[:, :first], sums[:, first + size :]], dim=1)
        if n < MINIMUM:
            return torch.full_like(pairs, torch.nan)
        total = sums.sum(1)
        return _unbiased(n, pairs, total[:, None], total[None], sums @ sums.T)

    def cka(self, without: int | None = None) -> Float[Tensor, "R R"]:
        """Debiased CKA of every pair, of the rows outside one block (None: of all rows); NaN where undefined."""
        hsic = self.hsic(without)
        own, square = hsic.diagonal(), self.touching.sum(0).diagonal() / self.sizes.sum() ** 2
        own = own.where((own > _NOT_POSITIVE * square) & ~self.constant, torch.nan)
        return hsic / torch.outer(own, own).sqrt()


def block_sums(
    representations: Sequence[Float[Tensor, "n _"]], blocks: Int[Tensor, "n"], gram_rows: int = GRAM_ROWS
) -> BlockSums:
    """Block sums over all pairs of rows, from pieces of the Gram matrices of at most `gram_rows` rows.

    Source: ours. A minibatch HSIC (Nguyen et al. 2021) sees the pairs inside its batches; these pieces reach over all
    rows, so that whatever their size the result is that of the full Grams, in memory R * gram_rows * n.
    Args: representations of the same n rows; blocks, of each row, 0 .. B - 1 in ascending order.
    """
    count, n = len(representations), len(blocks)
    sizes, means = torch.bincount(blocks.cpu()), [representation.double().mean(0) for representation in representations]
    new = representations[0].double().new_zeros
    touching, within = new(len(sizes), count, count), new(len(sizes), count, count)
    rows = new(count, n, len(sizes))
    for block, (size, end) in enumerate(zip(sizes.tolist(), sizes.cumsum(0).tolist(), strict=True)):
        for start in range(end - size, end, gram_rows):
            stop = min(start + gram_rows, end)
            grams = new(count, stop - start, n)
            for index, (representation, mean) in enumerate(zip(representations, means, strict=True)):
                centred = representation - mean  # in float64, piece by piece: a copy of them all would be large
                torch.mm(centred[start:stop], centred.T, out=grams[index])
            grams.diagonal(start, dim1=1, dim2=2).zero_()
            rows[:, start:stop] = torch.stack([part.sum(-1) for part in grams.split(sizes.tolist(), -1)], -1)
            touching[block] += grams.flatten(1) @ grams.flatten(1).T
            inside = grams[..., end - size : end].flatten(1)
            within[block] += inside @ inside.T
    constant = torch.tensor([_constant(representation) for representation in representations], device=rows.device)
    return BlockSums(sizes, touching, within, rows, constant)


def _add_upper(product: Tensor, rows: Tensor) -> None:
    """Adds rows' rows to a symmetric product, at and above its diagonal."""
    for start in range(0, rows.shape[1], _WIDTH):
        product[start : start + _WIDTH, start:].addmm_(rows[:, start : start + _WIDTH].T, rows[:, start:])


def _symmetric(upper: Tensor) -> Tensor:
    """The whole product whose part at and above the diagonal is given."""
    return upper.triu() + upper.triu(1).T


def _moment_hsic(
    n: int, cross: Tensor, x: Tensor, y: Tensor, qx: Tensor, py: Tensor, p: Tensor, q: Tensor, pq: Tensor
) -> Tensor:
    """[|Xc'Yc|^2, HSIC_u] of a pair, from its moments as Moments names them."""
    centred = (cross - torch.outer(x, y) / n).square().sum()
    both = x @ cross @ y - py @ y - qx @ x + pq
    return torch.stack([centred, _unbiased(n, cross.square().sum() - pq, x @ x - p, y @ y - q, both)])


def _unbiased(n: int, pairs: Tensor, total_x: Tensor, total_y: Tensor, both: Tensor) -> Tensor:
    """HSIC_u from tr(KL), 1'K1, 1'L1 and 1'KL1."""
    return (pairs + total_x * total_y / ((n - 1) * (n - 2)) - 2 * both / (n - 2)) / (n * (n - 3))


def _centred(x: Tensor) -> Tensor:
    """Column means removed: changes no estimate, and keeps their digits where means are large."""
    rows = x.double()
    return rows - rows.mean(0)


def _constant(x: Tensor) -> bool:
    return not bool(_centred(x).square().sum() > _CONSTANT * x.double().square().sum())


def _enough(n: int) -> None:
    if n < MINIMUM:
        raise ValueError(
            f"debiased CKA needs at least {MINIMUM} rows, got {n}; give more tokens or merge small batches"
        )
