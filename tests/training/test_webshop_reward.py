"""WebShop's score: worked purchases, and what each part of it answers to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from training.envs.webshop.goals import Goal
from training.envs.webshop.nouns import nouns
from training.envs.webshop.products import Product
from training.envs.webshop.reward import COLORS, color, judge, type_reward

SHIRT = Product(
    asin="B000000001",
    title="Norvale Men's Flannel Shirt, Button Closure",
    query="men's flannel shirt",
    category="Clothing › Men › Shirts",
    description="A shirt for cold mornings.",
    features=("Machine washable at 30 degrees.",),
    attributes=("long sleeve", "button closure"),
    options={"color": ("navy blue", "red plaid"), "size": ("large", "medium")},
    price_tag="$25.0",
    price=25.0,
)
GOAL = Goal(
    asin=SHIRT.asin,
    product=0,
    instruction="Find me long sleeve, machine washable men's flannel shirt with color: navy blue, and size: large",
    attributes=("long sleeve", "machine washable"),
    options=("navy blue", "large"),
    limit=30.0,
    family="apparel",
)
CHOSEN = ("navy blue", "large")
# Shares no word, no category and no query with the shirt.
LAMP = replace(
    SHIRT,
    asin="B000000002",
    title="Lumora Bedside Lamp",
    query="bedside lamp",
    category="Home › Lighting › Lamps",
    description="A lamp.",
    features=("Dimmable.",),
    attributes=("dimmable",),
)


def test_a_full_match_scores_one() -> None:
    """2 attributes (one from the list, one inside the features), 2 options, price: 5 of 5."""
    purchase = judge(SHIRT, CHOSEN, SHIRT, GOAL)
    assert (purchase.attributes, purchase.options, purchase.price, purchase.kind) == (2, 2, True, 1.0)
    assert purchase.score == 1.0
    assert purchase.outcome == "right kind of product, 2 of 2 attributes, 2 of 2 options, price within the limit"


def test_a_wrong_color_costs_one_part_of_five() -> None:
    assert judge(SHIRT, ("red plaid", "large"), SHIRT, GOAL).score == pytest.approx(4 / 5)
    assert judge(SHIRT, ("large",), SHIRT, GOAL).score == pytest.approx(4 / 5)  # not chosen at all: the same
    assert judge(SHIRT, (), SHIRT, GOAL).score == pytest.approx(3 / 5)


def test_over_the_price_costs_one_part_of_five() -> None:
    dear = replace(SHIRT, price=30.01)
    assert judge(dear, CHOSEN, SHIRT, GOAL).score == pytest.approx(4 / 5)
    assert judge(replace(SHIRT, price=30.0), CHOSEN, SHIRT, GOAL).score == 1.0  # the limit itself is within
    assert "price over the limit" in judge(dear, CHOSEN, SHIRT, GOAL).outcome


def test_another_kind_of_product_halves() -> None:
    """One of six nouns in common (not above 0.2), one category level, another query: r_type 0.5."""
    assert nouns(SHIRT.title) == ("norvale", "men", "flannel", "shirt", "button", "closure")
    other = replace(SHIRT, title="Quillon Denim Jacket with Button", query="denim jacket", category="Clothing › Women")
    assert type_reward(other, SHIRT) == 0.5  # 1 of 6
    assert judge(other, CHOSEN, SHIRT, GOAL).score == pytest.approx(0.5)
    two = replace(other, title="Quillon Denim Shirt with Button")  # 2 of 6 > 0.2
    assert type_reward(two, SHIRT) == 1.0


def test_query_or_two_levels_make_the_kind_right() -> None:
    other = replace(SHIRT, title="Quillon Denim Jacket with Button", query="denim jacket", category="Clothing › Women")
    assert type_reward(replace(other, query=SHIRT.query), SHIRT) == 1.0
    assert type_reward(replace(other, category=" Men › Clothing"), SHIRT) == 1.0  # in any order
    assert type_reward(replace(other, category="Shirts › Women"), SHIRT) == 0.5


def test_no_noun_in_common_is_worth_nothing() -> None:
    """Also when query or category match, and whatever else fits."""
    assert judge(LAMP, CHOSEN, SHIRT, replace(GOAL, attributes=("dimmable",))).score == 0.0
    alike = replace(LAMP, query=SHIRT.query, category=SHIRT.category)
    assert type_reward(alike, SHIRT) == 0.0


def test_less_than_a_tenth_of_the_nouns_is_a_tenth() -> None:
    """11 nouns wanted, one of them there, with the same query."""
    wanted = replace(SHIRT, title="Lamp Table Chair Sofa Carpet Mirror Vase Candle Shelf Cabinet Bench")
    assert len(nouns(wanted.title)) == 11
    assert type_reward(replace(LAMP, query=wanted.query), wanted) == 0.1
    ten = replace(SHIRT, title="Lamp Table Chair Sofa Carpet Mirror Vase Candle Shelf Cabinet")
    assert type_reward(replace(LAMP, query=ten.query), ten) == 1.0  # a tenth itself is no longer below


def test_a_noun_that_stands_twice_is_wanted_twice() -> None:
    """Source: WebShop divides the different common nouns by the length of a list."""
    plain = replace(SHIRT, title="Lamp Table Chair Mirror")
    assert type_reward(LAMP, plain) == 1.0  # 1 of 4
    assert type_reward(LAMP, replace(plain, title="Lamp Table Chair Mirror Table Lamp")) == 0.5  # 1 of 6
    assert type_reward(LAMP, replace(plain, title="Lamp Table Chair Mirror" + " Table" * 7)) == 0.1  # 1 of 11


def test_a_title_without_nouns_counts_as_a_fifth() -> None:
    wordless = replace(SHIRT, title="With or for all (2)")
    assert nouns(wordless.title) == ()
    assert type_reward(LAMP, wordless) == 0.5  # 0.2 is not above 0.2
    assert type_reward(replace(LAMP, query=wordless.query), wordless) == 1.0


@pytest.mark.parametrize(
    ("attribute", "hit"),
    [
        ("long sleeve", True),  # in the list
        ("long sleeves", True),  # nearly
        ("sleeve", True),  # a part of one in the list: its words are a subset
        ("cold mornings", True),  # as it stands in the description
        ("machine wash", True),  # as it stands in the features
        ("flannel", True),  # as it stands in the title
        ("warm mornings", False),
        ("short leg", False),
    ],
)
def test_an_attribute_is_hit_by_the_list_or_by_the_texts(attribute: str, hit: bool) -> None:
    goal = replace(GOAL, attributes=(attribute,), options=())
    assert judge(SHIRT, (), SHIRT, goal).attributes == hit


def test_a_goal_without_options_asks_for_two_things_less() -> None:
    goal = replace(GOAL, options=())
    assert judge(SHIRT, ("red plaid",), SHIRT, goal).score == 1.0
    assert judge(SHIRT, (), SHIRT, goal).outcome == "right kind of product, 2 of 2 attributes, price within the limit"


def test_options_are_compared_by_their_color() -> None:
    assert [color(value) for value in ("navy stripes", "sky blue", "wine red", "7.5 wide")] == [
        "navy",
        "blue",
        "red",
        "7.5 wide",
    ]
    assert list(COLORS) == sorted(set(COLORS))
    assert judge(SHIRT, ("sky blue", "large"), SHIRT, replace(GOAL, options=("blue stripes", "large"))).score == 1.0
    assert judge(SHIRT, ("green", "large"), SHIRT, replace(GOAL, options=("blue stripes", "large"))).options == 1


def test_one_value_may_hit_one_option_only_once() -> None:
    """Two wanted values, one chosen: one hit."""
    assert judge(SHIRT, ("large",), SHIRT, replace(GOAL, options=("large", "medium"))).options == 1


def test_titles_of_any_form_have_nouns_or_none() -> None:
    assert nouns("") == nouns("  ") == nouns("50/50 // (2)") == ()
    assert nouns("WOMEN'S shoes, black") == ("women", "shoes")
    assert nouns("Shoes for WOMEN, shoes") == ("shoes", "women", "shoes")
    assert {"lamp", "café"} <= set(nouns("Émile's Café Lamp"))
    assert {"headphones", "microphone"} <= set(nouns("Headphones,Microphone/Stand with Noise Cancelling"))
