"""How alike two sets of weights think: CKA of their states over the same tokens, no skill in either's context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from diagnostics.cka import Comparison, comparison_tables, row_blocks, row_keys, task_blocks
from diagnostics.paired import PairedSegment, run_pairs
from diagnostics.records import Provenance

OTHER_WEIGHTS = "other_weights"  # in the place of a context


def compare_models(
    model: Any, other: Any, batches: Sequence[Sequence[PairedSegment]], provenance: Provenance
) -> dict[str, pa.Table]:
    """Linear CKA between the states of two models, or of two checkpoints of one, before each response token.

    Source: Kornblith et al. 2019; see diagnostics.cka. Depth and width may differ: then there is the map of layers,
    and no same-layer value. Args: batches, of segments whose student branch is read.
    Returns: tables measurements, cka_blocks, cka_map, as of the measure cka, with `other_weights` as context.
    """
    comparison = Comparison()
    blocks = task_blocks([pair.task_id for pairs in batches for pair in pairs], provenance.seed)
    for pairs in batches:
        one, two = (run_pairs(each, pairs, teacher=False, states="before").student_states for each in (model, other))
        assert one is not None and two is not None  # they were asked for
        comparison.add(one, two, row_keys(pairs, provenance.seed), row_blocks(pairs, blocks))
    return comparison_tables({OTHER_WEIGHTS: comparison}, provenance.seed, provenance)
