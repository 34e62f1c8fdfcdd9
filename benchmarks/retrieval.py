"""How often a search finds what a question needs: share of questions with a gold passage among the best, by data set.

    python benchmarks/retrieval.py [DIR] [--server URL] [--top 3] [--limit N]

DIR holds questions and passages in any form that `undertow data searchqa --from` reads (without it: the invented world,
whose questions are made to be found). The query is the question
itself, the retriever BM25 over DIR's passages or a server; asked are all questions with gold passages. `any` counts
one gold passage among the best, `all` every one of them (a question of several hops has several), with Wilson's 95 %
interval of `any`. --limit takes the first N of each data set by the hash of their ids.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.stats import wilson
from training.envs.passages import Passage
from training.envs.questions import PASSAGES, import_questions, load_questions, read_question
from training.envs.retrievers import Retriever, open_retriever
from training.envs.search_folders import fact_world_folder


def gold_found(folder: Path, retriever: Retriever, top: int, limit: int = 0) -> dict[str, list[tuple[bool, bool]]]:
    """Data set -> (one, all) of a question's gold passages among the best `top`, for each question that has any."""
    asked = defaultdict(list)
    for split in (path.name.removeprefix("questions_")[:-6] for path in sorted(folder.glob("questions_*.jsonl"))):
        for task in load_questions(folder, split):
            if gold := set(read_question(task)["gold_ids"]):
                asked[task.task_type].append((hashlib.sha256(task.id.encode()).hexdigest(), task.description, gold))
    found: dict[str, list[tuple[bool, bool]]] = {}
    for dataset, questions in sorted(asked.items()):
        hits = (_ids(retriever.search(text, top), gold) for _, text, gold in sorted(questions)[: limit or None])
        found[dataset] = list(hits)
    return found


def _ids(passages: list[Passage], gold: set[str]) -> tuple[bool, bool]:
    ids = {passage.id for passage in passages}
    return bool(gold & ids), gold <= ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="questions and passages; none: the invented world")
    parser.add_argument("--server", help="address of a retrieval server that returns our passage ids")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = fact_world_folder() if given.folder is None else Path(scratch)
        if given.folder is not None:
            import_questions(given.folder, folder)
        retriever = open_retriever(given.server or str(folder / PASSAGES), 10.0)
        begun = time.process_time()
        found = gold_found(folder, retriever, given.top, given.limit)
        spent = time.process_time() - begun
    total = sum(map(len, found.values()))
    print(f"gold passages among the best {given.top}, {given.server or 'BM25'}; {1000 * spent / total:.2f} ms a search")
    print(f"{'data set':16} {'questions':>9} {'any':>6}  {'95 %':13} {'all':>6}")
    for dataset, hits in found.items():
        one, every = (sum(column) for column in zip(*hits, strict=True))
        share = wilson(one, len(hits))
        bounds = f"{share.low:.3f}-{share.high:.3f}"
        print(f"{dataset:16} {len(hits):9} {share.estimate:6.3f}  {bounds}   {every / len(hits):6.3f}")


if __name__ == "__main__":
    main()
