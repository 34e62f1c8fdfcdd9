"""The pages of the shop and the way from one to the next: pure functions of where the customer is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from training.envs.webshop.products import Product
from training.envs.webshop.shop import Shop

SEPARATOR = " [SEP] "
SEARCH = "search[<your query>]"  # the policy's own words stand for the part in angle brackets
WINDOW = 10  # products of a page, unless asked otherwise
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
PARTS = ("Description", "Features", "Reviews", "Attributes")

_COMMAND = re.compile(r"\s*(search|click)\[(.*)\]\s*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Where the customer is, and what has been chosen on the product at hand."""

    page: Literal["index", "results", "item", "part", "bought"] = "index"
    found: tuple[int, ...] = ()  # rows of the search
    window: int = 0  # page of the results
    row: int = -1  # of the product at hand
    part: str = ""
    chosen: dict[str, str] = field(default_factory=dict)  # option name -> value
    size: int = WINDOW  # products of a page of the results

    @property
    def shown(self) -> tuple[int, ...]:
        """Rows of the products on this page of the results."""
        return self.found[self.window * self.size : (self.window + 1) * self.size]


def command(text: str) -> tuple[str, str] | None:
    """("search" or "click", what stands in the outer brackets); None for anything else, and for empty brackets."""
    match = _COMMAND.fullmatch(text)
    words = " ".join(match[2].split()) if match else ""
    return (match[1].lower(), words) if match and words else None


def observation(place: Place, shop: Shop) -> str:
    """The text of a page behind the instruction, its pieces joined by [SEP].

    Source: WebShop's text mode. As there, a chosen option is not marked. Departures: reviews are not part of the data
    that is published, so that page is as empty as the original's; the attributes' page, which the original can show,
    is always there.
    """
    return SEPARATOR.join(_pieces(place, shop))


def commands(place: Place, shop: Shop) -> tuple[str, ...]:
    """What can be done on a page, in the order of its buttons."""
    if place.page == "index":
        return (SEARCH,)
    return tuple(dict.fromkeys(f"click[{target.lower()}]" for target in _targets(place, shop)))


def follow(place: Place, action: str, shop: Shop) -> Place | None:
    """The page that an action leads to; None for what cannot be done here, in which case nothing changes (case R2)."""
    done = command(action)
    if done is None:
        return None
    verb, words = done
    if verb == "search":
        found = shop.search(words.lower())
        return Place("results", found, size=place.size) if place.page == "index" else None
    clicked = words.lower()
    targets = {target.lower() for target in _targets(place, shop)}
    return _click(place, clicked, shop) if clicked in targets else None


def _click(place: Place, clicked: str, shop: Shop) -> Place:
    if clicked == BACK.lower():
        return Place(size=place.size)
    if place.page == "results":
        if clicked in (NEXT.lower(), PREVIOUS.lower()):
            return replace(place, window=place.window + (1 if clicked == NEXT.lower() else -1))
        row = next(row for row in place.shown if shop.product(row).asin.lower() == clicked)
        return replace(place, page="item", row=row, chosen={})
    if place.page == "part":
        return replace(place, page="item", part="")
    if clicked == PREVIOUS.lower():
        return replace(place, page="results", row=-1, chosen={})
    if clicked == BUY.lower():
        return replace(place, page="bought")
    if part := next((part for part in PARTS if part.lower() == clicked), None):
        return replace(place, page="part", part=part)
    name = next(name for name, values in shop.product(place.row).options.items() if clicked in values)
    return replace(place, chosen={**place.chosen, name: clicked})


def _targets(place: Place, shop: Shop) -> Iterator[str]:
    """Everything on a page that can be clicked."""
    if place.page in ("index", "bought"):
        return
    yield BACK
    if place.page == "results":
        yield from _turns(place)
        yield from (shop.product(row).asin for row in place.shown)
        return
    yield PREVIOUS
    if place.page == "item":
        for values in shop.product(place.row).options.values():
            yield from values
        yield from (*PARTS, BUY)


def _turns(place: Place) -> list[str]:
    last = max(len(place.found) - 1, 0) // place.size
    return [*([PREVIOUS] if place.window > 0 else []), *([NEXT] if place.window < last else [])]


def _pieces(place: Place, shop: Shop) -> list[str]:
    if place.page == "index":
        return ["Search"]
    if place.page == "bought":
        return ["Thank you for shopping with us!"]
    if place.page == "results":
        pieces = [BACK, f"Page {place.window + 1} (Total results: {len(place.found)})", *_turns(place)]
        for row in place.shown:
            product = shop.product(row)
            pieces += [product.asin, product.title, product.price_tag]
        return pieces
    product = shop.product(place.row)
    if place.page == "part":
        return [BACK, PREVIOUS, *_part(product, place.part)]
    pieces = [BACK, PREVIOUS]
    for name, values in product.options.items():
        pieces += [name, *values]
    return [*pieces, product.title, f"Price: {product.price_tag}", "Rating: N.A.", *PARTS, BUY]


def _part(product: Product, part: str) -> list[str]:
    texts = {"Description": (product.description,), "Features": product.features, "Attributes": product.attributes}
    return [" ".join(text.split()) for text in texts.get(part, ()) if text.strip()]
