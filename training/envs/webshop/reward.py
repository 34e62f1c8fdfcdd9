"""What a purchase is worth: WebShop's score between 0 and 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from training.envs.webshop.goals import Goal
from training.envs.webshop.nouns import nouns
from training.envs.webshop.products import LEVEL, Product

MATCH = 85.0  # of 100; a larger token_set_ratio is a hit
# An option's value stands for the first of these that occurs in it, so that "navy stripes" is as good as "navy".
_COLORS = (
    "amber apricot aqua ash azure beige black blue blush bordeaux bronze brown burgundy camel camo caramel "
    "champagne charcoal cherry chestnut chocolate cobalt coffee cognac copper coral cranberry cream crystal denim "
    "emerald espresso fuchsia gold graphite gray green grey indigo ivory jade khaki lavender leopard lilac "
    "lime magenta maroon mauve midnight mint mocha mustard natural navy nude olive orange peach pearl pink plum "
    "purple rainbow red rose royal rust sage sand sapphire silver slate tan taupe teal turquoise violet walnut "
    "wheat white wine yellow"
)
COLORS = tuple(_COLORS.split())


@dataclass(frozen=True)
class Purchase:
    """A purchase compared with its goal."""

    attributes: int  # hits
    options: int  # hits
    price: bool  # within the limit
    kind: float  # r_type: 1, 0.5, 0.1 or 0
    goal: Goal

    @property
    def score(self) -> float:
        """r_type * (attribute hits + option hits + [price <= limit]) / (attributes + options + 1), in [0, 1]."""
        wanted = len(self.goal.attributes) + len(self.goal.options) + 1
        return self.kind * (self.attributes + self.options + self.price) / wanted

    @property
    def outcome(self) -> str:
        """The comparison in words, for a writer who looks back."""
        kind = {1.0: "right kind of product", 0.5: "another kind of product"}.get(self.kind, "wrong product")
        parts = [kind, f"{self.attributes} of {len(self.goal.attributes)} attributes"]
        if self.goal.options:
            parts.append(f"{self.options} of {len(self.goal.options)} options")
        return ", ".join([*parts, "price within the limit" if self.price else "price over the limit"])


def judge(product: Product, chosen: Iterable[str], wanted: Product, goal: Goal) -> Purchase:
    """Compares what was bought with what was asked for.

    Source: WebShop (Yao et al. 2022). An attribute is hit by one of the product's attributes or, as it stands, in
    title, features or description; an option by a chosen value, both reduced to their colour if they name one.
    Args: chosen, values of the options that were clicked; wanted, the product that the goal was made from.
    Departures: the colours are a list of ours; nouns as in nouns.py; a ratio is not rounded before it is compared.
    """
    texts = (product.title.lower(), " ".join(product.features).lower(), product.description.lower())
    attributes = sum(
        any(_alike(own, attribute) for own in product.attributes) or any(attribute in text for text in texts)
        for attribute in goal.attributes
    )
    values = [color(value) for value in chosen]
    options = sum(any(_alike(value, color(option)) for value in values) for option in goal.options)
    return Purchase(attributes, options, product.price <= goal.limit, type_reward(product, wanted), goal)


def type_reward(product: Product, wanted: Product) -> float:
    """r_type: whether the product is of the wanted kind, by query, category and the nouns of the titles.

    share = different nouns that both titles have / nouns of the wanted title, one that stands twice counted twice.
    """
    needed = nouns(wanted.title)
    share = len({*needed} & {*nouns(product.title)}) / len(needed) if needed else 0.2
    if share == 0.0:
        return 0.0
    if share < 0.1:
        return 0.1
    return 1.0 if product.query == wanted.query or _levels(product, wanted) >= 2 or share > 0.2 else 0.5


def color(value: str) -> str:
    """The first colour, in alphabetical order, that occurs anywhere in a value; else the value itself."""
    return next((name for name in COLORS if name in value), value)


def _alike(one: str, other: str) -> bool:
    from rapidfuzz import fuzz, utils

    return fuzz.token_set_ratio(one, other, processor=utils.default_process) > MATCH


def _levels(one: Product, other: Product) -> int:
    first, second = ({level.strip() for level in product.category.split(LEVEL)} for product in (one, other))
    return len(first & second)
