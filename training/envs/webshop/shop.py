"""A shop in a folder: products by row, goals by number, the search index; built once from WebShop's own files.

    products.jsonl, rows.npy (where each line begins)   goals.jsonl   index/   shop.json (counts, sources, splits)

Workers read single products and map the index into memory, so that the full catalogue of a million products is as
easy on them as a small one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from training.envs import bm25
from training.envs.base import Task
from training.envs.webshop.goals import SPLITS, Goal, human_goals, shuffled, synthetic_goals
from training.envs.webshop.products import Product, read_attributes, read_instructions, read_products

PRODUCTS, GOALS, ROWS, INDEX, RECORD = "products.jsonl", "goals.jsonl", "rows.npy", "index", "shop.json"
FOUND = 50  # products of a search
KNOWN = 0.5  # least share of products that the attributes file must know

Wording = Literal["synthetic", "human"]


class Shop:
    """A built shop. Nothing is kept open between calls but the mapped index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows = np.load(folder / ROWS)
        self._goals = _line_starts(folder / GOALS)
        self._index = bm25.Index(folder / INDEX)
        self.product = lru_cache(1024)(self._product)
        self.search = lru_cache(256)(self._search)

    def goal(self, number: int) -> Goal:
        """Raises ValueError for a number that the shop does not have."""
        if not 0 <= number < len(self._goals):
            raise ValueError(f"{self.folder}: there are {len(self._goals)} goals, counted from 0, and no goal {number}")
        values = _line(self.folder / GOALS, int(self._goals[number]))
        attributes, options = tuple(values.pop("attributes")), tuple(values.pop("options"))
        return Goal(**values, attributes=attributes, options=options)

    def _product(self, row: int) -> Product:
        values = _line(self.folder / PRODUCTS, int(self._rows[row]))
        options = {name: tuple(found) for name, found in values.pop("options").items()}
        features, attributes = tuple(values.pop("features")), tuple(values.pop("attributes"))
        return Product(**values, features=features, attributes=attributes, options=options)

    def _search(self, query: str) -> tuple[int, ...]:
        """Rows of the products that BM25 finds, best first.

        Source: WebShop (Lucene's BM25 over the same text). Departures: words are not stemmed.
        """
        return tuple(row for row, _ in self._index.search(query, FOUND))


@lru_cache(maxsize=2)
def open_shop(folder: Path) -> Shop:
    """The shop of a folder, one for all environments of a process. Raises ValueError where there is none."""
    if not (folder / RECORD).is_file():
        raise ValueError(f"{folder} holds no shop; build one with `undertow data webshop --from DIR`")
    return Shop(folder)


def load_tasks(folder: Path, split: str) -> list[Task]:
    """All tasks of a split, in the order of their goals' numbers; the split is decided by the number alone.

    Raises: ValueError for an unknown split, or where the shop has too few goals for it.
    """
    if split not in SPLITS:
        raise ValueError(f"webshop has no split {split!r}; choose one of {', '.join(SPLITS)}")
    first, last = SPLITS[split]
    with (folder / GOALS).open(encoding="utf-8") as file:
        lines = list(file)
    if len(lines) < (last or first + 1):
        raise ValueError(f"{folder} has {len(lines)} goals, and split {split!r} needs goals {first} to {last or '...'}")
    tasks = []
    for number, line in enumerate(lines[first:last], start=first):
        goal = json.loads(line)
        name = f"goal_{number}/{goal['asin']}"
        tasks.append(Task(name, "webshop", split, goal["family"], goal["instruction"], f"{folder}#{number}"))
    return tasks


def read_goal(task: Task) -> tuple[Shop, Goal]:
    """The shop and the goal of a task. Raises ValueError when the folder has another goal now."""
    folder, _, number = task.source.rpartition("#")
    shop = open_shop(Path(folder))
    goal = shop.goal(int(number))
    if goal.instruction != task.description:
        raise ValueError(f"{task.source} is {goal.instruction!r} and not {task.description!r}; list the tasks again")
    return shop, goal


def build(source: Path, folder: Path, wording: Wording = "synthetic") -> dict[str, int]:
    """Build a shop in `folder` from a folder with WebShop's files; its numbers of products and goals.

    Args: wording: goals from the instructions of items_ins_v2*.json, one for every combination of options, or from
    those that people wrote.
    Raises: ValueError in one sentence, before anything is written, for files that are missing, broken, not WebShop's,
    or not of one another: with a foreign attribute file every reward would be wrong, for ever and in silence.
    """
    files = source_files(source, wording)
    attributes = read_attributes(files["attributes"])
    written = read_instructions(files["human"]) if wording == "human" else {}
    products = list(read_products(files["products"], attributes))
    known = sum(product.asin in attributes for product in products)
    if known < KNOWN * len(products) or not products:
        raise ValueError(
            f"{files['attributes']} knows {known} of the {len(products)} products of {files['products'].name}; take "
            "both files from the same download"
        )
    goals: list[Goal] = []
    for row, product in enumerate(products):
        if wording == "human":
            goals += human_goals(product, row, written.get(product.asin, ()))
        else:
            goals += synthetic_goals(product, row, attributes.get(product.asin, {}))
    if not goals:
        raise ValueError(f"{source} gives no goals: none of its {len(products)} products has an instruction")
    _write(folder, products, shuffled(goals), {name: _digest(path) for name, path in files.items()}, wording)
    return {"products": len(products), "goals": len(goals)}


def source_files(source: Path, wording: Wording = "synthetic") -> dict[str, Path]:
    """WebShop's files in a folder: of products and of attributes those with the same ending (`_1000` or none).

    Raises: ValueError naming what is missing, or that there are several.
    """
    products = sorted(path for path in source.glob("items_shuffle*.json") if path.is_file())
    if len(products) != 1:
        raise ValueError(
            f"{source} holds {len(products)} files items_shuffle*.json; put one product file, with its items_ins_v2 "
            "file, into a folder"
        )
    ending = products[0].stem.removeprefix("items_shuffle")
    files = {"products": products[0], "attributes": source / f"items_ins_v2{ending}.json"}
    if wording == "human":
        files["human"] = source / "items_human_ins.json"
    for path in files.values():
        if not path.is_file():
            raise ValueError(f"{path} is missing; it belongs to {products[0].name}")
    return files


def _write(folder: Path, products: list[Product], goals: list[Goal], sources: dict[str, str], wording: Wording) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)  # written last: a folder without it holds no shop
    with (folder / PRODUCTS).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(asdict(product)) + "\n" for product in products)
    np.save(folder / ROWS, _line_starts(folder / PRODUCTS))
    with (folder / GOALS).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(asdict(goal)) + "\n" for goal in goals)
    shutil.rmtree(folder / INDEX, ignore_errors=True)
    bm25.build((product.text for product in products), folder / INDEX)
    splits = {name: _ids(folder, name) for name, (first, last) in SPLITS.items() if len(goals) >= (last or first + 1)}
    record = {"wording": wording, "products": len(products), "goals": len(goals), "sources": sources, "splits": splits}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _ids(folder: Path, split: str) -> dict[str, Any]:
    ids = [task.id for task in load_tasks(folder, split)]
    return {"goals": len(ids), "sha256": hashlib.sha256("\n".join(ids).encode()).hexdigest()}


def _line(path: Path, start: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(start)
        return json.loads(file.readline())


def _line_starts(path: Path) -> np.ndarray:
    return np.fromiter(_starts(path), np.int64)


def _starts(path: Path) -> Iterator[int]:
    start = 0
    with path.open("rb") as file:
        for line in file:
            yield start
            start += len(line)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
