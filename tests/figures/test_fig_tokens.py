"""The token strip: which tokens are chosen, and that every number of them stands where it belongs."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from figures.fig_tokens import RUN, SHOWN, draw, selected, write

INPUTS = {"measurements/tiny": "0123abcd"}
TURN = 30  # tokens
BLOCKS = 3


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    """Two episodes of five turns of 30 tokens, each turn with one large gap."""
    rng = np.random.default_rng(0)
    rows = [
        {"reader": "tiny", "trajectory": trajectory, "task": "k", "context": context, "segment": 0, "index": index,
         "turn": index // TURN, "text": ["go", " to", "$x$", "\n"][index % 4],
         "token_class": ["think", "action", "format"][index % 3], "student_logprob": -1.0, "teacher_logprob": -1.5,
         "gap": -5.0 - index // TURN if index % TURN == 15 else 0.01 * (index % 7),
         "hidden_change": rng.uniform(0, 1, BLOCKS).astype(np.float32),
         "weight/sdar": rng.uniform(), "weight/constant": 1.0}
        for trajectory in ("t1", "t0") for context in ("own_skill", "none") for index in range(5 * TURN)
    ]  # fmt: skip
    contexts = [
        {"reader": "tiny", "trajectory": trajectory, "context": context, "text": "x", "description": "find a mug.",
         "success": trajectory == "t1"}
        for trajectory in ("t1", "t0") for context in ("own_skill", "none")
    ]  # fmt: skip
    return {"tokens": pd.DataFrame(rows), "token_contexts": pd.DataFrame(contexts)}


def test_the_runs_around_the_largest_gaps_are_chosen_in_the_order_of_reading(tables):
    tokens = tables["tokens"]
    shown = selected(tokens[tokens["context"] == "own_skill"])
    assert len(shown) == SHOWN and set(shown["trajectory"]) == {"t1"}
    places = [run["index"].tolist() for _, run in shown.groupby("run")]
    assert places == [list(range(start, start + RUN)) for start in (2 * TURN + 8, 3 * TURN + 8, 4 * TURN + 8)]


def test_a_run_never_leaves_its_turn_and_short_turns_make_room_for_more(tables):
    tokens = tables["tokens"]
    tokens = tokens[(tokens["context"] == "own_skill") & (tokens["index"] % TURN < 18)]
    shown = selected(tokens)
    assert [len(run) for _, run in shown.groupby("run")] == [18, 18, 18]
    assert (shown.groupby("run")["turn"].nunique() == 1).all() and shown["index"].is_monotonic_increasing
    few = selected(tokens[tokens["index"] % TURN < 4])
    assert len(few) == 20 and not few["index"].duplicated().any()


def test_every_number_stands_at_its_token(tmp_path, tables):
    saved = write(tmp_path, INPUTS, tables)
    tokens = pd.read_csv(saved.data["tokens"], keep_default_na=False)
    own = tables["tokens"][lambda table: table["context"] == "own_skill"]
    pd.testing.assert_frame_equal(tokens, selected(own), check_dtype=False)
    figure = draw(selected(own), pd.read_csv(saved.data["episodes"]))
    gaps, states, weights = figure.axes[:3]
    places = np.arange(SHOWN) + selected(own)["run"].to_numpy()
    assert [bar.get_height() for bar in gaps.patches] == selected(own)["gap"].tolist()
    heat = np.ma.filled(states.images[0].get_array(), np.nan)
    assert heat.shape == (BLOCKS, SHOWN + 2) and np.isnan(heat).any(0).sum() == 2  # an empty place between runs
    np.testing.assert_array_equal(heat[:, places].T, selected(own).filter(like="hidden_change/"))
    given = np.ma.filled(weights.images[0].get_array(), np.nan)[:, places]
    assert given[0].tolist() == selected(own)["weight/sdar"].tolist() and set(given[1]) == {1.0}
    assert [label.get_text() for label in weights.get_yticklabels()] == ["sdar", "constant"]
    assert [label.get_text() for label in weights.get_xticklabels()][:4] == ["go", "␣to", r"\$x\$", "↵"]
    assert "find a mug" in gaps.get_title(loc="left") and "not solved" not in gaps.get_title(loc="left")


def test_two_readers_no_weights_and_no_own_skill(tmp_path, tables):
    bare = {name: table.drop(columns=[c for c in table if c.startswith("weight/")]) for name, table in tables.items()}
    both = {name: pd.concat([table, table.assign(reader="larger")], ignore_index=True) for name, table in bare.items()}
    assert write(tmp_path, INPUTS, both).png.stat().st_size > 1000
    other = {name: table[table["context"] == "none"] for name, table in tables.items()}
    with pytest.raises(ValueError, match="needs tokens under own_skill"):
        write(tmp_path, INPUTS, other)
