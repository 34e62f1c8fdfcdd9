"""The shop's data: one loader for original and generated files, goals in one order, splits by goal number."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.training.test_webshop_reward import GOAL, SHIRT
from training.config import EnvConfig
from training.envs.panels import disjoint, panel
from training.envs.webshop import catalogue
from training.envs.webshop.folders import generated_shop, import_shop, shop_folder
from training.envs.webshop.goals import (
    NO_LIMIT,
    SHUFFLE,
    SPLITS,
    Goal,
    human_goals,
    price_limit,
    shuffled,
    synthetic_goals,
)
from training.envs.webshop.products import Product, read_attributes, read_products
from training.envs.webshop.reward import COLORS, color, judge
from training.envs.webshop.shop import build, load_tasks, open_shop, read_goal

FAMILIES = ("apparel", "footwear", "home_decor", "electronics", "accessories", "beauty_health", "other")


def record(asin: str, **values: Any) -> dict[str, Any]:
    """A product as WebShop's file has it."""
    plain = {
        "asin": asin,
        "name": f"Shirt {asin}",
        "category": "fashion",
        "query": " Shirts ",
        "product_category": "Clothing › Men › Shirts",
        "full_description": "Soft.",
        "small_description": ["Washable.", "Warm."],
        "pricing": "$19.99",
        "images": ["x.jpg"],
        "customization_options": {
            "Color": [{"value": "Navy/Red ", "price": 0}, {"value": "Black", "price": 0}],
            "Size": [{"value": "XL"}, {"value": "M"}],
            "Style": None,
        },
    }
    return {**plain, **values}


def write(folder: Path, records: Any, entries: Any, human: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "items_shuffle_1000.json").write_text(json.dumps(records), encoding="utf-8")
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(entries), encoding="utf-8")
    if human is not None:
        (folder / "items_human_ins.json").write_text(json.dumps(human), encoding="utf-8")
    return folder


ENTRY = {"attributes": ["soft", "warm"], "instruction": "Find me soft shirts", "instruction_attributes": ["soft"]}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generated_shop(tmp_path_factory.mktemp("webshop") / "shop")


# Products


def test_a_product_as_the_original_cleans_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", [record("B000000001")], {"B000000001": ENTRY})
    (product,) = read_products(folder / "items_shuffle_1000.json", {"B000000001": ENTRY})
    assert product.options == {"color": ("navy | red", "black"), "size": ("xl", "m")}
    assert (product.price_tag, product.price, product.query) == ("$19.99", 19.99, "shirts")
    assert (product.features, product.attributes) == (("Washable.", "Warm."), ("soft", "warm"))
    assert product.text == "shirt b000000001 soft. washable. color: navy | red, black, and size: xl, m"


@pytest.mark.parametrize(
    ("pricing", "tag", "low", "high"),
    [
        ("$19.99", "$19.99", 19.99, 19.99),
        ("$9.98$16.98", "$9.98 to $16.98", 9.98, 16.98),
        ("$1,299.00 - $1,500", "$1299.0 to $1500.0", 1299, 1500),
        ("", "$100.0", 100, 100),
        (None, "$100.0", 100, 100),
    ],
)
def test_prices(tmp_path: Path, pricing: str | None, tag: str, low: float, high: float) -> None:
    folder = write(tmp_path / "files", [record("B000000001", pricing=pricing)], {})
    (product,) = read_products(folder / "items_shuffle_1000.json", {})
    assert product.price_tag == tag
    assert low <= product.price <= high
    assert list(read_products(folder / "items_shuffle_1000.json", {})) == [product]  # the draw too


def test_an_asin_that_comes_again_or_is_none_is_passed_over(tmp_path: Path) -> None:
    records = [record("B000000001"), record("nan"), record("B000000001", name="twin"), record("longer than ten")]
    folder = write(tmp_path / "files", records, {})
    assert [p.title for p in read_products(folder / "items_shuffle_1000.json", {})] == ["Shirt B000000001"]


def test_a_file_is_read_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "files", [record(f"B{number:09d}") for number in range(9)], {})
    path = folder / "items_shuffle_1000.json"
    whole = list(read_products(path, {}))
    for size in (1, 7, 100, 5000):
        monkeypatch.setattr("training.envs.webshop.products._CHUNK", size)
        assert list(read_products(path, {})) == whole
    assert len(whole) == 9


# Files that are refused before step 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "items_shuffle_1000.json").unlink(), "holds 0 files items_shuffle"),
        (lambda f: (f / "items_shuffle.json").write_text("[]"), "holds 2 files items_shuffle"),
        (lambda f: (f / "items_ins_v2_1000.json").unlink(), "items_ins_v2_1000.json is missing"),
        (lambda f: (f / "items_shuffle_1000.json").write_text('{"a": 1}'), "not a JSON array of products"),
        (lambda f: (f / "items_shuffle_1000.json").write_text('["a"]'), "not an array of objects"),
        (lambda f: (f / "items_shuffle_1000.json").write_text('[{"asin": "B1"}]'), "product 0 has no 'name'"),
        (
            lambda f: (f / "items_shuffle_1000.json").write_text(json.dumps([record("B1")])[:-40]),
            "is broken or breaks off",
        ),
        (lambda f: (f / "items_shuffle_1000.json").write_text("[" * 10**5), "is no list of products"),
        (
            lambda f: (f / "items_shuffle_1000.json").write_text(json.dumps([record("B1")]) + "[]"),
            "goes on behind its list",
        ),
        (lambda f: (f / "items_ins_v2_1000.json").write_text("[1]"), "not a JSON object"),
        (lambda f: (f / "items_ins_v2_1000.json").write_text('{"a": 1}'), "'a' has no list of attributes"),
        (lambda f: (f / "items_ins_v2_1000.json").write_text("{"), "cannot be read as JSON"),
        (
            lambda f: (f / "items_ins_v2_1000.json").write_text(json.dumps({"B0OTHER": ENTRY})),
            "knows 0 of the 1 products",
        ),
        (
            lambda f: (f / "items_ins_v2_1000.json").write_text(json.dumps({"B1": {"attributes": []}})),
            "gives no goals",
        ),
    ],
)
def test_a_broken_or_foreign_file_is_refused_before_anything_is_written(
    tmp_path: Path, change: Any, message: str
) -> None:
    folder = write(tmp_path / "files", [record("B1")], {"B1": ENTRY})
    assert build(folder, tmp_path / "good") == {"products": 1, "goals": 4}
    change(folder)
    with pytest.raises(ValueError, match=message) as told:
        build(folder, tmp_path / "shop")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "shop").exists()


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"asin": 7}, "the asin 7"),
        ({"name": None}, "the name None"),
        ({"query": float("nan")}, "the query nan"),
        ({"pricing": 19.99}, "the pricing 19.99, which is no text"),
        ({"small_description": [None]}, "features that are no texts"),
        ({"customization_options": ["Color"]}, "the customization_options"),
        ({"customization_options": {"Color": ["navy"]}}, "no list of values for the option 'Color'"),
        ({"customization_options": {"Color": [{"price": 1}]}}, "no list of values for the option 'Color'"),
    ],
)
def test_a_product_of_another_form_is_named(tmp_path: Path, values: dict[str, Any], fault: str) -> None:
    folder = write(tmp_path / "files", [record("B1"), {**record("B2"), **values}], {"B1": ENTRY, "B2": ENTRY})
    with pytest.raises(ValueError, match=f"product 1 has {fault}"):
        build(folder, tmp_path / "shop")
    assert not (tmp_path / "shop").exists()


@pytest.mark.parametrize(
    "values", [{"attributes": [1]}, {"attributes": "soft"}, {"instruction_attributes": "soft"}, {"instruction": 5}]
)
def test_attributes_of_another_form_are_named(tmp_path: Path, values: dict[str, Any]) -> None:
    """A text in the place of a list would be read letter by letter, and every reward be wrong in silence."""
    folder = write(tmp_path / "files", [record("B1")], {"B1": {**ENTRY, **values}})
    with pytest.raises(ValueError, match="'B1' has (no list of attributes|an instruction that is no text)"):
        build(folder, tmp_path / "shop")


def test_what_the_original_takes_for_nothing_is_nothing(tmp_path: Path) -> None:
    empty = {"full_description": None, "small_description": "", "customization_options": "", "pricing": None}
    folder = write(tmp_path / "files", [record("B1", **empty)], {"B1": ENTRY})
    (product,) = read_products(folder / "items_shuffle_1000.json", {})
    assert (product.description, product.features, product.options) == ("", ("",), {})


def test_data_folders_of_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path / "cache"))
    files = write(tmp_path / "files", [record("B1")], {"B1": ENTRY})
    built = shop_folder(EnvConfig(kind="webshop", data=str(files)))  # WebShop's own files: built into the cache
    assert built.parent == tmp_path / "cache"
    assert shop_folder(EnvConfig(kind="webshop", data=str(built))) == built
    assert shop_folder(EnvConfig(kind="webshop", data=str(files))) == built  # and not again
    folder, told = import_shop(files)
    assert (folder, told) == (tmp_path / "cache" / "webshop", "1 products, 4 synthetic goals")
    for wrong, message in ((tmp_path / "nowhere", "which is no folder"), (tmp_path, "holds 0 files")):
        with pytest.raises(ValueError, match=message):
            shop_folder(EnvConfig(kind="webshop", data=str(wrong)))
    with pytest.raises(ValueError, match="is no folder"):
        import_shop(tmp_path / "nowhere")


def test_an_imported_shop_is_replaced_by_a_complete_one_only(tmp_path: Path) -> None:
    files, out = write(tmp_path / "files", [record("B1")], {"B1": ENTRY}), tmp_path / "mine"
    import_shop(files, out)
    kept = (out / "shop.json").read_bytes()
    (files / "items_ins_v2_1000.json").write_text("{}")
    with pytest.raises(ValueError, match="knows 0 of the 1 products"):
        import_shop(files, out)
    assert (out / "shop.json").read_bytes() == kept
    write(files, [record("B1"), record("B2")], {"B1": ENTRY, "B2": ENTRY})
    assert import_shop(files, out) == (out, "2 products, 8 synthetic goals")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no shop; choose another"):
        import_shop(files, tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"files", "mine", "other"}


def test_goals_that_people_wrote(tmp_path: Path) -> None:
    """Their order of options is theirs, and every one of them is one goal."""
    said = {"instruction": "i want a soft one.", "instruction_attributes": ["soft"], "instruction_options": ["XL"]}
    human = {"B1": [said, {**said, "instruction_attributes": []}], "B9": [said]}  # B9: a product that is not sold
    files = write(tmp_path / "files", [record("B1")], {"B1": ENTRY}, human)
    folder, told = import_shop(files, tmp_path / "shop", "human")
    assert told == "1 products, 1 human goals"
    goal = open_shop(folder).goal(0)
    assert (goal.options, goal.attributes, goal.number) == (("XL",), ("soft",), 0)
    product = open_shop(folder).product(0)
    assert judge(product, ("xl",), product, goal).score == 1.0
    for wrong in (
        [{"instruction": "x"}],
        [1],
        [{**said, "instruction": None}],
        [{**said, "instruction_options": "XL"}],
    ):
        (files / "items_human_ins.json").write_text(json.dumps({"B1": wrong}))
        with pytest.raises(ValueError, match="'B1' has no instructions; this is not WebShop's items_human_ins file"):
            import_shop(files, tmp_path / "shop", "human")
    (files / "items_human_ins.json").unlink()
    with pytest.raises(ValueError, match=r"items_human_ins.json is missing"):
        import_shop(files, tmp_path / "shop", "human")


# Goals


def one_product(tmp_path: Path, **values: Any) -> Product:
    folder = write(tmp_path / "files", [record("B000000001", **values)], {})
    (product,) = read_products(folder / "items_shuffle_1000.json", {"B000000001": ENTRY})
    return product


def test_a_synthetic_goal_for_every_combination_of_options(tmp_path: Path) -> None:
    goals = list(synthetic_goals(one_product(tmp_path), 5, ENTRY))
    assert [goal.options for goal in goals] == [
        ("navy | red", "xl"),
        ("navy | red", "m"),
        ("black", "xl"),
        ("black", "m"),
    ]
    (limit,) = {goal.limit for goal in goals}
    assert goals[1].instruction == (
        f"Find me soft shirts with color: navy | red, and size: m, and price lower than {limit:.2f} dollars"
    )
    assert {(goal.asin, goal.product, goal.attributes) for goal in goals} == {("B000000001", 5, ("soft",))}


def test_goals_without_attributes_or_instruction_are_dropped(tmp_path: Path) -> None:
    product = one_product(tmp_path)
    for entry in (
        {},
        {"attributes": ["soft"]},
        {**ENTRY, "instruction_attributes": []},
        {**ENTRY, "instruction": None},
    ):
        assert list(synthetic_goals(product, 0, entry)) == []
    written = [
        {"instruction": "i want it soft.", "instruction_attributes": ["soft"], "instruction_options": ["xl"]},
        {"instruction": "whatever", "instruction_attributes": [], "instruction_options": []},
    ]
    (goal,) = human_goals(product, 0, written)
    assert goal.instruction == f"i want it soft, and price lower than {goal.limit:.2f} dollars"
    assert (goal.attributes, goal.options) == (("soft",), ("xl",))


def test_the_limit_is_the_larger_of_two_of_the_next_four_tens(tmp_path: Path) -> None:
    """P(20) = 0, P(30) = 1/6, P(40) = 2/6, P(50) = 3/6 for a price of 10 or more and less than 20."""
    product = one_product(tmp_path)
    counts = Counter(price_limit(product, f"instruction {number}") for number in range(3000))
    assert set(counts) == {30.0, 40.0, 50.0}
    for limit, share in ((30.0, 1 / 6), (40.0, 2 / 6), (50.0, 3 / 6)):
        assert counts[limit] / 3000 == pytest.approx(share, abs=0.035)  # four standard errors
    assert price_limit(product, "a") == price_limit(product, "a")


def test_a_limit_is_above_the_price_and_none_where_there_are_no_two(tmp_path: Path) -> None:
    assert price_limit(one_product(tmp_path, pricing="$20.00"), "a") in (40.0, 50.0, 60.0)  # 20 itself is not above
    dear = one_product(tmp_path, pricing="$985")
    assert price_limit(dear, "a") == NO_LIMIT
    assert next(synthetic_goals(dear, 0, ENTRY)).instruction.endswith("size: xl")


def test_the_same_goals_in_every_process_and_disjoint_splits(shop: Path, tmp_path: Path) -> None:
    """Case B46: which goals are test goals follows from the files alone; the manifest's hashes tell."""
    again = generated_shop(tmp_path / "again")
    names = ("products.jsonl", "goals.jsonl", "shop.json")
    assert [(shop / name).read_bytes() for name in names] == [(again / name).read_bytes() for name in names]
    splits = {split: {task.id for task in load_tasks(shop, split)} for split in ("test", "eval", "train")}
    assert (len(splits["test"]), len(splits["eval"])) == (500, 1000)
    for one, other in combinations(splits.values(), 2):
        assert not one & other
    manifest = json.loads((shop / "shop.json").read_text())
    assert manifest["splits"].keys() == SPLITS.keys()
    tasks = load_tasks(shop, "train")
    disjoint(tasks, panel(load_tasks(shop, "test"), 0, 0))
    assert [task.source for task in tasks[:2]] == [f"{shop}#1500", f"{shop}#1501"]
    assert {task.env for task in tasks} == {"webshop"}


def test_the_named_panels_of_sdar(shop: Path) -> None:
    train, valid = load_tasks(shop, "sdar_train"), load_tasks(shop, "sdar_valid")
    assert (len(train), len(valid)) == (1000, 128)
    assert [task.id for task in valid] == [task.id for task in load_tasks(shop, "test")[:128]]
    disjoint(train, panel(valid, 0, 0))


def test_an_unknown_or_empty_split_is_refused(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no split 'valid_seen'; choose one of test, eval, train"):
        load_tasks(shop, "valid_seen")
    build(write(tmp_path / "files", [record("B1")], {"B1": ENTRY}), tmp_path / "small")
    with pytest.raises(ValueError, match="has 4 goals, and split 'train' needs goals 1500"):
        load_tasks(tmp_path / "small", "train")


def test_a_task_of_another_shop_is_refused(shop: Path) -> None:
    task = load_tasks(shop, "test")[0]
    moved = type(task)(**{**task.__dict__, "source": f"{shop}#1"})
    with pytest.raises(ValueError, match="list the tasks again"):
        read_goal(moved)
    with pytest.raises(ValueError, match="no goal 999999"):
        open_shop(shop).goal(999999)


# The generated catalogue


def test_the_catalogue_has_all_families_and_is_told_apart_by_words(shop: Path) -> None:
    tasks = load_tasks(shop, "train")
    families = catalogue.words()["families"]
    assert tuple(families) == FAMILIES
    kinds = {kind[0].lower(): name for name, family in families.items() for kind in family["kinds"]}
    found = Counter()
    for task in tasks[:2000]:
        opened, goal = read_goal(task)
        found[kinds[opened.product(goal.product).query], task.task_type] += 1
    assert {family for family, _ in found} == set(FAMILIES)
    assert all(family == kind for family, kind in found)  # the type that keywords give is the family it was made in
    manifest = json.loads((shop / "shop.json").read_text())
    assert manifest["products"] == catalogue.PRODUCTS >= 2000


def test_values_and_attributes_of_one_pool_are_not_taken_for_one_another() -> None:
    """Else a wrong choice would count as a right one: the score's ratio calls "24 inch" and "20 inch" alike."""
    for family in catalogue.words()["families"].values():
        for section in family["sections"].values():
            options = section.get("options") or family["options"]
            for values in options.values():
                for one, other in combinations(values, 2):
                    assert judge(SHIRT, (one,), SHIRT, replace(GOAL, options=(other,))).options == 0, (one, other)
            for one, other in combinations([*family["attributes"], *section["attributes"]], 2):
                bare = replace(SHIRT, title="Shirt", attributes=(one,), features=(), description="")
                assert judge(bare, (), SHIRT, replace(GOAL, attributes=(other,))).attributes == 0, (one, other)


def test_the_goals_own_product_satisfies_it(shop: Path) -> None:
    for task in load_tasks(shop, "test"):
        opened, goal = read_goal(task)
        product = opened.product(goal.product)
        assert product.asin == goal.asin
        assert judge(product, goal.options, product, goal).score == 1.0


def test_catalogues_of_other_sizes_and_seeds(tmp_path: Path) -> None:
    one, two = (catalogue.generate(tmp_path / str(seed), 14, seed=seed) for seed in (0, 1))
    assert (one / "items_shuffle.json").read_text() != (two / "items_shuffle.json").read_text()
    with pytest.raises(ValueError, match="seven families"):
        catalogue.generate(tmp_path / "none", 6)
    with pytest.raises(ValueError, match="holds no generated shop"):
        generated_shop(one, 14)


def test_a_search_finds_by_words_and_is_the_same_each_time(shop: Path) -> None:
    opened = open_shop(shop)
    product = opened.product(17)
    found = opened.search(product.text)
    assert found[0] == 17
    assert len(found) == 50 == len(set(found))
    assert opened.search("men's sneakers") == opened.search("men's sneakers")
    assert opened.search("zzzz") == ()


# Real data


def test_the_shuffle_is_the_originals(shared: Path) -> None:
    """human_goals.json lists the original's goals in their shuffled order. Undone, goals of one product stand side by
    side again, so that neighbours share words; in any other order they do not."""
    goals = json.loads((shared / "data" / "webshop" / "human_goals.json").read_text())
    order = list(range(len(goals)))
    random.Random(SHUFFLE).shuffle(order)
    before = [""] * len(goals)
    for number, place in enumerate(order):
        before[place] = goals[number]
    assert likeness(before) > 4 * likeness(goals)
    assert [goal.instruction for goal in shuffled([blank(text) for text in before])] == goals
    fixed = json.loads((shared / "data" / "webshop" / "expel_webshop.fixed100.json").read_text())
    plain = re.compile(r"[^a-z0-9]")
    for number, task in enumerate(fixed):  # the 100 fixed test tasks of others are our goals 0 to 99
        assert task["session_idx"] == f"fixed_{number}"
        said = task["task"].split(", and price lower")[0].removesuffix(" \n[Search]\n")
        assert plain.sub("", said.lower()) == plain.sub("", goals[number].lower())


def blank(text: str) -> Any:
    return Goal("", 0, text, ("a",), (), NO_LIMIT, "other")


def likeness(goals: list[str]) -> float:
    """Mean share of common words of neighbours."""
    small = set("i a an the in for with and is of am looking need want to that are on it".split())  # noqa: SIM905
    words = [set(re.findall("[a-z]+", goal.lower())) - small for goal in goals]
    return sum(len(a & b) / max(len(a | b), 1) for a, b in pairwise(words)) / len(words)


def test_limits_of_the_fixed_tasks_are_tens(shared: Path) -> None:
    fixed = json.loads((shared / "data" / "webshop" / "expel_webshop.fixed100.json").read_text())
    limits = [float(found[1]) for task in fixed if (found := re.search(r"price lower than ([\d.]+)", task["task"]))]
    assert len(limits) == 99  # one product is too dear for a limit
    assert all(limit % 10 == 0 and 20 <= limit <= 990 for limit in limits)


def test_real_attributes_and_instructions_make_a_shop(shared: Path, tmp_path: Path) -> None:
    """The real attribute file with products of our own under its asins (the real product file cannot be had here)."""
    source = shared / "data" / "webshop" / "items_ins_v2_1000.json"
    entries = read_attributes(source)
    assert len(entries) == 1000
    records = [record(asin, name=f"Thing {asin}", customization_options={}) for asin in entries]
    files = write(tmp_path / "files", records, entries)
    told = [entry for entry in entries.values() if entry.get("instruction_attributes")]
    assert build(files, tmp_path / "shop") == {"products": 1000, "goals": len(told)}
    opened = open_shop(tmp_path / "shop")
    said = {opened.goal(number).instruction.split(", and price")[0] for number in range(len(told))}
    assert said == {entry["instruction"] for entry in told}


def test_colors_are_found_in_real_options(shared: Path) -> None:
    fixed = json.loads((shared / "data" / "webshop" / "expel_webshop.fixed100.json").read_text())
    options = [option for task in fixed for option in task["key"]["goal_options"]]
    assert options
    assert {color(option) for option in options} & set(COLORS)
