"""A catalogue of made-up products in WebShop's own files: nothing to download, the same loader, the same rules."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from functools import lru_cache
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np

from training.envs.rooms import keyed_generator
from training.envs.webshop.products import LEVEL

PRODUCTS = 2100  # unless asked otherwise; seven families, ten kinds of product each
WORDS = Path(__file__).parents[1] / "data" / "webshop.json"


@lru_cache(maxsize=1)
def words() -> dict[str, Any]:
    """The families: kinds of product, attributes, options and the sentences they are described with."""
    return json.loads(WORDS.read_text(encoding="utf-8"))


def generate(folder: Path, products: int = PRODUCTS, seed: int = 0) -> Path:
    """Write items_shuffle.json and items_ins_v2.json with made-up products; the same arguments, the same bytes.

    Product i is of family i mod 7, so that any number of them has all families. Source: ours, in WebShop's schema; the
    instruction is worded as WebShop's synthetic ones, from attributes and the query.
    Raises: ValueError for less than one product of each family.
    """
    if products < len(words()["families"]):
        raise ValueError(f"a catalogue of {products} products was asked for; there are seven families to fill")
    records, entries = zip(*_catalogue(products, seed), strict=True)
    order = keyed_generator("shelves", seed).permutation(products)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "items_shuffle.json", [records[i] for i in order])
    _write(folder / "items_ins_v2.json", {records[i]["asin"]: entries[i] for i in order})
    return folder


def _catalogue(products: int, seed: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    taken: set[str] = set()
    for number in range(products):
        record, entry = _product(number, seed, taken)
        taken.add(record["asin"])
        yield record, entry


def _product(number: int, seed: int, taken: Container[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A product's record in items_shuffle and its entry in items_ins_v2; decided by its number and the seed.

    Args: taken, the ids of the products before it.
    """
    table = words()
    family = list(table["families"].values())[number % len(table["families"])]
    rng = keyed_generator("product", seed, number)
    kind, section, leaf, low, high = family["kinds"][int(rng.integers(len(family["kinds"])))]
    brand = _one(rng, table["brands"])
    place = family["sections"][section]
    attributes = _some(rng, [*family["attributes"], *place["attributes"]], int(rng.integers(4, 7)))
    named, told = attributes[: int(rng.integers(1, 3))], attributes[-2:]
    features = [_one(rng, table["features"]).format(attribute, brand) for attribute in attributes]
    query = kind.lower()
    price = round(float(rng.uniform(low, high)), 2)
    ranged = rng.random() < 0.25
    record = {
        "asin": _asin(brand, kind, taken),
        "name": f"{brand} {kind}, {', '.join(text.title() for text in named)}",
        "category": family["category"],
        "query": query,
        "product_category": f" {LEVEL} ".join([family["department"], place["name"], leaf]),
        "full_description": _one(rng, table["descriptions"]).format(
            query, brand, _one(rng, family["uses"]), " and ".join(told)
        ),
        "small_description": [text[0].upper() + text[1:] for text in features],
        "pricing": f"${price} - ${round(price * 1.2, 2)}" if ranged else f"${price}",
        "images": [""],
        "customization_options": _options(rng, place.get("options") or family["options"], price),
    }
    asked = _some(rng, attributes, int(rng.integers(2, 4)))
    entry = {
        "attributes": attributes,
        "instruction": f"Find me {', '.join(asked)} {query}",
        "instruction_attributes": asked,
    }
    return record, entry


def _options(rng: np.random.Generator, pools: Mapping[str, list[str]], price: float) -> dict[str, Any]:
    """Two to four values of each option; now and then one option is left out. All values cost the same."""
    chosen = {name: _some(rng, pool, int(rng.integers(2, 5))) for name, pool in pools.items()}
    if rng.random() < 0.2:
        del chosen[_one(rng, sorted(chosen))]
    return {
        name.title(): [
            {"is_selected": i == 0, "is_available": True, "value": value, "price": price, "price_string": f"${price}"}
            for i, value in enumerate(values)
        ]
        for name, values in chosen.items()
    }


@lru_cache(maxsize=1)
def codes() -> tuple[dict[str, str], dict[str, str]]:
    """What the ids of made-up products consist of: brand -> its code, and kind of product -> its code.

    An id says what it names, so that a small policy learns to click it: to copy letters without a meaning takes more
    training than all the rest.
    """
    kinds = [kind[0] for family in words()["families"].values() for kind in family["kinds"]]
    return _codes({brand: brand for brand in words()["brands"]}, 4), _codes(
        {kind: kind.split()[-1] for kind in kinds}, 3
    )


def _codes(words: Mapping[str, str], letters: int) -> dict[str, str]:
    """Name -> the first letters of its word, or the next choice of them that no other name has."""
    found: dict[str, str] = {}
    for name, word in words.items():
        choices = map("".join, combinations("".join(filter(str.isalpha, word.upper())), letters))
        found[name] = next(code for code in choices if code not in found.values())
    return found


def _asin(brand: str, kind: str, taken: Container[str]) -> str:
    """Ten characters: B0, the codes of brand and kind, and the first number that is free."""
    start = f"B0{codes()[0][brand]}{codes()[1][kind]}"
    numbered = (start[: 10 - len(number)] + number for number in map(str, count()))
    return next(asin for asin in numbered if asin not in taken)


def _one(rng: np.random.Generator, pool: list[str]) -> str:
    return pool[int(rng.integers(len(pool)))]


def _some(rng: np.random.Generator, pool: list[str], count: int) -> list[str]:
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
