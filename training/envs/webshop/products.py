"""Products: WebShop's own files read record by record, and refused where they are something else.

items_shuffle*.json is an array of products, items_ins_v2*.json maps a product's id (asin) to its attributes and, for
some products, an instruction; items_human_ins.json maps it to instructions that people wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.envs.rooms import keyed_generator

LEVEL = "›"  # between the levels of a product's category
UNPRICED = 100.0  # dollars, of a product without a price

_KEYS = ("asin", "name", "category", "query", "product_category", "full_description", "small_description")
_CHUNK, _LONGEST = 1 << 20, 1 << 26  # characters read at once; of one record, in a file that is not broken
_GAP = re.compile(r"[\s,]*")
_PRICE = re.compile(r"\$\s*(\d[\d,]*(?:\.\d+)?|\.\d+)")


@dataclass(frozen=True)
class Product:
    """One product as the shop shows it. `price` is what is paid: drawn once from a range of prices."""

    asin: str
    title: str
    query: str  # the query it was found with when the data were gathered
    category: str  # levels, separated by LEVEL
    description: str
    features: tuple[str, ...]
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # name -> values, lower-case
    price_tag: str
    price: float  # dollars

    @property
    def text(self) -> str:
        """What the search reads: title, description, first feature and all options. Source: WebShop's index."""
        options = (f"{name}: {', '.join(values)}" for name, values in self.options.items())
        return " ".join([self.title, self.description, *self.features[:1], ", and ".join(options)]).lower()


def read_products(path: Path, attributes: Mapping[str, Any]) -> Iterator[Product]:
    """The products of items_shuffle*.json in order, with their attributes; an asin that comes again is passed over.

    Raises: ValueError in one sentence for a broken file, or one that is not WebShop's.
    """
    seen: set[str] = set()
    for number, record in enumerate(_entries(path)):
        missing = [key for key in (*_KEYS, "customization_options") if key not in record]
        if missing:
            raise ValueError(f"{path}: product {number} has no {missing[0]!r}; this is not WebShop's product file")
        asin = str(record["asin"])
        if asin != "nan" and len(asin) <= 10 and asin not in seen:
            seen.add(asin)
            yield _product(record, tuple(attributes.get(asin, {}).get("attributes", ())))


def read_attributes(path: Path) -> dict[str, dict[str, Any]]:
    """items_ins_v2*.json: asin -> attributes, instruction, instruction_attributes. Raises: ValueError as above."""
    document = _document(path)
    for asin, entry in document.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("attributes", []), list):
            raise ValueError(f"{path}: {asin!r} has no list of attributes; this is not WebShop's items_ins_v2 file")
    return document


def read_instructions(path: Path) -> dict[str, list[dict[str, Any]]]:
    """items_human_ins.json: asin -> instructions. Raises: ValueError as above."""
    document = _document(path)
    keys = ("instruction", "instruction_attributes", "instruction_options")
    for asin, entries in document.items():
        if not isinstance(entries, list) or not all(key in entry for entry in entries for key in keys):
            raise ValueError(f"{path}: {asin!r} has no instructions; this is not WebShop's items_human_ins file")
    return document


def _product(record: Mapping[str, Any], attributes: tuple[str, ...]) -> Product:
    features = record["small_description"]
    prices = [float(price.replace(",", "")) for price in _PRICE.findall(record.get("pricing") or "")][:2]
    low, high = (prices[0], prices[-1]) if prices else (UNPRICED, UNPRICED)
    price = low if low == high else round(float(keyed_generator("price", record["asin"]).uniform(low, high)), 2)
    options = {
        " ".join(name.lower().split()): tuple(dict.fromkeys(_value(content["value"]) for content in contents))
        for name, contents in (record["customization_options"] or {}).items()
        if contents
    }
    return Product(
        asin=record["asin"],
        title=record["name"],
        query=record["query"].lower().strip(),
        category=record["product_category"],
        description=record["full_description"] or "",
        features=tuple(features) if isinstance(features, list) else (features or "",),
        attributes=attributes,
        options=options,
        price_tag=f"${low}" if low == high else f"${low} to ${high}",
        price=price,
    )


def _value(text: str) -> str:
    return " ".join(text.replace("/", " | ").lower().split())


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}); bring it in again") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a JSON object from product ids to entries; this is not WebShop's file")
    return document


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, one at a time: the full product file has gigabytes."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        text = file.read(_CHUNK).lstrip()
        if text[:1] != "[":
            raise ValueError(f"{path} is not a JSON array of products; this is not WebShop's product file")
        at = 1
        while True:
            gap = _GAP.match(text, at)
            at = gap.end() if gap else at
            if text[at : at + 1] == "]":
                return
            try:
                entry, end = decoder.raw_decode(text, at)
            except ValueError as error:
                more = file.read(_CHUNK)
                if not more or len(text) - at > _LONGEST:
                    raise ValueError(f"{path} is broken or breaks off ({error.args[0]}); bring it in again") from error
                text, at = text[at:] + more, 0
                continue
            if not isinstance(entry, dict):
                raise ValueError(f"{path} is not an array of objects; this is not WebShop's product file")
            yield entry
            at = end
