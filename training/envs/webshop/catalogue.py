"""A catalogue of made-up products in WebShop's own files: nothing to download, the same loader, the same rules."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterator, Mapping
from functools import lru_cache
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
        record, entry = _product(number, seed)
        digest, salt = record["asin"], 0
        while digest in taken:
            salt += 1
            digest = _asin(number, seed, salt)
        taken.add(digest)
        yield {**record, "asin": digest}, entry


def _product(number: int, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A product's record in items_shuffle and its entry in items_ins_v2; decided by its number and the seed."""
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
        "asin": _asin(number, seed, 0),
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


def asin_pairs() -> list[str]:
    """What the ids of made-up products consist of, five pairs each: few enough to be tokens of a small vocabulary."""
    return [letter + digit for letter in string.ascii_uppercase for digit in string.digits]


def _asin(number: int, seed: int, salt: int) -> str:
    pairs, digest = asin_pairs(), hashlib.sha256(f"asin {seed} {number} {salt}".encode()).digest()
    return "B0" + "".join(pairs[int.from_bytes(digest[i : i + 2]) % len(pairs)] for i in range(0, 8, 2))


def _one(rng: np.random.Generator, pool: list[str]) -> str:
    return pool[int(rng.integers(len(pool)))]


def _some(rng: np.random.Generator, pool: list[str], count: int) -> list[str]:
    return [pool[i] for i in rng.permutation(len(pool))[:count]]


def _write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
