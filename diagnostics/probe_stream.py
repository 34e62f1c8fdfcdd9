"""Features of every turn for the probes, gathered in a stream, and the tables of what the probes read from them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from diagnostics.artifact import to_table
from diagnostics.derangement import other_sources, task_groups
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.paired import PairedPass, PairedSegment
from diagnostics.probe import Probe, probe
from diagnostics.probe_labels import Labels, NotEstimable, own_labels, student_labels
from diagnostics.probe_readers import Reader, components
from diagnostics.progress import progress
from diagnostics.records import Provenance

CONTEXTS = ("own_skill", "other_skill")  # whose teacher branch is read
TOP = 64
SKETCH = 4096  # numbers of a turn's full log-probs that are kept; all of them for a smaller vocabulary
PROJECTION = 256
FLOOR = -100.0  # nats; a head that masks ids gives them -inf, which has no mean
_FIXED = 20260  # seed of the sketch and the projection: the same for every model of a vocabulary

PROBE_COLUMNS = {
    "labels": "string",
    "features": "string",  # "hidden" by layer; an output feature; "turn_index"; "" where nothing is estimable
    "layer": "string",
    "branch": "string",  # "teacher", under own and other skills, or "student"
    "accuracy": "float64",
    "balanced_accuracy": "float64",
    "majority": "float64",  # accuracy of the most frequent answer
    "control_accuracy": "float64",
    "null_low": "float64",  # 2.5 and 97.5 % of the balanced accuracy under permuted labels
    "null_high": "float64",
    "p": "float64",
    "p_max": "float64",
    "c_low": "float64",  # smallest and largest choice over the outer folds; weight decay for the network
    "c_high": "float64",
    "n_unconverged": "int64",  # fits
    "n_samples": "int64",
    "n_trajectories": "int64",
    "n_tasks": "int64",
    "n_groups": "int64",
    "n_left_out": "int64",  # turns with a value that is not finite
    "not_estimable": "string",  # the reason, "" for a number
}
CLASS_COLUMNS = {"labels": "string", "class": "string", "n_samples": "int64", "n_trajectories": "int64"}
CLASS_COLUMNS |= {"n_tasks": "int64"}
TRAJECTORY_COLUMNS = {"labels": "string", "features": "string", "layer": "string", "trajectory": "string"}
TRAJECTORY_COLUMNS |= {"task": "string", "group": "int64", "n": "int64", "correct": "float64"}
TRAJECTORY_COLUMNS |= {"control_correct": "float64"}

_Key = tuple[str, int]  # trajectory, turn
_Turn = dict[str, np.ndarray]  # features by name


def top_logprobs(logprobs: Float[Tensor, "m V"]) -> Float[Tensor, "m k"]:
    """The 64 largest log-probs in falling order: the shape of the distribution, not which tokens it favours."""
    return logprobs.topk(min(TOP, logprobs.shape[-1])).values.clamp(min=FLOOR)


def sketch(logprobs: Float[Tensor, "m V"]) -> Float[Tensor, "m k"]:
    """The full log-probs in at most 4096 numbers: sums over ids 4096 apart, each id with its own random sign.

    Inner products are kept without bias, to about |x| |y| / 64 (one standard deviation).
    Source: count sketch (Charikar, Chen & Farach-Colton 2002) with fixed buckets. Departures: PCA and projection of
    "the full log-probs" read this sketch; up to 4096 ids it is the log-probs themselves. No log-prob is below -100.
    """
    size, logprobs = logprobs.shape[-1], logprobs.clamp(min=FLOOR)
    if size <= SKETCH:
        return logprobs
    signed = logprobs * _signs(size).to(logprobs)
    return torch.nn.functional.pad(signed, (0, -size % SKETCH)).unflatten(-1, (-1, SKETCH)).sum(-2)


@lru_cache(maxsize=2)
def _signs(size: int) -> Tensor:
    return torch.randint(2, (size,), generator=torch.Generator().manual_seed(_FIXED)) * 2 - 1


def projection(rows: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n p"]:
    """256 fixed random directions of the (sketched) log-probs, Gaussian."""
    directions = np.random.default_rng(_FIXED).standard_normal((rows.shape[1], PROJECTION))
    return rows @ directions / np.sqrt(PROJECTION)


@dataclass
class ProbeStream:
    """Means over the response tokens of each turn: memory grows with turns, not with tokens.

    One sample is one turn: under the own skill and under the other one (teacher branch), and without one (student
    branch). Sums are made in float64, means kept as float32.
    Source: PR-OPD Fig. 5; that a sample is the mean of a turn is ours.
    """

    subject: Subject
    own: dict[_Key, _Turn] = field(default_factory=dict)
    other: dict[_Key, _Turn] = field(default_factory=dict)
    student: dict[_Key, _Turn] = field(default_factory=dict)

    def prepare(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Nothing is needed in advance."""

    def update(self, pairs: Sequence[PairedSegment], passed: PairedPass) -> None:
        """Adds the turns of a batch: the teacher's under own and other skills, the student's the first time."""
        runs = [
            ((pair.trajectory_id, int(turn)), len(list(same)))
            for pair in pairs
            for turn, same in groupby(pair.turn.tolist())
        ]
        context = pairs[0].context
        if context in CONTEXTS:
            assert passed.teacher_states is not None and passed.teacher_logprobs is not None, "probes need states"
            seen = self.own if context == "own_skill" else self.other
            branch = passed.teacher_states, passed.teacher_extra, passed.teacher_logprobs, passed.teacher_outputs
            seen |= _turn_means(runs, *branch)
        if not all(key in self.student for key, _ in runs):
            assert passed.student_states is not None, "probes need states"
            branch = passed.student_states, passed.student_extra, passed.student_logprobs, passed.student_outputs
            self.student = _turn_means(runs, *branch) | self.student

    def result(self, provenance: Provenance) -> dict[str, pa.Table]:
        """Tables probe (a row for each labels and reader), probe_classes, probe_trajectories (held-out counts)."""
        trajectories = {t.id: t for t in self.subject.trajectories}
        sources = other_sources(self.subject.trajectories, self.subject.skills, self.subject.seed)
        group = task_groups(self.subject.trajectories, sources)
        both = sorted(key for key in self.own.keys() & self.other.keys() if _finite(self.own[key], self.other[key]))
        alone = sorted(key for key in self.student if _finite(self.student[key]))
        pairs = [(key, self.own[key]) for key in both] + [(key, self.other[key]) for key in both]
        students = [(key, self.student[key]) for key in alone]
        left_out = len(self.own.keys() & self.other.keys()) - len(both), len(self.student) - len(alone)

        asked = [(own_labels(both, trajectories, group), "teacher", pairs, left_out[0])]
        asked += [(labels, "student", students, left_out[1]) for labels in student_labels(alone, trajectories)]
        tables, done = _Tables(self.subject), 0
        with progress("probe", sum(len(readers_of(samples)) for _, _, samples, _ in asked)) as report:
            for labels, branch, samples, without in asked:

                def so_far(read: int, before: int = done) -> None:
                    report(before + read)

                tables.add(labels, branch, samples, without, so_far)
                report(done := done + len(readers_of(samples)))
        return {
            "probe": to_table(tables.probes, PROBE_COLUMNS),
            "probe_classes": to_table(tables.classes, CLASS_COLUMNS),
            "probe_trajectories": to_table(tables.trajectories, TRAJECTORY_COLUMNS),
        }


def _turn_means(
    runs: Sequence[tuple[_Key, int]],
    states: Float[Tensor, "L M D"],
    extra: Mapping[str, Float[Tensor, "M D"]],
    logprobs: Float[Tensor, "M"],
    outputs: Mapping[str, Tensor],
) -> dict[_Key, _Turn]:
    """Means of each run of tokens: hidden [layers, D] from embed to final_norm, and the outputs."""
    lengths = [length for _, length in runs]

    def means(values: Tensor, dim: int) -> Tensor:
        parts = values.detach().split(lengths, dim)
        return torch.stack([part.sum(dim, dtype=torch.float64) / part.shape[dim] for part in parts])

    hidden = [means(extra["embed"], 0)[:, None], means(states, 1), means(extra["final_norm"], 0)[:, None]]
    features = {
        "hidden": torch.cat(hidden, 1),
        "sampled_logprob": means(logprobs, 0)[:, None],
        "top64": means(outputs["probe/top64"], 0),
        "sketch": means(outputs["probe/sketch"], 0),
    }
    arrays = {name: values.float().cpu().numpy() for name, values in features.items()}
    return {key: {name: array[index] for name, array in arrays.items()} for index, (key, _) in enumerate(runs)}


def _finite(*turns: _Turn) -> bool:
    return all(np.isfinite(values).all() for turn in turns for values in turn.values())


def readers_of(samples: Sequence[tuple[_Key, _Turn]]) -> list[Reader]:
    """Every layer, the output features, and the number of the turn, which is what time alone gives away."""

    def load(name: str) -> np.ndarray:
        return np.stack([turn[name] for _, turn in samples])

    def load_layer(index: int) -> np.ndarray:
        return np.stack([turn["hidden"][index] for _, turn in samples])

    count = len(samples[0][1]["hidden"]) if samples else 0
    layers = ["embed", *(str(index) for index in range(count - 2)), "final_norm"] if count else []
    return [
        *(Reader("hidden", layer, partial(load_layer, index)) for index, layer in enumerate(layers)),
        Reader("sampled_logprob", "", partial(load, "sampled_logprob")),
        Reader("top64", "", partial(load, "top64")),
        Reader("projection256", "", lambda: projection(load("sketch"))),
        Reader("pca", "", partial(load, "sketch"), before=components),
        Reader("mlp", "", partial(load, "sketch"), before=components, network=True),
        Reader("turn_index", "", lambda: np.array([[float(turn)] for (_, turn), _ in samples])),
    ]


class _Tables:
    """The rows of the result tables."""

    def __init__(self, subject: Subject) -> None:
        self.seed = subject.seed
        device = next(subject.model.parameters()).device
        self.device = device if device.type == "cuda" else torch.device("cpu")  # float64 is not on every accelerator
        self.probes: list[dict[str, Any]] = []
        self.classes: list[dict[str, Any]] = []
        self.trajectories: list[dict[str, Any]] = []

    def add(
        self,
        labels: Labels,
        branch: str,
        samples: Sequence[tuple[_Key, _Turn]],
        left_out: int,
        report: Callable[[int], object],
    ) -> None:
        """Probes one set of labels with every reader; a set that cannot be probed is one row with the reason.

        Args: report, called with the number of readers that are done.
        """
        counts = np.bincount(labels.value, minlength=len(labels.classes))
        common = {
            "labels": labels.name,
            "branch": branch,
            "majority": counts.max() / counts.sum() if len(labels.value) else np.nan,
            "n_samples": len(labels.value),
            "n_trajectories": len(labels.trajectories),
            "n_tasks": len(np.unique(labels.task)),
            "n_groups": len(np.unique(labels.group)),
            "n_left_out": left_out,
        }
        for index, kind in enumerate(labels.classes):
            mine = labels.value == index
            held = {"n_trajectories": labels.trajectory[mine], "n_tasks": labels.task[mine]}
            distinct = {name: len(np.unique(values)) for name, values in held.items()}
            self.classes.append({"labels": labels.name, "class": kind, "n_samples": int(mine.sum()), **distinct})
        rng = np.random.default_rng([self.seed, zlib.crc32(labels.name.encode())])
        try:
            probes = probe(labels, readers_of(samples), rng, self.device, report)
        except NotEstimable as reason:
            self.probes.append({**common, "features": "", "layer": "", "not_estimable": str(reason)})
            return
        for found in probes:
            self.probes.append({**common, **_row(found), "not_estimable": ""})
            self.trajectories += _counts(labels, found)


def _row(found: Probe) -> dict[str, Any]:
    low, high = np.quantile(found.null, [0.025, 0.975]) if len(found.null) else (np.nan, np.nan)
    chosen = found.reading.chosen[:, 0]
    return {
        "features": found.reader.features,
        "layer": found.reader.layer,
        "accuracy": found.accuracy,
        "balanced_accuracy": found.balanced_accuracy,
        "control_accuracy": found.control_accuracy,
        "null_low": low,
        "null_high": high,
        "p": found.p,
        "p_max": found.p_max,
        "c_low": chosen.min(),
        "c_high": chosen.max(),
        "n_unconverged": found.reading.unconverged,
    }


def _counts(labels: Labels, found: Probe) -> list[dict[str, Any]]:
    n = np.bincount(labels.trajectory)
    credit = found.reading.credit
    correct, control = (np.bincount(labels.trajectory, c) for c in (credit[:, 0], credit[:, 1:].mean(1)))
    group = dict(zip(labels.trajectory.tolist(), labels.group.tolist(), strict=True))
    return [
        {
            "labels": labels.name,
            "features": found.reader.features,
            "layer": found.reader.layer,
            "trajectory": trajectory.id,
            "task": trajectory.task_id,
            "group": group[index],
            "n": int(n[index]),
            "correct": correct[index],
            "control_correct": control[index],
        }
        for index, trajectory in enumerate(labels.trajectories)
    ]


OUTPUTS = {"probe/top64": top_logprobs, "probe/sketch": sketch}
MEASURE = Measure("probe", Needs(states=True, extra_layers=("embed", "final_norm"), outputs=OUTPUTS), ProbeStream)
