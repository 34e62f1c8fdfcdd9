"""What the diagnostics cost, against bare forward passes and against what one would use instead.

    python benchmarks/diagnostics.py [--quick] [--model smollm2-135m] [--episodes 8] [--out FILE]

reading   change rates, same-layer CKA moments and probe features together, over expert episodes in four contexts, as
          `undertow diagnose` reads them (its probe fits and the tables at its end are left out). Bare: the same
          forwards over the same padded batches, decoder without a mask, head at the response tokens alone, logits
          thrown away. The first pass over 32 students is counted as it weighs in 60 episodes. In the second row the
          bare passes read each student once, though `unrelated` has to be over before the others begin.
capture   benchmarks/capture.py: the fastest and the thriftiest of Hugging Face's output_hidden_states, nnsight's trace
          and TransformerLens' run_with_cache.
probes    one layer under the whole protocol against a loop over scikit-learn's LogisticRegression, as exact as ours
          (tol 1e-8) and at its own tolerance (1e-4, an inexact optimum). Of the loop one control label and a few
          permutations are timed and counted as often as they occur.
CKA       moments of n and 4n rows in a stream, against the Gram matrices of all n rows.

Times are CPU seconds of one thread, so that a busy machine matters little, A and B in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks import capture

EPISODES = 60  # among which the first pass is counted
CONTEXTS = (("unrelated",), ("own_skill", "other_skill", "shuffled"))  # passes, as diagnose makes them
MEASURES = ("change", "cka", "probe")
BATCH_TOKENS = 4096
EXACT, DEFAULT = 1e-8, 1e-4  # tolerances of scikit-learn's solver


class Clock:
    """CPU and wall seconds by name."""

    def __init__(self) -> None:
        self.cpu: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[name] += time.process_time() - cpu
        self.wall[name] += time.perf_counter() - wall


def row(what: str, ours: float, theirs: float, unit: str, target: str = "") -> dict[str, Any]:
    """Target: "<= x" of ours over theirs, or ">= x" of theirs over ours."""
    ratio = ours / theirs if target.startswith("<=") else theirs / ours
    bar = float(target[2:]) if target else None
    met = None if bar is None else ratio <= bar if target.startswith("<=") else ratio >= bar
    return {"what": what, "ours": ours, "theirs": theirs, "unit": unit, "ratio": ratio, "target": target, "met": met}


def episodes(tokenizer: Any, count: int) -> tuple[list[Any], dict[str, str]]:
    """Household games played by the expert, and what each episode teaches."""
    from training.envs.alfworld import AlfworldEnv
    from training.envs.games import load_tasks
    from training.envs.household import generate
    from training.expert_play import expert_episodes, expert_skills

    with tempfile.TemporaryDirectory() as scratch:
        data = generate(Path(scratch), sizes={"train": count, "valid_seen": 0, "valid_unseen": 0})
        tasks = load_tasks(data, "train")
        played = expert_episodes(AlfworldEnv(), tasks, tokenizer, seed=0, attempts=1, max_context=2048)
    return played, {name: skill.text for name, skill in expert_skills(played).items()}


def bare(model: Any, contexts: Sequence[Any], width: int) -> None:
    """One forward: the decoder over all tokens, the head at those before the response."""
    from diagnostics.forward import LOGIT_ELEMENTS

    ids = np.zeros((len(contexts), width), np.int64)
    for index, context in enumerate(contexts):
        ids[index, : len(context.ids)] = context.ids
    rows = np.repeat(np.arange(len(contexts)), [len(context.positions) for context in contexts])
    before = np.concatenate([context.positions for context in contexts]) - 1
    with torch.no_grad():
        states = model.base_model(torch.from_numpy(ids), use_cache=False).last_hidden_state
        for piece in states[torch.from_numpy(rows), torch.from_numpy(before)].split(
            LOGIT_ELEMENTS // model.config.vocab_size
        ):
            model.get_output_embeddings()(piece)


def reading(name: str, count: int) -> list[dict[str, Any]]:
    from diagnostics.beside import run_beside
    from diagnostics.contexts import contexts_for
    from diagnostics.measure import Subject, merged
    from diagnostics.measures import measures
    from diagnostics.paired import build_pairs, run_pairs, student_context, teacher_context
    from diagnostics.run import _batches, _beside
    from diagnostics.subsets import PREPARED, prepared_segments
    from training.models.load import load_policy

    model, tokenizer = load_policy(name)
    played, skills = episodes(tokenizer, count)
    order = [context for contexts in CONTEXTS for context in contexts]
    texts = contexts_for(tokenizer, played, skills, order, 0)
    segments = [(trajectory, segment) for trajectory in played for segment in trajectory.segments]
    limit = model.config.max_position_embeddings
    pairs = {name: build_pairs(tokenizer, segments, texts[name], name, limit, True)[0] for name in order}
    chosen = measures(MEASURES)
    needs = merged([measure.needs for measure in chosen])
    subject = Subject(model, tokenizer, played, skills, 0, 1.0, {})
    streams = [measure.start(subject) for measure in chosen if measure.start is not None]
    states: dict[str, Any] = {"states": "before"}
    options = {**states, "extra_layers": needs.extra_layers, "outputs": needs.outputs, "divergence": needs.divergence}
    clock, turn, tokens = Clock(), 0, 0
    students, _ = build_pairs(tokenizer, prepared_segments(segments), None, "none", limit)

    def first_pass() -> None:
        for batch in _batches([len(pair.student_ids) for pair in students], BATCH_TOKENS):
            some = [students[index] for index in batch]
            passed = run_pairs(model, some, teacher=False, **states)
            for stream in streams:
                stream.prepare(some, passed)

    def ours(beside: dict[str, list[Any]]) -> None:
        with clock("ours"):
            for context, passed in run_beside(model, beside, **options):
                for stream in streams:
                    stream.update(beside[context], passed)

    def theirs(beside: dict[str, list[Any]], again: bool) -> None:
        read = [student_context(pair) for pair in next(iter(beside.values()))]
        teachers = [[teacher_context(pair) for pair in some] for some in beside.values()]
        width = max(len(context.ids) for contexts in [read, *teachers] for context in contexts)
        with clock("student again" if again else "bare"):
            bare(model, read, width)
        for contexts in teachers:
            with clock("bare"):
                bare(model, contexts, width)

    with torch.no_grad(), clock("first pass"):
        first_pass()
    for again, contexts in enumerate(CONTEXTS):
        for beside in _beside(pairs, contexts, BATCH_TOKENS):
            steps = [partial(ours, beside), partial(theirs, beside, bool(again))]
            for step in steps[:: 1 if turn % 2 else -1]:
                step()
            turn += 1
            tokens += sum(len(pair.response_ids) for some in beside.values() for pair in some)
            print(f"\rreading: {tokens} response tokens", end="", file=sys.stderr)
    print(file=sys.stderr)
    scale = PREPARED / EPISODES * len(segments) / len(students) if len(segments) < EPISODES else 1.0
    rows = []
    for kind, seconds in (("CPU", clock.cpu), ("wall", clock.wall)):
        spent = seconds["ours"] + scale * seconds["first pass"]
        every = seconds["bare"] + seconds["student again"]
        judged = kind == "CPU"
        rows.append(row(f"reading, the same forwards bare, {kind}", spent, every, "s", "<= 1.5" if judged else ""))
        rows.append(row(f"reading, each student bare once, {kind}", spent, seconds["bare"], "s", "<= 1.5" * judged))
    for each in rows:
        each["ratio"] = each["ours"] / each["theirs"]
    return rows


def captures(name: str, sizes: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    found = capture.compare(name, sizes, rounds)
    ours, *peers = found
    fastest, thriftiest = (min(peers, key=lambda peer: peer[key]) for key in ("time_ratio", "memory_ratio"))
    time_, memory = capture.BARS["time"], capture.BARS["memory"]
    rows = [
        row(f"capture, {fastest['what']}", ours["seconds"], fastest["seconds"], "s", f">= {time_}"),
        row(f"capture, {thriftiest['what']}", ours["peak_mb"], thriftiest["peak_mb"], "MB", f">= {memory}"),
    ]
    rows[0]["ratio"] = fastest["time_ratio"]  # median of the rounds' ratios
    rows[0]["met"] = rows[0]["ratio"] >= time_
    return rows


def probes(n_tasks: int, turns: int, width: int, permutations: int, timed: int) -> list[dict[str, Any]]:
    """Own against other skills planted in `width` features of `turns` turns of one episode of each task."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    from diagnostics.logistic import Scaler, fit_logistic
    from diagnostics.probe import CONTROLS
    from diagnostics.probe_labels import Labels, shuffled, split
    from diagnostics.probe_readers import GRID, held_out
    from diagnostics.records import Trajectory

    rng = np.random.default_rng(0)
    unit = np.tile(np.repeat(np.arange(n_tasks), turns), 2)
    value = np.repeat([0, 1], n_tasks * turns)
    plays = tuple(
        Trajectory(f"t{i}", f"task {i}", *[""] * 4, *[0] * 4, (), (), 0.0, False, "done", "") for i in range(n_tasks)
    )
    labels = Labels("own_skill", ("other", "own"), value, np.arange(len(value)), unit, unit, plays, True)
    noise = rng.standard_normal((n_tasks, width))[unit] + rng.standard_normal((len(value), width))
    x = noise + 0.2 * value[:, None] * rng.standard_normal(width)
    folds = split(labels, rng)
    tuned = 1 + CONTROLS
    values = np.stack([value] + [shuffled(labels, folds.outer, rng) for _ in range(CONTROLS + permutations)], 1)
    clock = Clock()
    with clock("ours"):
        reading = held_out(torch.from_numpy(x), values, 2, folds, tuned)

    def fit(rows: np.ndarray, target: np.ndarray, c: float, tolerance: float) -> Any:
        return LogisticRegression(C=c, tol=tolerance, max_iter=10_000).fit(rows, target)

    def loop(name: str, column: int, given: bool, tolerance: float) -> np.ndarray:
        right = np.empty(len(value))
        for fold, inner in enumerate(folds.inner):
            train = folds.outer != fold
            with clock(name):
                z, target = StandardScaler().fit(x[train]).transform(x), values[:, column]
                losses = np.zeros(len(GRID))
                for index, part in np.ndindex(0 if given else len(GRID), inner.max() + 1):
                    rows, rest = train & (inner != part), inner == part
                    scores = fit(z[rows], target[rows], GRID[index], tolerance).decision_function(z[rest])
                    losses[index] += np.logaddexp(0, np.where(target[rest], -1, 1) * scores).sum()
                c = reading.chosen[fold, 0] if given else GRID[losses.argmin()]
                right[~train] = fit(z[train], target[train], c, tolerance).predict(z[~train]) == target[~train]
        return right

    seconds, answers = {}, np.empty(0)
    for tolerance in (EXACT, DEFAULT):
        names = [f"{part} {tolerance}" for part in ("label", "control", "permutation")]
        right = loop(names[0], 0, False, tolerance)
        answers = right if tolerance == EXACT else answers
        loop(names[1], 1, False, tolerance)
        for column in range(tuned, tuned + timed):
            loop(names[2], column, True, tolerance)
        times = [clock.cpu[name] for name in names]
        seconds[tolerance] = times[0] + CONTROLS * times[1] + permutations / timed * times[2]
    train = folds.outer != 0
    rows = torch.from_numpy(x[train])
    z, sign = Scaler.fit(rows)(rows), np.where(value[train], 1, -1)
    found = fit_logistic(
        z, torch.from_numpy(value[train] == 1)[:, None].expand(-1, len(GRID)), torch.tensor(GRID).double()
    )
    apart = 0.0
    for index, c in enumerate(GRID):
        model = fit(z.numpy(), value[train], c, EXACT)
        best = c * np.logaddexp(0, -sign * model.decision_function(z.numpy())).sum() + (model.coef_**2).sum() / 2
        apart = max(apart, float(abs(found.objective[index] / best - 1)))
    differ = float((reading.credit[:, 0] != answers).mean())
    print(f"probes: {len(value)} x {width}, answers that differ {differ:.2%}, unconverged {reading.unconverged}")
    return [
        row("probes, scikit-learn to the same optimum", clock.cpu["ours"], seconds[EXACT], "s", ">= 10"),
        row("probes, scikit-learn at its own tolerance", clock.cpu["ours"], seconds[DEFAULT], "s"),
        row("probes, objective off scikit-learn's", apart, 1e-6, "relative", "<= 1"),
    ]


def cka(n: int, width: int) -> list[dict[str, Any]]:
    from diagnostics.similarity import Moments, unbiased_hsic

    def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for _ in range(count // 100):
            x = torch.randn(100, width, generator=generator)
            yield x, x + torch.randn(100, width, generator=generator)

    def moments(count: int) -> float:
        shift, drop = torch.zeros(1, width), torch.zeros(1, width, dtype=torch.bool)
        stream = Moments(shift, shift, drop, drop)
        for x, y in batches(count):
            stream.add(x[None], y[None])
        return stream.similarity(0).debiased

    def grams(count: int) -> float:
        sides = [torch.cat(side).double() for side in zip(*batches(count), strict=True)]
        k, m = (centred @ centred.T for centred in (side - side.mean(0) for side in sides))
        return unbiased_hsic(k, m) / (unbiased_hsic(k, k) * unbiased_hsic(m, m)) ** 0.5

    def measured(function: Any, count: int) -> tuple[float, float, float]:
        before = capture.kilobytes("VmRSS")
        capture.RESET.write_text("5")
        started = time.process_time()
        value = function(count)
        return time.process_time() - started, (capture.kilobytes("VmHWM") - before) / 1024, value

    moments(200)
    # the large ones last: what they free may be used again
    (_, small, _), (ours, large, streamed), (theirs, gram, plain) = (
        measured(*each) for each in ((moments, n), (moments, 4 * n), (grams, 4 * n))
    )
    assert abs(streamed - plain) < 1e-9, f"moments {streamed} and Grams {plain} differ"
    return [
        row(f"CKA, peak of {4 * n} rows over that of {n}", max(large, 1.0), max(small, 1.0), "MB", "<= 1.25"),
        row(f"CKA, memory of the Grams of {4 * n} rows", max(large, 1.0), gram, "MB"),
        row(f"CKA, time of the Grams of {4 * n} rows", ours, theirs, "s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the tiny policy and small sizes: under a minute")
    parser.add_argument("--model", default=None, help="a name or a folder (smollm2-135m; with --quick tiny)")
    parser.add_argument("--episodes", type=int, default=None, help="that are read (8; with --quick 4)")
    parser.add_argument("--only", choices=("reading", "capture", "probes", "cka"), help="one part")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/diagnostics.json"))
    args = parser.parse_args()
    if not capture.RESET.exists():
        parser.error("peak memory is read from /proc, which this system has not")
    torch.set_num_threads(1)
    quick = args.quick
    name = args.model or ("tiny" if quick else "smollm2-135m")
    parts = {
        "cka": lambda: cka(*((500, 160) if quick else (1500, 576))),  # first: what memory is used anew is known then
        "reading": lambda: reading(name, args.episodes or (4 if quick else 8)),
        "capture": lambda: captures(name, (4, 256, 64) if quick else (4, 512, 160), 3),
        "probes": lambda: probes(*((20, 4, 64, 49, 5) if quick else (60, 8, 576, 199, 5))),
    }
    rows: list[dict[str, Any]] = []
    for part, measured in parts.items():
        rows += measured() if args.only in (None, part) else []
    print(f"{'':44}{'ours':>10}{'theirs':>10} {'unit':9}{'ratio':>7}{'target':>9}  met")
    for each in rows:
        met = {True: "yes", False: "NO", None: ""}[each["met"]]
        figures = f"{each['ours']:10.3g}{each['theirs']:10.3g} {each['unit']:9}{each['ratio']:7.2f}"
        print(f"{each['what']:44}{figures}{each['target']:>9}  {met}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial")
    settings = {"model": name, "quick": quick, "batch_tokens": BATCH_TOKENS}
    partial.write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, args.out)


if __name__ == "__main__":
    main()
