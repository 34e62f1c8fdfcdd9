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
from types import NoneType
from typing import Any

from training.envs.rooms import keyed_generator

LEVEL = "›"  # between the levels of a product's category
UNPRICED = 100.0  # dollars, of a product without a price

_FORMS: dict[str, tuple[type, ...]] = {  # of a product's fields
    "asin": (str,),
    "name": (str,),
    "category": (str,),
    "query": (str,),
    "product_category": (str,),
    "full_description": (str, NoneType),
    "small_description": (list, str, NoneType),
    "customization_options": (dict, str, NoneType),  # "" where there are none
}
_ATTRIBUTES = ("attributes", "instruction_attributes")
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
        if fault := _fault(record):
            raise ValueError(f"{path}: product {number} has {fault}; this is not WebShop's product file")
        asin = record["asin"]
        if asin != "nan" and len(asin) <= 10 and asin not in seen:
            seen.add(asin)
            yield _product(record, tuple(attributes.get(asin, {}).get("attributes", ())))


def read_attributes(path: Path) -> dict[str, dict[str, Any]]:
    """items_ins_v2*.json: asin -> attributes, instruction, instruction_attributes. Raises: ValueError as above."""
    document = _document(path)
    for asin, entry in document.items():
        if not isinstance(entry, dict) or not all(_texts(entry.get(key) or []) for key in _ATTRIBUTES):
            raise ValueError(f"{path}: {asin!r} has no list of attributes; this is not WebShop's items_ins_v2 file")
        if not isinstance(entry.get("instruction"), str | None):
            raise ValueError(f"{path}: {asin!r} has an instruction that is no text; this is not WebShop's file")
    return document


def read_instructions(path: Path) -> dict[str, list[dict[str, Any]]]:
    """items_human_ins.json: asin -> instructions. Raises: ValueError as above."""
    document = _document(path)
    for asin, entries in document.items():
        if not isinstance(entries, list) or not all(map(_is_instruction, entries)):
            raise ValueError(f"{path}: {asin!r} has no instructions; this is not WebShop's items_human_ins file")
    return document


def _is_instruction(entry: Any) -> bool:
    lists = ("instruction_attributes", "instruction_options")
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("instruction"), str)
        and all(_texts(entry.get(key)) for key in lists)
    )


def _texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _fault(record: Mapping[str, Any]) -> str | None:
    """What is wrong with the form of a product, in words; None where it is as it should be."""
    for key, forms in _FORMS.items():
        if key not in record:
            return f"no {key!r}"
        if not isinstance(record[key], forms):
            return f"the {key} {record[key]!r:.60}"
    if not isinstance(record.get("pricing"), str | None):
        return f"the pricing {record['pricing']!r:.60}, which is no text"
    features, options = record["small_description"], record["customization_options"] or {}
    if isinstance(options, str):
        return f"the customization_options {options!r:.60}"
    if isinstance(features, list) and not _texts(features):
        return "features that are no texts"
    for name, contents in options.items():
        of_texts = isinstance(contents, list) and all(
            isinstance(content, dict) and isinstance(content.get("value"), str) for content in contents
        )
        if contents is not None and not of_texts:
            return f"no list of values for the option {name!r}"
    return None


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
    except (OSError, ValueError, RecursionError) as error:
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
                if (text[at + 1 :] + file.read(_CHUNK)).strip():
                    raise ValueError(f"{path} goes on behind its list of products; this is not WebShop's product file")
                return
            try:
                entry, end = decoder.raw_decode(text, at)
            except RecursionError as error:
                raise ValueError(f"{path} is no list of products ({error}); bring it in again") from error
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
