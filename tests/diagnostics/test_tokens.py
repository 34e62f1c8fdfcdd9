"""The token view: texts that join to the reply, numbers of two plain branches, the same two episodes in any order."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diagnostics.artifact import Artifact
from diagnostics.measure import Subject
from diagnostics.paired import run_pairs
from diagnostics.records import Provenance, Trajectory
from diagnostics.render import decode, encode
from diagnostics.run import diagnose
from diagnostics.tokens import Tokens, token_texts
from tests.diagnostics.test_run import PROVENANCE, SKILLS, make_trajectories, tokenizer
from tests.diagnostics.tiny import chat_tokenizer, random_pair, tiny_model, trajectory

CONTEXTS = ["own_skill", "shuffled", "none", "floor"]
BY_HASH = sorted(SKILLS, key=lambda id: hashlib.sha256(id.encode()).digest())


def rows_of(made: Any) -> list[dict[str, Any]]:
    return made["tokens"].to_pylist()


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["go to desk 1", "naïve café", "a 🎉\nb", "数千 字", "\ufffd is real", ""])
@pytest.mark.parametrize("cut", [0, 1])
def test_texts_of_tokens_join_to_the_text(text: str, cut: int) -> None:
    """Every byte is a token: characters of several bytes, also one that the end of the reply cuts off."""
    ids = encode(chat_tokenizer(), text)
    ids = ids[: len(ids) - cut]
    texts = token_texts(chat_tokenizer(), ids)
    assert len(texts) == len(ids) and "".join(texts) == decode(chat_tokenizer(), ids)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    ids = encode(chat_tokenizer(), "xé字!")
    assert token_texts(chat_tokenizer(), ids) == ["x", "", "é", "", "", "字", "!"]


# --- what is kept ----------------------------------------------------------------------------------------------------


def diagnosed(out: Path, plays: list[Trajectory], **options: Any) -> Artifact:
    options = {"weights": {"half": lambda gap, turn, row: torch.full_like(gap, 0.5)}, "skills": SKILLS, **options}
    return diagnose(
        tiny_model(layers=2),
        tokenizer(),
        plays,
        contexts=CONTEXTS,
        measures=["tokens"],
        provenance=PROVENANCE,
        out=out,
        **options,
    )


def test_the_view_holds_two_episodes_in_every_context_but_the_floor(tmp_path: Path) -> None:
    plays = {play.id: play for play in make_trajectories()}
    done = diagnosed(tmp_path / "m", list(plays.values()))
    rows, contexts = (done.table(name).to_pylist() for name in ("tokens", "token_contexts"))
    expected = [(id, context) for id in BY_HASH[:2] for context in CONTEXTS[:3]]
    assert [(row["trajectory"], row["context"]) for row in contexts] == expected
    for row in contexts:
        own = SKILLS[row["trajectory"]]
        text = {"own_skill": own, "none": ""}.get(row["context"], row["text"])
        assert row["text"] == text and sorted(row["text"].split()) == sorted(text.split())
        assert row["description"] == plays[row["trajectory"]].description and row["success"] is False
    for id, context in expected:
        mine = [row for row in rows if (row["trajectory"], row["context"]) == (id, context)]
        (part,) = plays[id].segments
        response = part.ids[part.response_mask]
        assert "".join(row["text"] for row in mine) == decode(tokenizer(), response)
        assert [row["index"] for row in mine] == list(range(len(response)))
        assert [row["turn"] for row in mine] == part.turn[part.response_mask].tolist()
        assert {row["segment"] for row in mine} == {0} and {row["weight/half"] for row in mine} == {0.5}
        names = {"think": 1, "action": 2, "format": 3}
        assert [names[row["token_class"]] for row in mine] == part.token_class[part.response_mask].tolist()
        gaps = [row["teacher_logprob"] - row["student_logprob"] for row in mine]
        assert [row["gap"] for row in mine] == pytest.approx(gaps, abs=1e-5)
        assert all(len(row["hidden_change"]) == 2 for row in mine)
        assert any(row["gap"] for row in mine) == any(sum(row["hidden_change"]) for row in mine) == (context != "none")


def test_the_episodes_depend_neither_on_order_nor_on_batches_and_have_a_skill(tmp_path: Path) -> None:
    one = diagnosed(tmp_path / "one", make_trajectories(), micro_batch_tokens=1)
    two = diagnosed(tmp_path / "two", make_trajectories()[::-1])
    first, second = (artifact.table("tokens").to_pylist() for artifact in (one, two))
    key = ("trajectory", "context", "index", "text")
    assert [[row[name] for name in key] for row in first] == [[row[name] for name in key] for row in second]
    assert [row["gap"] for row in first] == pytest.approx([row["gap"] for row in second], abs=1e-4)
    some = {id: text for id, text in SKILLS.items() if id != BY_HASH[0]}
    done = diagnosed(tmp_path / "some", make_trajectories(), skills=some)
    assert set(done.table("tokens").column("trajectory").to_pylist()) == set(BY_HASH[1:3])


def test_segments_of_an_episode_are_put_in_order_and_weighed_together() -> None:
    """One segment a turn, as under `windowed`, read in any order and with one left out of a context."""
    model = tiny_model(layers=2)
    play = trajectory([("A desk.", "go")], id="t")
    seen: list[tuple[list[int], list[int]]] = []

    def weight(gap: torch.Tensor, turn: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        seen.append((turn.tolist(), row.tolist()))
        return gap * 2

    texts = {"own_skill": {"t": "a"}, "shuffled": {"t": "b"}}
    subject = Subject(model, chat_tokenizer(), [play], {"t": "a"}, 0, 1.0, {"double": weight}, texts)
    stream = Tokens(subject)
    pairs = {
        (context, turn): dataclasses.replace(
            random_pair(turn, responses=3), trajectory_id="t", context=context, turn=np.full(3, turn, np.int16)
        )
        for context in texts
        for turn in (2, 0, 1)
    }
    for (context, turn), pair in pairs.items():
        if (context, turn) != ("shuffled", 1):
            stranger = dataclasses.replace(random_pair(9), context=context)
            stream.update([stranger, pair], run_pairs(model, [stranger, pair], states="before"))
    rows = rows_of(stream.result(Provenance()))
    place = [(row["context"], row["segment"], row["turn"], row["index"]) for row in rows]
    assert place[:9] == [("own_skill", turn, turn, 3 * turn + i) for turn in range(3) for i in range(3)]
    assert place[9:] == [("shuffled", turn, turn, 3 * k + i) for k, turn in enumerate((0, 2)) for i in range(3)]
    assert seen == [([0] * 3 + [1] * 3 + [2] * 3, [0] * 9), ([0] * 3 + [2] * 3, [0] * 6)]
    assert [row["weight/double"] for row in rows] == pytest.approx([2 * row["gap"] for row in rows])
    passed = run_pairs(model, [pairs["own_skill", 1]], states="before")
    assert [row["student_logprob"] for row in rows[3:6]] == pytest.approx(passed.student_logprobs.tolist(), abs=1e-5)
    cosine = torch.cosine_similarity(passed.student_states, passed.teacher_states, dim=-1)
    change = np.array([row["hidden_change"] for row in rows[3:6]])
    assert pytest.approx((1 - cosine).numpy(), abs=1e-4) == change.T and change.min() > 1e-3


def test_nothing_read_is_an_empty_table() -> None:
    made = Tokens(Subject(None, None, [], {}, 0, 1.0, {})).result(Provenance())
    assert made["tokens"].num_rows == made["token_contexts"].num_rows == 0
