"""Linear probes: can a label be read from features, on tasks the reader has not seen?

One protocol for every reader and every label: outer folds of whole groups of tasks, C chosen by inner folds of whole
groups, scaler fitted on the training part, control labels under the same protocol, permuted labels for p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int

from diagnostics.probe_labels import Labels, shuffled, split
from diagnostics.probe_readers import Reader, Reading, held_out, network_held_out

CONTROLS = 3  # draws of control labels
PERMUTATIONS = 199


@dataclass(frozen=True, eq=False)
class Probe:
    """What one reader makes of one set of labels."""

    reader: Reader
    reading: Reading  # of the labels, then of each draw of control labels
    accuracy: float
    balanced_accuracy: float
    control_accuracy: float
    null: Float[np.ndarray, "P"]  # balanced accuracy under permuted labels; empty for the network
    p: float  # NaN where nothing was permuted
    p_max: float  # corrected for having looked at all layers, or at all output features


def probe(
    labels: Labels,
    readers: Sequence[Reader],
    rng: np.random.Generator,
    device: torch.device,
    report: Callable[[int], object] = lambda done: None,
) -> list[Probe]:
    """Every reader on the same labels, folds, control labels and permutations.

    accuracy = mean credit of the held-out samples; selectivity = accuracy - control accuracy; p compares the balanced
    accuracy (where classes differ in size, accuracy alone rewards an answer that never changes).
    Source: PR-OPD Fig. 5; selectivity Hewitt & Liang 2019; the protocol is ours, none is published.
    Args: device, of the solver; report, called with the number of readers that are done.
    Raises: NotEstimable with the reason.
    Departures: control labels are held out by group as all labels are, so they cannot be memorised: they stay at
    chance unless something leaks. Permutations are fitted at the C that the real labels chose in each fold.
    """
    folds = split(labels, rng)
    values = np.stack([labels.value] + [shuffled(labels, folds.outer, rng) for _ in range(CONTROLS + PERMUTATIONS)], 1)
    k, tuned, seed = len(labels.classes), 1 + CONTROLS, int(rng.integers(2**31))
    readings, balanced = [], np.full((len(readers), values.shape[1]), np.nan)
    for index, reader in enumerate(readers):
        x = torch.as_tensor(reader.load()[labels.row], dtype=torch.float64, device=device)
        if reader.network:
            reading = network_held_out(x, values[:, :tuned], k, folds, reader.before, seed)
        else:
            reading = held_out(x, values, k, folds, tuned, reader.before)
        count = reading.credit.shape[1]
        balanced[index, :count] = balanced_accuracy(reading.credit, values[:, :count], k)
        readings.append(Reading(reading.credit[:, :tuned], reading.chosen, reading.unconverged))
        report(len(readings))
    p, p_max = np.full((2, len(readers)), np.nan)
    for hidden in (True, False):
        family = [i for i, r in enumerate(readers) if (r.features == "hidden") == hidden and not r.network]
        if family:
            p[family], p_max[family] = permutation_p(balanced[family, 0], balanced[family, tuned:])
    return [
        Probe(
            reader=reader,
            reading=readings[i],
            accuracy=float(readings[i].credit[:, 0].mean()),
            balanced_accuracy=float(balanced[i, 0]),
            control_accuracy=float(readings[i].credit[:, 1:].mean()),
            null=balanced[i, tuned:] if not reader.network else np.empty(0),
            p=float(p[i]),
            p_max=float(p_max[i]),
        )
        for i, reader in enumerate(readers)
    ]


def balanced_accuracy(
    credit: Float[np.ndarray, "n J"], values: Int[np.ndarray, "n J"], n_classes: int
) -> Float[np.ndarray, "J"]:
    """Mean over classes of the share of their samples that is read right; chance is 1 / n_classes at any balance."""
    shares = []
    for kind in range(n_classes):
        mine = values == kind
        shares.append((credit * mine).sum(0) / mine.sum(0))
    return np.mean(shares, 0)


def permutation_p(
    observed: Float[np.ndarray, "F"], null: Float[np.ndarray, "F P"]
) -> tuple[Float[np.ndarray, "F"], Float[np.ndarray, "F"]]:
    """p of each of F readers, alone and corrected for having looked at all of them.

    p = (1 + number of permutations that reach the observed value) / (1 + P); corrected: that the largest of all F
    readers reaches.
    Source: Westfall & Young 1993 (single-step max statistic); Phipson & Smyth 2010 (the ones).
    Args: one label permutation in all readers is one column of `null`. Returns: p, corrected p, in (0, 1].
    """
    count = null.shape[1]
    reached = observed[:, None] - 1e-12  # sums in another order are no difference
    alone = (1 + (null >= reached).sum(1)) / (1 + count)
    return alone, (1 + (null.max(0) >= reached).sum(1)) / (1 + count)
