"""States of every layer at the response tokens: our hooks against what one would use instead. Time and peak memory.

    python benchmarks/capture.py [--model smollm2-135m] [--rows 8] [--tokens 512] [--responses 128] [--rounds 5]

Peers run as their manuals have it, on a model of their own, each without what it does not need here: Hugging Face's
output_hidden_states and nnsight's trace on the decoder without its head, TransformerLens' run_with_cache for the
residual stream only, stopped before the head. All end with the same states at the same places, which is checked.
Each lives in a process of its own; the processes take turns, one call at a time. Times are CPU seconds of one thread,
so that a busy machine matters little; memory is the peak of the first full call above what the process held before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BARS = {"time": 1.0, "memory": 2.0}  # the fastest, and the thriftiest, peer over ours
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Batch = tuple[Any, Any, tuple[Any, Any]]  # ids [B, T], mask [B, T], (row, position) of the M places
Read = Callable[[Any, Any, tuple[Any, Any]], dict[str, Any]]


def hooks(model: Any) -> Read:
    from diagnostics.capture import capture_states

    def read(ids: Any, mask: Any, select: tuple[Any, Any]) -> dict[str, Any]:
        capture = capture_states(model, ids, mask, "all", select)
        return {**capture.states, "final_norm": capture.final}

    return read


def output_hidden_states(model: Any) -> Read:
    def read(ids: Any, mask: Any, select: tuple[Any, Any]) -> dict[str, Any]:
        states = model.base_model(ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
        names = ["embed", *(str(index) for index in range(len(states) - 2)), "final_norm"]  # it norms its last entry
        return {name: state[select] for name, state in zip(names, states, strict=True)}

    return read


def nnsight_trace(model: Any) -> Read:
    import nnsight

    traced = nnsight.NNsight(model.base_model)

    def read(ids: Any, mask: Any, select: tuple[Any, Any]) -> dict[str, Any]:
        with traced.trace(ids, attention_mask=mask, use_cache=False):
            inside = [traced.layers[0].input, *(layer.output for layer in traced.layers)]
            saved = nnsight.save([*inside, traced.output.last_hidden_state])
        names = ["embed", *(str(index) for index in range(len(saved) - 2)), "final_norm"]
        return {name: state[select] for name, state in zip(names, saved, strict=True)}

    return read


def run_with_cache(model: Any) -> Read:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    bridge = build_bridge_from_module(model, type(model).__name__, hf_config=model.config)
    count = model.config.num_hidden_layers
    points = {"embed": "blocks.0.hook_resid_pre"} | {str(i): f"blocks.{i}.hook_resid_post" for i in range(count)}
    wanted = list(points.values())

    def read(ids: Any, mask: Any, select: tuple[Any, Any]) -> dict[str, Any]:
        _, cache = bridge.run_with_cache(ids, attention_mask=mask, names_filter=wanted, stop_at_layer=count)
        return {name: cache[point][select] for name, point in points.items()}

    return read


OURS = "our hooks"
READERS: dict[str, Callable[[Any], Read]] = {
    OURS: hooks,
    "output_hidden_states": output_hidden_states,
    "nnsight trace": nnsight_trace,
    "TransformerLens run_with_cache": run_with_cache,
}


def batch(rows: int, tokens: int, responses: int, vocabulary: int) -> Batch:
    """Right-padded rows from half to all of `tokens` long; the last `responses` tokens of each are selected."""
    import torch

    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (rows, tokens), generator=chance)
    lengths = torch.randint(tokens // 2, tokens, (rows,), generator=chance)
    lengths[0] = tokens
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    places = lengths[:, None] - responses - 1 + torch.arange(responses)  # the state before a token
    return ids, mask, (torch.arange(rows).repeat_interleave(responses), places.flatten())


def kilobytes(field: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field))


def work(name: str, model: str, sizes: tuple[int, int, int], pipe: Connection) -> None:
    """A process: says it is ready, then answers each turn with its CPU seconds; the first time also with the peak
    and with what it read (each state times one fixed direction)."""
    import torch

    from training.models.load import load_policy

    torch.set_num_threads(1)
    policy, _ = load_policy(model)
    vocabulary = policy.config.vocab_size
    read, asked = READERS[name](policy), batch(*sizes, vocabulary)
    direction = torch.randn(policy.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        read(*batch(2, 8, 2, vocabulary))  # lets the library make what it makes once
        pipe.send(policy.config.num_hidden_layers)
        first = True
        while pipe.recv():
            before = kilobytes("VmRSS") if first else 0
            if first:
                RESET.write_text("5")  # the peak counts from here
            started = time.process_time()
            states = read(*asked)
            seconds = time.process_time() - started
            peak = (kilobytes("VmHWM") - before) / 1024 if first else 0.0
            seen = {layer: (state @ direction).numpy() for layer, state in states.items()} if first else {}
            pipe.send((seconds, peak, seen))
            del states
            first = False


@contextmanager
def workers(model: str, sizes: tuple[int, int, int]) -> Iterator[dict[str, Connection]]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for name in READERS:  # one after the other: they would slow each other down
        pipes[name], end = context.Pipe()
        processes.append(context.Process(target=work, args=(name, model, sizes, end)))
        processes[-1].start()
        end.close()
        pipes[name].recv()
    try:
        yield pipes
    finally:
        for pipe in pipes.values():
            pipe.send(False)
        for process in processes:
            process.join()


def compare(model: str, sizes: tuple[int, int, int], rounds: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in READERS}
    peaks, seen = {}, {}
    with workers(model, sizes) as pipes:
        for turn in range(rounds + 1):  # the first turn is for memory and for what was read
            for name, pipe in pipes.items():
                pipe.send(True)
                taken, peak, read = pipe.recv()
                if turn == 0:
                    peaks[name], seen[name] = peak, read
                else:
                    seconds[name].append(taken)
    rows = []
    for name in READERS:
        apart = max(
            float(abs(states - seen[OURS][layer]).max() / abs(seen[OURS][layer]).max())
            for layer, states in seen[name].items()
        )
        assert apart <= 1e-4, f"{name} read other states: {apart:.1e} relative"
        ratios = [theirs / ours for theirs, ours in zip(seconds[name], seconds[OURS], strict=True)]
        row = {"what": name, "seconds": statistics.median(seconds[name]), "time_ratio": statistics.median(ratios)}
        rows.append({**row, "peak_mb": peaks[name], "memory_ratio": peaks[name] / peaks[OURS], "deviation": apart})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a name or a folder")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of the longest row")
    parser.add_argument("--responses", type=int, default=128, help="tokens of a row whose states are kept")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/capture.json"))
    args = parser.parse_args()
    if not RESET.exists():
        parser.error("peak memory is read from /proc, which this system has not")
    if 2 * (args.responses + 1) > args.tokens:
        parser.error("--responses must be less than half of --tokens: rows are from half to all of --tokens long")
    rows = compare(args.model, (args.rows, args.tokens, args.responses), args.rounds)
    print(f"{'':32}{'CPU s':>9}{'ratio':>8}{'peak MB':>10}{'ratio':>8}{'deviation':>11}")
    for row in rows:
        print(
            f"{row['what']:32}{row['seconds']:9.3f}{row['time_ratio']:8.2f}{row['peak_mb']:10.1f}"
            f"{row['memory_ratio']:8.2f}{row['deviation']:11.1e}"
        )
    fastest, thriftiest = (min(row[key] for row in rows[1:]) for key in ("time_ratio", "memory_ratio"))
    print(f"fastest peer {fastest:.2f}x our time (bar {BARS['time']}), thriftiest {thriftiest:.2f}x our peak ", end="")
    print(f"(bar {BARS['memory']})")
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    partial = args.out.with_suffix(".partial")
    partial.write_text(json.dumps({**settings, "bars": BARS, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, args.out)


if __name__ == "__main__":
    main()
