"""The token view: what the document holds, and what a browser shows of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from analysis.report import report_run
from analysis.token_page import MOST, script_json, token_view, token_views
from diagnostics.artifact import save_artifact
from diagnostics.tokens import CONTEXT_COLUMNS, TOKEN_COLUMNS, WEIGHT

HOSTILE = '</script><img src="https://example.invalid/x.png"><!--'
TEXTS = ["<think>", " go", "\n", HOSTILE, " fridge", " 1"]
CLASSES = ["format", "think", "think", "think", "action", "action"]
CONTEXTS = {"own_skill": "Open the fridge <b>first</b>.", "none": ""}
LAYERS = 3
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def gap_of(episode: int, context: str, token: int) -> float:
    """The planted gap: falls and rises around 0, three times as large under the own skill."""
    return (token - 2.5) * (0.75 if context == "own_skill" else 0.25) * (episode + 1)


def hidden_of(context: str, token: int, layer: int) -> float:
    return 0.01 * (layer + 1) * (token + 1) * (2 if context == "own_skill" else 1)


def planted(layers: int = LAYERS) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two episodes of two segments with four and two tokens, in two contexts."""
    rows, contexts = [], []
    for episode, trajectory in enumerate(("first", "second")):
        for context, text in CONTEXTS.items():
            said = {"trajectory": trajectory, "context": context, "text": text}
            contexts.append({**said, "description": f"task {episode}.", "success": episode == 0})
            for i, (token, name) in enumerate(zip(TEXTS, CLASSES, strict=True)):
                gap = gap_of(episode, context, i)
                numbers = {"student_logprob": -1.5, "teacher_logprob": -1.5 + gap, "gap": gap}
                numbers["hidden_change"] = [hidden_of(context, i, layer) for layer in range(layers)]
                numbers |= {"weight/sdar": 1 / (1 + math.exp(-gap)), "weight/opd": gap}
                place = {"segment": int(i > 3), "index": i, "turn": int(i > 3), "text": token, "token_class": name}
                rows.append({"trajectory": trajectory, "task": "t", "context": context, **place, **numbers})
    return pd.DataFrame(rows), pd.DataFrame(contexts)


def save(path: Path, tokens: pd.DataFrame, contexts: pd.DataFrame) -> None:
    tables = {"tokens": tokens, "token_contexts": contexts}
    frames = {name: pa.Table.from_pandas(frame, preserve_index=False) for name, frame in tables.items()}
    save_artifact(path, "measurements", tables=frames)


def test_the_document_holds_every_number_in_reading_order():
    tokens, contexts = planted()
    view = token_view(tokens.sample(frac=1, random_state=0), contexts, "tiny")
    assert (view["reader"], view["layers"], view["methods"]) == ("tiny", LAYERS, ["sdar", "opd"])
    for number, trajectory in enumerate(("first", "second")):
        episode = next(found for found in view["episodes"] if found["trajectory"] == trajectory)
        assert episode["text"] == TEXTS and episode["class"] == CLASSES and episode["turn"] == [0, 0, 0, 0, 1, 1]
        assert episode["description"] == f"task {number}." and episode["success"] is (number == 0)
        for context in episode["contexts"]:
            name = context["name"]
            assert context["skill"] == CONTEXTS[name]
            assert context["gap"] == pytest.approx([gap_of(number, name, i) for i in range(6)], rel=1e-3)
            assert context["teacher"] == pytest.approx([-1.5 + gap_of(number, name, i) for i in range(6)], rel=1e-3)
            assert context["hidden"][4] == pytest.approx([hidden_of(name, 4, layer) for layer in range(3)])
            assert context["weight"][1] == pytest.approx(context["gap"])


def test_the_tables_are_those_that_are_measured():
    tokens, contexts = planted()
    assert {name for name in tokens if not name.startswith(WEIGHT)} == set(TOKEN_COLUMNS)
    assert set(contexts) == set(CONTEXT_COLUMNS)


def test_a_token_that_a_context_lacks_is_null_and_shifts_no_other():
    """`index` runs over what was read in a context: without its first segment it starts anew."""
    tokens, contexts = planted()
    kept = (tokens["context"] == "own_skill") | (tokens["segment"] == 1)
    tokens = tokens[kept].copy()
    tokens.loc[tokens["context"] == "none", "index"] -= 4
    none = next(c for c in token_view(tokens, contexts, "x")["episodes"][0]["contexts"] if c["name"] == "none")
    assert none["gap"][:4] == [None] * 4 and none["hidden"][:4] == [[]] * 4
    assert none["gap"][4:] == pytest.approx([gap_of(0, "none", 4), gap_of(0, "none", 5)])


def test_scales_hold_for_all_contexts_and_are_symmetric_only_with_negative_values():
    tokens, contexts = planted()
    scales = token_view(tokens, contexts, "x")["scales"]
    high = float(np.quantile(tokens["gap"].abs(), 0.98))
    assert scales["gap"] == pytest.approx([-high, high], rel=1e-3)
    assert scales["weight"][1] == pytest.approx([-high, high], rel=1e-3)
    assert scales["weight"][0] == pytest.approx([0, np.quantile(tokens["weight/sdar"], 0.98)], rel=1e-3)
    columns = np.stack(tokens["hidden_change"].to_list())
    assert scales["hidden"] == pytest.approx(list(np.quantile(columns, 0.98, axis=0)), rel=1e-3)
    flat = tokens.assign(gap=1e-7, hidden_change=[[1e-7] * LAYERS] * len(tokens), **{"weight/sdar": 0.0})
    scales = token_view(flat, contexts, "x")["scales"]
    assert scales == {"gap": [-0.1, 0.1], "hidden": [1e-4] * LAYERS, "weight": [[0.0, 1.0], scales["weight"][1]]}


def test_values_that_are_no_numbers_are_null_and_four_digits_stay():
    tokens, contexts = planted()
    tokens.loc[0, "gap"], tokens.loc[1, "gap"], tokens.loc[2, "gap"] = math.nan, -math.inf, 1.23456789e-5
    own = token_view(tokens, contexts, "x")["episodes"][0]["contexts"][0]
    assert own["gap"][:3] == [None, None, 1.235e-5]
    json.loads(script_json(own))


def test_no_text_can_end_the_script_element():
    text = script_json({"text": HOSTILE, "and": "a & b < c\u2028"})
    assert "<" not in text and "&" not in text and ">" not in text
    assert json.loads(text) == {"text": HOSTILE, "and": "a & b < c\u2028"}


def test_measurements_of_a_run_and_of_a_study_are_found_and_named(tmp_path):
    tokens, contexts = planted()
    save(tmp_path / "one" / "measurements" / "tiny", tokens, contexts)
    save(tmp_path / "two" / "measurements" / "tiny", tokens, contexts)
    save(tmp_path / "two" / "measurements" / "other", tokens, contexts)
    save_artifact(tmp_path / "measurements" / "old", "measurements", tables={"measurements": [{"x": 1}]})
    views, left_out = token_views(tmp_path)
    assert [view["reader"] for view in views] == ["one: tiny", "other", "two: tiny"] and left_out == []
    assert [view["reader"] for view in token_views(tmp_path / "one")[0]] == ["tiny"]
    for number in range(MOST):
        save(tmp_path / "z" / "measurements" / f"reader{number}", tokens, contexts)
    views, left_out = token_views(tmp_path)
    assert len(views) == MOST and left_out == [f"reader{number}" for number in range(MOST - 3, MOST)]
    assert "Not on this page: reader3, reader4, reader5." in report_run(tmp_path).read_text()


def test_measurements_without_any_token_give_no_view(tmp_path):
    tokens, contexts = planted()
    save(tmp_path / "measurements" / "tiny", tokens.iloc[:0], contexts.iloc[:0])
    assert token_views(tmp_path) == ([], [])


def test_a_reader_of_thirty_layers_stays_small(tmp_path):
    rng = np.random.default_rng(0)
    tokens, contexts = planted(layers=30)
    tokens = tokens.loc[tokens.index.repeat(50)].reset_index(drop=True)  # 300 tokens an episode and context
    tokens["index"] = tokens.groupby(["trajectory", "context"]).cumcount()
    tokens["hidden_change"] = list(rng.uniform(0, 0.1, (len(tokens), 30)))
    more = [tokens.assign(context=name) for name in ("other_skill", "unrelated", "shuffled")]
    save(tmp_path / "measurements" / "reader", pd.concat([tokens, *more]), contexts)
    assert 0.5e6 < report_run(tmp_path).stat().st_size < 8e6


# In a browser


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium, args=ARGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tokens, contexts = planted()
    save(folder / "measurements" / "tiny", tokens, contexts)
    other, said = planted(layers=2)
    save(folder / "measurements" / "deep", other.drop(columns="weight/opd"), said)
    (folder / "config.json").write_text(json.dumps({"recipe": "r", "words": "x" * 400}))
    return report_run(folder)


@pytest.fixture
def page(browser, report):
    """The report at 1280 x 900, with everything it asked for and complained about."""
    yield from opened(browser, report)


def opened(browser, path: Path, **settings):
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
    found = context.new_page()
    found.asked, found.complaints = [], []
    found.on("request", lambda request: found.asked.append(request.url))
    found.on("console", lambda message: found.complaints.append(message.text))
    found.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.goto(path.as_uri())
    yield found
    context.close()


def panel(page) -> dict[str, str]:
    """Rows of the panel that shows one token."""
    rows = page.locator("#tv-panel tr").all()
    return {row.locator("th").inner_text(): row.locator("td").first.inner_text().replace("−", "-") for row in rows}


def choose(page, reader: str = "tiny") -> None:
    page.select_option("#tv-reader", label=reader)


def test_it_opens_alone_and_without_a_complaint(page, report):
    assert page.complaints == []
    assert [url for url in page.asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.locator("nav a").count() >= 2
    assert page.locator("nav a", has_text="Tokens").get_attribute("href") == "#tokens"


def test_the_counter_counts(browser, tmp_path):
    """A page that asks for a file and complains is told from ours by what the test above counts."""
    path = tmp_path / "bad.html"
    path.write_text('<img src="missing.png"><script>nothing()</script>')
    for found in opened(browser, path):
        assert len(found.asked) == 2 and any("nothing is not defined" in text for text in found.complaints)


def test_hovering_a_token_shows_its_numbers(page):
    choose(page)
    for i in (0, 4):
        page.locator(".token").nth(i).hover()
        shown, gap = panel(page), gap_of(0, "own_skill", i)
        assert float(shown["gap"].removesuffix(" nats")) == pytest.approx(gap, rel=1e-3)
        assert float(shown["student log-prob"]) == -1.5
        assert float(shown["teacher log-prob"]) == pytest.approx(-1.5 + gap, rel=1e-3)
        assert float(shown["hidden change, layer 1"]) == pytest.approx(hidden_of("own_skill", i, 1), rel=1e-3)
        assert float(shown["sdar"]) == pytest.approx(1 / (1 + math.exp(-gap)), rel=1e-3)
        assert float(shown["opd"]) == pytest.approx(gap, rel=1e-3)
    assert "action, turn 2, token 5 of 6" in page.locator("#tv-panel").inner_text()
    heights = [float(bar.get_attribute("height")) for bar in page.locator("#tv-panel rect").all()]
    assert heights == pytest.approx([1 / 3, 2 / 3, 1])


def test_keys_and_touch_reach_the_tokens(page, browser, report):
    choose(page)
    page.locator(".token").first.focus()
    for key, i in (("ArrowRight", 1), ("ArrowDown", 4), ("End", 5), ("ArrowRight", 5), ("ArrowLeft", 4), ("Home", 0)):
        page.keyboard.press(key)
        assert f"token {i + 1} of 6" in page.locator("#tv-panel").inner_text()
        assert page.evaluate("document.activeElement.dataset.i") == str(i)
    assert page.locator(".token[tabindex='0']").count() == 1  # one stop for the tab key
    assert page.locator("#tv-panel").get_attribute("aria-live") == "polite"
    for phone in opened(browser, report, viewport={"width": 390, "height": 844}, has_touch=True):
        phone.locator(".token").nth(1).tap()
        assert "token 2 of 6" in phone.locator("#tv-panel").inner_text()


def test_context_layer_and_episode_change_what_is_shown(page):
    choose(page)
    page.locator(".token").nth(5).hover()
    page.select_option("#tv-context", label="no text")
    assert float(panel(page)["gap"].removesuffix(" nats")) == pytest.approx(gap_of(0, "none", 5))
    assert "(nothing)" in page.locator("#tv-skill").text_content()
    page.locator("#tv-layer").fill("2")
    assert float(panel(page)["hidden change, layer 2"]) == pytest.approx(hidden_of("none", 5, 2))
    page.select_option("#tv-context", label="own skill")
    assert page.locator("#tv-skill").text_content() == CONTEXTS["own_skill"]
    page.select_option("#tv-episode", index=1)
    page.locator(".token").nth(5).hover()
    assert float(panel(page)["gap"].removesuffix(" nats")) == pytest.approx(gap_of(1, "own_skill", 5), rel=1e-3)
    assert "task 1. Not won. 6 tokens; mean gap with own skill 0 nats." in page.locator("#tv-task").inner_text()


def test_colour_follows_the_quantity(page):
    choose(page)
    backgrounds = "[...document.querySelectorAll('.token')].map(e => getComputedStyle(e).backgroundColor)"
    gap = page.evaluate(backgrounds)
    assert gap[0].startswith("rgba(213, 94, 0") and gap[5].startswith("rgba(0, 114, 178")  # below and above 0
    page.select_option("#tv-quantity", label="hidden change, chosen layer")
    hidden = page.evaluate(backgrounds)
    assert all("0, 114, 178" in colour for colour in hidden) and len(set(hidden)) == 6
    assert "1 − cos" in page.locator("#tv-legend").inner_text()
    page.select_option("#tv-quantity", label="weight of sdar")
    assert page.evaluate(backgrounds) not in (gap, hidden)


def test_classes_differ_without_colour_and_turns_are_apart(page):
    look = "e => { const s = getComputedStyle(e); return [s.fontWeight, s.fontStyle, s.textDecorationLine] }"
    looks = {name: tuple(page.locator(f"#tv-tokens .{name}").first.evaluate(look)) for name in set(CLASSES)}
    assert len(set(looks.values())) == 3
    assert page.locator(".turn h4").all_inner_texts() == ["turn 1", "turn 2"]


def test_texts_of_tokens_and_skills_are_texts(page):
    page.locator(".token").nth(3).hover()
    assert page.locator("#tv-panel .said").inner_text() == HOSTILE
    assert page.locator("img").count() == 0 and page.locator("#tv-skill b").count() == 0
    assert page.locator(".token").nth(2).text_content() == "↵\n"


def test_readers_differ_in_layers_and_methods(page):
    choose(page, "deep")
    assert page.locator("#tv-panel rect").count() == 2 and "opd" not in panel(page)
    choose(page, "tiny")
    assert page.locator("#tv-panel rect").count() == 3 and "opd" in panel(page)


def test_there_is_nothing_to_choose_from_one(browser, tmp_path):
    tokens, contexts = planted(layers=0)
    save(tmp_path / "measurements" / "tiny", tokens[tokens["trajectory"] == "first"], contexts)
    for found in opened(browser, report_run(tmp_path)):
        shown = {name for name in ("reader", "episode", "context", "layer") if found.is_visible(f"#tv-{name}")}
        assert shown == {"context"} and found.complaints == []
        assert found.locator("#tv-panel rect").count() == 0 and "gap" in panel(found)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_the_screen_in_both_schemes(browser, report, width, scheme):
    for found in opened(browser, report, viewport={"width": width, "height": 844}, color_scheme=scheme):
        found.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
        found.locator(".token").nth(3).hover()
        assert found.evaluate("document.documentElement.scrollWidth") == width
        assert found.locator("#tv-panel").bounding_box()["width"] <= width
        paper = found.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, paper[4:-1].split(","))) > 384) == (scheme == "light")
        assert found.complaints == []
