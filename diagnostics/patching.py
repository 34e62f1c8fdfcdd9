"""Causal patching: the teacher's state of one block put into the student's run, and what that does to the action.

The student never reads the skill; all it gets is the teacher's residual stream behind block l, at some response
positions. If the action moves towards the teacher's, that state carries what the skill told; the control is a random
direction of the same length.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from diagnostics.artifact import to_table
from diagnostics.capture.hf import decoder_blocks
from diagnostics.forward import reading_mode
from diagnostics.logit_lens import Said, logit_lens, said
from diagnostics.measure import Measure, Needs, Subject
from diagnostics.paired import PairedPass, PairedSegment, run_pairs
from diagnostics.progress import progress
from diagnostics.records import MEASUREMENT_COLUMNS, Provenance, TokenClass, measurement

Scope = Literal["single", "up_to", "from"]

CONTEXT = "own_skill"
DRAWS = 2  # random directions a segment, block and set of positions; the segments add up to many
# Where a patch stands -> scopes that can differ there, see `patched_runs`
POSITIONS: dict[str, tuple[Scope, ...]] = {
    "action": ("single",),
    "all": ("single",),
    "thought": ("single", "up_to", "from"),
}
_PLACE = {"context": "string", "trajectory": "string", "task": "string", "segment": "int64"}
PATCHING_COLUMNS = {
    **_PLACE,
    "positions": "string",  # "action", "all", "thought" (what stands before the action)
    "scope": "string",  # "single": block l; "up_to": 0 .. l; "from": l .. L-1
    "source": "string",  # "teacher", "random"
    "draw": "int64",
    "layer": "string",
    "tokens": "int64",  # of the action
    "student_logprob": "float64",  # nats, of the whole action
    "teacher_logprob": "float64",
    "patched_logprob": "float64",
    "differ": "int64",  # action tokens where student and teacher have another greedy token
    "turned": "int64",  # of these, those where the patched run has the teacher's
    "lost": "int64",  # of the others, those where the patched run no longer has it
}
LENS_COLUMNS = {
    **_PLACE,
    "branch": "string",  # "student", "teacher"
    "layer": "string",
    "token": "int64",  # place in the action, 0: the first
    "logprob": "float64",  # nats, of the teacher's greedy token
    "rank": "int64",  # 1: the most probable
}


def patched_runs(
    model: Any,
    ids: Int[Tensor, "T"],
    at: Int[Tensor, "P"],
    runs: Sequence[tuple[Scope, Float[Tensor, "L P D"]]],
    read: Int[Tensor, "K"],
    temperature: float = 1.0,
) -> list[Said]:
    """What the student says when the residual stream behind block l is replaced at some positions, for every l.

    h_k[at] = states_k for the blocks k = l (single), k <= l (up_to) or k >= l (from); the blocks above go on from there
    Source: activation patching (Vig et al. 2020; Meng et al. 2022); its form for privileged contexts ours.
    Args: at, ascending positions whose state is replaced; runs, each a scope and the states [L, P, D] to put in, one
    for each block and position; read, ascending positions OF the tokens whose log-prob is read (the state paired with
    token t stands at t - 1).
    Returns: [L, K] for each run; rank and greedy token of the patched distributions beside the log-probs.
    Departures: what stands before the first patched position is read once and kept as keys and values, and the batch
    starts as one row that opens the run of every block where it begins to differ: half the work of full runs. At the
    patched positions themselves `up_to` equals `single` as long as no position between them is left out (the stream
    behind block l is the same), and `from` gives the teacher's own log-probs; both tell something new only of tokens
    that are read behind the patched positions.
    """
    blocks = decoder_blocks(model)
    places = torch.cat([at, read - 1])
    start, stop = int(places.min()), int(places.max()) + 1
    positions = torch.arange(start, stop, device=ids.device)[None]
    prefix: Any = DynamicCache(config=model.config)
    if start:
        model.base_model(ids[None, :start], past_key_values=prefix, use_cache=True)
    results = []
    for scope, states in runs:
        cache = deepcopy(prefix)
        for index in range(len(blocks) if start else 0):
            cache.layers[index].batch_repeat_interleave(1 + index)  # rows that reach block `index`
        with _patches(blocks, at - start, states, scope):
            output = model.base_model(
                ids[None, start:stop], position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state
        final = output[1:, read - 1 - start]
        results.append(said(model, final, ids[read].expand(final.shape[:2]), temperature))
    return results


@contextmanager
def _patches(blocks: nn.ModuleList, at: Tensor, states: Tensor, scope: Scope) -> Iterator[None]:
    """Hooks under which block l adds a row to the batch, patched by the scope; row 1 + l is the run of block l."""

    def patched(rows: Tensor, layer: int) -> Tensor:
        rows = rows.clone()
        rows[:, at] = states[layer].to(rows.dtype)
        return rows

    def leaving(layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> Any:
            hidden = output if isinstance(output, Tensor) else output[0]  # older blocks return a tuple
            trunk, opened = hidden[:1], hidden[1:]
            if scope == "single":  # the first row stays as it is
                rows = [trunk, opened, patched(trunk, layer)]
            elif scope == "up_to":  # the first row is patched behind every block so far
                trunk = patched(trunk, layer)
                rows = [trunk, opened, trunk]
            else:  # every row opened so far is patched again
                rows = [trunk, patched(torch.cat([opened, trunk]), layer)]
            hidden = torch.cat(rows)
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return hook

    handles = [block.register_forward_hook(leaving(layer)) for layer, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def random_states(
    student: Float[Tensor, "L P D"], teacher: Float[Tensor, "L P D"], generator: torch.Generator
) -> Float[Tensor, "L P D"]:
    """The student's states moved as far as the teacher's lie, each in a random direction: h_S + |h_T - h_S| u.

    Source: ours. Args: generator, on the CPU. Returns: u uniform on the sphere, one for each block and position.
    """
    direction = torch.randn(student.shape, generator=generator).to(student)
    distance = torch.linalg.vector_norm(teacher - student, dim=-1, keepdim=True)
    return student + distance * torch.nn.functional.normalize(direction, dim=-1)


def position_sets(token_class: Int[np.ndarray, "M"]) -> dict[str, Int[np.ndarray, "P"]]:
    """Response tokens before which a patch stands: `action`; `thought`, all before the action; `all`, both.

    Tokens behind the action are left out of each: nothing of the action depends on them. Sets may be empty.
    """
    action = np.flatnonzero(token_class == TokenClass.ACTION)
    until = int(action[-1]) + 1 if len(action) else 0
    first = int(action[0]) if len(action) else 0
    return {"action": action, "all": np.arange(until), "thought": np.arange(first)}


def direct(subject: Subject, pairs: Mapping[str, list[PairedSegment]], provenance: Provenance) -> dict[str, pa.Table]:
    """Patches every segment of one context (own_skill, or the first given where it is not among them).

    Returns: tables `patching` (one row for each segment, position set, scope, source, draw and block; log-probs and
    greedy tokens are those of the action's own tokens, teacher-forced), `logit_lens` (one row for each segment,
    branch, block and action token), and `measurements` (segments left out: those without an action).
    Cost: 5 forwards a segment of one row (two branches, and for each set of positions what stands before it), then 11
    (5 with the teacher's states, 3 with each of 2 draws) of half a row for every block, from the first patched position
    to the end of the action.
    """
    context = CONTEXT if CONTEXT in pairs else next(iter(pairs))
    patched, lens = [], []
    left_out = 0
    with progress("patching", len(pairs[context])) as report, reading_mode(subject.model, False):
        for index, pair in enumerate(pairs[context]):
            sets = position_sets(pair.token_class)
            if len(sets["action"]):
                place = {"context": context, "trajectory": pair.trajectory_id, "task": pair.task_id, "segment": index}
                passed = _read(subject, pair)
                patched += [{**place, **row} for row in _segment_rows(subject, pair, passed, sets)]
                lens += [{**place, **row} for row in _lens_rows(subject, passed, sets["action"])]
            else:
                left_out += 1
            report(index + 1)
    source = asdict(provenance)
    count = measurement(**source, context=context, metric="patching/left_out/no_action", value=left_out, unit="turns")
    return {
        "patching": to_table(patched, PATCHING_COLUMNS),
        "logit_lens": to_table(lens, LENS_COLUMNS),
        "measurements": to_table([count], MEASUREMENT_COLUMNS),
    }


def _read(subject: Subject, pair: PairedSegment) -> PairedPass:
    def greedy(logprobs: Tensor) -> Tensor:
        return logprobs.argmax(-1)

    return run_pairs(
        subject.model, [pair], temperature=subject.temperature, states="before", outputs={"greedy": greedy}
    )


def _segment_rows(
    subject: Subject, pair: PairedSegment, passed: PairedPass, sets: Mapping[str, np.ndarray]
) -> Iterator[dict[str, Any]]:
    assert passed.student_states is not None and passed.teacher_states is not None
    assert passed.teacher_logprobs is not None
    device = passed.row.device
    ids, positions = (
        torch.from_numpy(x.astype(np.int64)).to(device) for x in (pair.student_ids, pair.student_positions)
    )
    action = torch.from_numpy(sets["action"]).to(device)
    wanted = passed.teacher_outputs["greedy"][action]
    same = passed.student_outputs["greedy"][action] == wanted
    branches = {
        "tokens": len(action),
        "student_logprob": float(passed.student_logprobs[action].double().sum()),
        "teacher_logprob": float(passed.teacher_logprobs[action].double().sum()),
        "differ": int((~same).sum()),
    }
    generator = torch.Generator().manual_seed(
        zlib.crc32(f"{subject.seed} {pair.trajectory_id} {pair.turn[0]}".encode())
    )
    for name, scopes in POSITIONS.items():
        chosen = torch.from_numpy(sets[name]).to(device)
        if not len(chosen):
            continue
        at = positions[chosen] - 1
        student, teacher = passed.student_states[:, chosen], passed.teacher_states[:, chosen]
        runs = [(scope, "teacher", 0, teacher) for scope in scopes]
        runs += [("single", "random", draw, random_states(student, teacher, generator)) for draw in range(DRAWS)]
        asked = [(scope, states) for scope, _, _, states in runs]
        answers = patched_runs(subject.model, ids, at, asked, positions[action], subject.temperature)
        for (scope, source, draw, _), answer in zip(runs, answers, strict=True):
            now = answer.greedy == wanted
            for layer, logprobs in enumerate(answer.logprob.double().sum(-1).tolist()):
                yield {
                    "positions": name,
                    "scope": scope,
                    "source": source,
                    "draw": draw,
                    "layer": str(layer),
                    **branches,
                    "patched_logprob": logprobs,
                    "turned": int((now[layer] & ~same).sum()),
                    "lost": int((~now[layer] & same).sum()),
                }


def _lens_rows(subject: Subject, passed: PairedPass, chosen: np.ndarray) -> Iterator[dict[str, Any]]:
    action = torch.from_numpy(chosen).to(passed.row.device)
    wanted = passed.teacher_outputs["greedy"][action]
    for branch, states in (("student", passed.student_states), ("teacher", passed.teacher_states)):
        assert states is not None
        seen = logit_lens(subject.model, states[:, action], wanted, subject.temperature)
        for layer, (logprobs, ranks) in enumerate(zip(seen.logprob.tolist(), seen.rank.tolist(), strict=True)):
            for token, (logprob, rank) in enumerate(zip(logprobs, ranks, strict=True)):
                yield {"branch": branch, "layer": str(layer), "token": token, "logprob": logprob, "rank": rank}


MEASURE = Measure("patching", Needs(), direct=direct)
