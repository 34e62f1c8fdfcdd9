"""Linear CKA between the states a policy has without and with a privileged text: same layer, and layer by layer.

Same-layer values are of all rows, by feature moments. What needs pairs of rows (the map of layers, the values without
each block of tasks, the row-shuffle null) is of a uniform sample of them, the same rows under every context. Neither
grows with the number of tokens. `Comparison` is the same for any two readings of the same tokens: two checkpoints, or
two models.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diagnostics.artifact import to_table
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.passes import finite_rows
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, measurement
from diagnostics.similarity import VERSIONS, Moments, block_sums, massive_coordinates

ROWS = 1280  # of the sample
BLOCKS = 20  # of tasks
BLOCK_COLUMNS = {
    "context": "string",
    "coordinates": "string",  # "all", "trimmed"
    "layer": "string",
    "block": "int64",  # the block that is left out; -1: none
    "debiased": "float64",  # of the sample
}
MAP_COLUMNS = {
    "context": "string",
    "coordinates": "string",
    "student_layer": "string",
    "teacher_layer": "string",
    "debiased": "float64",  # of the sample
}


@dataclass
class Spread:
    """Mean and variance of each coordinate of some states, streamed."""

    n: int = 0
    total: Tensor | None = None  # float64 [L, D]
    squares: Tensor | None = None

    def add(self, states: Float[Tensor, "L M D"]) -> None:
        """Adds M rows; those that are not finite in every layer are left out."""
        finite = finite_rows(states)
        if not bool(finite.all()):
            states = states[:, finite]
        rows = [layer.double() for layer in states]
        total, squares = (torch.stack(sums) for sums in ([r.sum(0) for r in rows], [r.square().sum(0) for r in rows]))
        self.n += states.shape[1]
        self.total = total if self.total is None else self.total + total
        self.squares = squares if self.squares is None else self.squares + squares

    @classmethod
    def of(cls, states: Float[Tensor, "L M D"]) -> Spread:
        """That of these states alone."""
        spread = cls()
        spread.add(states)
        return spread

    def frame(self) -> tuple[Float[Tensor, "L D"], Bool[Tensor, "L D"]]:
        """The mean state, and which coordinates are massive."""
        assert self.total is not None and self.squares is not None, "nothing was added"
        mean = self.total / max(self.n, 1)
        return mean, massive_coordinates((self.squares / max(self.n, 1) - mean.square()).clamp(min=0))


@dataclass
class Sample:
    """A uniform sample of the rows of two readings that stream by: those with the smallest keys.

    Keys are random and belong to a row, so that neither the order of the stream nor its batches change the sample.
    """

    limit: int
    keys: np.ndarray = field(init=False)  # [limit]; infinite where nothing is held
    blocks: np.ndarray = field(init=False)
    a: Tensor | None = None  # [L, limit, D]
    b: Tensor | None = None  # [K, limit, E]

    def __post_init__(self) -> None:
        self.keys, self.blocks = np.full(self.limit, np.inf), np.zeros(self.limit, np.int64)

    def add(self, a: Float[Tensor, "L M D"], b: Float[Tensor, "K M E"], keys: np.ndarray, blocks: np.ndarray) -> None:
        """Offers M rows, with the key and the block of each."""
        if self.a is None or self.b is None:
            self.a, self.b = (x.new_empty(len(x), self.limit, x.shape[2]) for x in (a, b))
        best = np.argsort(np.concatenate([self.keys, keys]), kind="stable")[: self.limit]
        taken = best[best >= self.limit] - self.limit
        free = np.setdiff1d(np.arange(self.limit), best)  # as many as are taken
        source, places = (torch.from_numpy(index).to(a.device) for index in (taken, free))
        self.a[:, places], self.b[:, places] = a[:, source], b[:, source]
        self.keys[free], self.blocks[free] = keys[taken], blocks[taken]

    def rows(self) -> tuple[Float[Tensor, "L N D"], Float[Tensor, "K N E"], np.ndarray]:
        """The sampled rows of both readings and their blocks, ordered by block and key."""
        assert self.a is not None and self.b is not None, "nothing was added"
        order = np.lexsort((self.keys, self.blocks))
        order = order[np.isfinite(self.keys[order])]
        index = torch.from_numpy(order).to(self.a.device)
        return self.a[:, index], self.b[:, index], self.blocks[order]


class Comparison:
    """CKA of two readings of the same tokens, `a` and `b`: student and teacher, two checkpoints, two models.

    Depth and width may differ; only readings of equal depth have same-layer values.
    Args: spread_a, spread_b, of states seen before: their mean is what is shifted by, their massive coordinates are
    what the trimmed version drops (None: those of the first batch).
    """

    def __init__(self, spread_a: Spread | None = None, spread_b: Spread | None = None):
        self._spreads = spread_a, spread_b
        self._frames: list[tuple[Tensor, Tensor]] = []  # (shift [L, D], massive [L, D]) of a and of b
        self._moments: Moments | None = None
        self._sample = Sample(ROWS)
        self._rows, self._not_finite = 0, 0

    def add(self, a: Float[Tensor, "L M D"], b: Float[Tensor, "K M E"], keys: np.ndarray, blocks: np.ndarray) -> None:
        """Adds M tokens; those with a state that is not finite are left out and counted.

        Args: keys, random in [0, 1), the same for a token in every comparison; blocks, of each token's task.
        """
        finite = finite_rows(a) & finite_rows(b)
        if not bool(finite.all()):
            self._not_finite += int((~finite).sum())
            there = finite.cpu().numpy()
            a, b, keys, blocks = a[:, finite], b[:, finite], keys[there], blocks[there]
        if not len(keys):
            return
        if not self._frames:
            self._frames = [
                (Spread.of(states) if spread is None else spread).frame()
                for spread, states in zip(self._spreads, (a, b), strict=True)
            ]
            if len(a) == len(b):
                (shift_a, massive_a), (shift_b, massive_b) = self._frames
                self._moments = Moments(shift_a, shift_b, massive_a, massive_b)
        if self._moments is not None:
            self._moments.add(a, b)
        self._sample.add(a, b, keys, blocks)
        self._rows += len(keys)

    def values(self, generator: torch.Generator) -> list[dict[str, Any]]:
        """Rows of layer, metric, value and unit: same-layer CKA with its null, and counts.

        The null pairs each sampled row of `a` with another row of `b`; its plug-in value is the bias at that many rows.
        """
        rows = [_row("", "rows", self._rows, "tokens")]
        if self._not_finite:
            rows.append(_row("", "rows_not_finite", self._not_finite, "tokens"))
        if not self._rows:
            return rows
        a, b, _ = self._sample.rows()
        rows.append(_row("", "sampled_rows", a.shape[1], "tokens"))
        if self._moments is None:
            return rows
        shuffled = b[:, torch.randperm(b.shape[1], generator=generator).to(b.device)]
        (shift_a, massive_a), (shift_b, massive_b) = self._frames
        for layer in range(len(a)):
            one = slice(layer, layer + 1)
            null = Moments(shift_a[one], shift_b[one], massive_a[one], massive_b[one])
            null.add(a[one], shuffled[one])
            for version, prefix in zip(VERSIONS, ("", "trimmed/"), strict=True):
                found, chance = self._moments.similarity(layer, version), null.similarity(0, version)
                named = {"plug_in": found.plug_in, "debiased": found.debiased}
                named |= {"null_plug_in": chance.plug_in, "null_debiased": chance.debiased}
                rows += [_row(str(layer), prefix + name, value, "dimensionless") for name, value in named.items()]
                rows.append(_row(str(layer), f"{prefix}coordinates", found.d, "coordinates"))
                if found.undefined:
                    rows.append(_row(str(layer), f"{prefix}undefined/{found.undefined}", 1, "layers"))
        return rows

    def pairwise(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows of the sample's debiased CKA: same-layer, whole and without each block; and the map of layers."""
        blocks: list[dict[str, Any]] = []
        pairs: list[dict[str, Any]] = []
        if not self._rows:
            return blocks, pairs
        a, b, block = self._sample.rows()
        names, index = np.unique(block, return_inverse=True)
        without = [None, *range(len(names))] if len(names) > 1 else [None]
        sums = block_sums([*a, *b], torch.from_numpy(index))
        for version in VERSIONS:
            if version == "trimmed" and any(bool(massive.any()) for _, massive in self._frames):
                a, b = (x.masked_fill(m[:, None], 0) for x, (_, m) in zip((a, b), self._frames, strict=True))
                sums = block_sums([*a, *b], torch.from_numpy(index))
            whole = sums.cka()[: len(a), len(a) :]
            place: dict[str, Any] = {"coordinates": version}
            for i, j in np.ndindex(len(a), len(b)):
                layers = {"student_layer": str(i), "teacher_layer": str(j)}
                pairs.append({**place, **layers, "debiased": float(whole[i, j])})
            for left_out in without if len(a) == len(b) else []:
                place["block"] = -1 if left_out is None else int(names[left_out])
                same = sums.cka(left_out).diagonal(len(a)).tolist()
                blocks += [{**place, "layer": str(layer), "debiased": value} for layer, value in enumerate(same)]
        return blocks, pairs


@dataclass
class Cka:
    """Streaming linear CKA of student against teacher states, one Comparison for each context.

    Source: PR-OPD Fig. 6 (linear CKA, dissimilarity 1 - CKA by layer under the skill and under controls).
    Departures: the paper names neither the rows nor an estimator. Rows are all response tokens of all contexts' pairs;
    plug-in and unbiased values stand side by side, with a version without massive coordinates. Layer-by-layer values
    and those without each of 20 blocks of tasks are of at most 1280 rows, drawn uniformly: they estimate the same
    quantity as the values of all rows (and equal them where all rows fit), but the draw adds to their spread, so that
    an interval made from them errs to the wide side.
    """

    seed: int
    blocks: Mapping[str, int]  # task -> block
    spread: Spread = field(default_factory=Spread)
    comparisons: dict[str, Comparison] = field(default_factory=dict)

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds student states to the spread that all contexts are shifted and trimmed by."""
        assert passed.student_states is not None, "CKA needs states"
        self.spread.add(passed.student_states.detach())

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds a batch of pairs of one context. Raises ValueError on a pair without a teacher context."""
        if not bool(passed.has_teacher.all()):
            raise ValueError("CKA got a pair without a teacher context; leave out what build_pairs could not pair")
        if not pairs:
            return
        assert passed.student_states is not None and passed.teacher_states is not None, "CKA needs states"
        context = pairs[0].context
        if context not in self.comparisons:
            spread = self.spread if self.spread.n else None
            self.comparisons[context] = Comparison(spread, spread)
        rows = row_keys(pairs, self.seed), row_blocks(pairs, self.blocks)
        self.comparisons[context].add(passed.student_states.detach(), passed.teacher_states, *rows)

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """Tables `measurements` (same-layer values, counts), `cka_blocks` and `cka_map` (of the sample)."""
        return comparison_tables(self.comparisons, self.seed, provenance)


def comparison_tables(comparisons: Mapping[str, Comparison], seed: int, provenance: Provenance) -> dict[str, pa.Table]:
    """Tables `measurements`, `cka_blocks` and `cka_map` of comparisons by context; the seed is the null's."""
    rows: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    source = {**asdict(provenance), "token_class": "all"}
    for context, comparison in comparisons.items():
        values = comparison.values(torch.Generator().manual_seed(seed))
        rows += [measurement(**source, context=context, **value) for value in values]
        for table, found in zip((blocks, pairs), comparison.pairwise(), strict=True):
            table += [{"context": context, **row} for row in found]
    return {
        "measurements": to_table(rows, MEASUREMENT_COLUMNS),
        "cka_blocks": to_table(blocks, BLOCK_COLUMNS),
        "cka_map": to_table(pairs, MAP_COLUMNS),
    }


def task_blocks(tasks: Sequence[str], seed: int, count: int = BLOCKS) -> dict[str, int]:
    """Tasks dealt at random into `count` blocks of nearly equal size; fewer where there are fewer tasks."""
    names = np.random.default_rng(seed).permutation(sorted(set(tasks)))
    return {str(name): index * min(count, len(names)) // len(names) for index, name in enumerate(names)}


def row_keys(pairs: Sequence[PairedSegment], seed: int) -> Float[np.ndarray, "M"]:
    """A random number of each response token, the same in every context, batch and reading of it."""
    segments = [[seed, zlib.crc32(pair.trajectory_id.encode()), int(pair.turn.max(initial=0))] for pair in pairs]
    drawn = [np.random.default_rng(key).random(len(p.response_ids)) for key, p in zip(segments, pairs, strict=True)]
    return np.concatenate(drawn)


def row_blocks(pairs: Sequence[PairedSegment], blocks: Mapping[str, int]) -> Int[np.ndarray, "M"]:
    """The block of each response token's task."""
    return np.concatenate([np.full(len(pair.response_ids), blocks[pair.task_id]) for pair in pairs])


def _row(layer: str, name: str, value: float, unit: str) -> dict[str, Any]:
    return {"layer": layer, "metric": f"cka/{name}", "value": float(value), "unit": unit}


def start(subject: Subject) -> Cka:
    """The stream over a subject's trajectories."""
    return Cka(subject.seed, task_blocks([trajectory.task_id for trajectory in subject.trajectories], subject.seed))


MEASURE = Measure("cka", Needs(states=True, prepare=True), start)
