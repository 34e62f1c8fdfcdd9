"""From words of the command line to measurements: episodes and skills that were made elsewhere, several artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from diagnostics.artifact import (
    Artifact,
    load_artifact,
    load_skills,
    load_trajectories,
    save_skills,
    save_trajectories,
)
from diagnostics.records import Skill
from training.diagnosis import diagnose_subject
from training.options import TINY

REPLY = "<think>a {0}</think><action>go to {1} 1</action>"
THINGS = {"a": ("mug", "desk"), "b": ("plate", "shelf"), "c": ("book", "bed")}


def messages(thing: str, place: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"Find a {thing}. You see a {place}."},
        {"role": "assistant", "content": REPLY.format(thing, place)},
        {"role": "tool", "content": f"You see a {thing}."},
        {"role": "assistant", "content": f"<think>there</think><action>take {thing} 1 from {place} 1</action>"},
    ]


def write(name: str, rows: list[Any]) -> str:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return name


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def episodes(name: str = "mine.jsonl", ids: str = "abc") -> str:
    rows = [{"id": i, "task": f"task {i}", "messages": messages(*THINGS[i[0]]), "reward": 1.0} for i in ids]
    return write(name, rows)


def skills(name: str = "skills.jsonl", ids: str = "abc") -> str:
    return write(name, [{"trajectory": i, "skill": f"The {THINGS[i][0]} is on the {THINGS[i][1]}."} for i in ids])


def diagnosed(trajectories: str, contexts: tuple[str, ...] = ("none",), **options: Any) -> Artifact:
    options = {"measures": ["change"], **options}
    return diagnose_subject("tiny", TINY, trajectories=trajectories, contexts=contexts, **options)


def tokens(artifact: Artifact, context: str) -> dict[str, float]:
    return {
        row["trajectory"]: row["value"]
        for row in artifact.table("measurements").to_pylist()
        if row["metric"] == "tokens" and row["token_class"] == "all" and row["context"] == context
    }


def test_messages_and_their_skills_are_imported_beside_the_measurements() -> None:
    done = diagnosed(episodes(), ("own_skill", "unrelated", "none"), skills=skills(ids="abc"), backend="hf")
    assert done.path == Path("runs/tiny/measurements/tiny")
    played = load_artifact("runs/tiny/trajectories/imported_mine", "trajectories")
    written = load_artifact("runs/tiny/skills/imported_skills", "skills")
    assert [entry["digest"] for entry in done.manifest["inputs"]] == [played.digest, written.digest]
    assert played.manifest["rendered"] == 3 and done.manifest["remarks"] == played.manifest["remarks"]
    assert any("rendered from their texts" in remark for remark in done.manifest["remarks"])
    read = {t.id: t.n_tokens for t in load_trajectories(played.path)}
    assert tokens(done, "own_skill") == tokens(done, "none") == read and min(read.values()) > 10
    assert load_skills(written.path)["b"].text == "The plate is on the shelf."
    again = diagnosed("runs/tiny/trajectories/imported_mine", skills="runs/tiny/skills/imported_skills")
    assert again.manifest["remarks"] == done.manifest["remarks"] and tokens(again, "none") == read


def test_a_folder_of_verl_dumps_is_imported() -> None:
    rows = [
        {
            "input": f"system\nBe brief.\nuser\nFind a {thing}.\nassistant\n",
            "output": REPLY.format(thing, place),
            "score": 1.0,
            "step": 1,
        }
        for thing, place in THINGS.values()
    ]
    write("dumps/1.jsonl", rows)
    done = diagnosed("dumps", ("none", "floor"))
    played = load_trajectories("runs/tiny/trajectories/imported_dumps")
    assert [t.id for t in played] == ["1-1", "1-2", "1-3"]
    assert tokens(done, "floor") == {t.id: t.n_tokens for t in played}


def test_what_is_wrong_with_a_file_is_said_with_its_line() -> None:
    write("bad.jsonl", [{"messages": messages("mug", "desk"), "reward": 1.0}, {"messages": [], "reward": 1.0}])
    with pytest.raises(ValueError, match=r"line 2 of bad.jsonl: there is no list of messages"):
        diagnosed("bad.jsonl")
    Path("text.txt").write_text("no json\n")
    with pytest.raises(ValueError, match=r"line 1 of text.txt is not JSON"):
        diagnosed("text.txt")
    Path("table.parquet").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ValueError, match=r"table.parquet is no text in UTF-8"):
        diagnosed("table.parquet")
    with pytest.raises(ValueError, match=r"there is no JSONL file missing.jsonl"):
        diagnosed("missing.jsonl")
    with pytest.raises(ValueError, match=r"artifact missing does not exist"):
        diagnosed("missing")
    with pytest.raises(ValueError, match=r"line 1 of wrong.jsonl: expected {\"trajectory\": id, \"skill\": text}"):
        diagnosed(episodes(), ("own_skill",), skills=write("wrong.jsonl", [{"id": "a", "text": "x"}]))
    assert not Path("runs/tiny/measurements").exists()


def test_skills_of_imported_episodes_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"contexts own_skill, unrelated are made from skills.* --contexts none,floor"):
        diagnosed(episodes(), ("own_skill", "unrelated", "none"))
    assert tokens(diagnosed("mine.jsonl", ("none", "floor")), "none").keys() == {"a", "b", "c"}
    done = diagnosed("mine.jsonl", ("own_skill",), skills=skills(ids="ab"))  # c has none: left out and counted
    assert done.document("counts")["own_skill"]["no_skill"] == 1 and tokens(done, "own_skill").keys() == {"a", "b"}


def artifact_of(path: str, name: str, ids: str, tokenizer: str | None = None) -> Artifact:
    """Episodes as the run would have played them, with their skills beside them."""
    diagnosed(episodes(f"{name}.jsonl", ids))
    imported = load_artifact(f"runs/tiny/trajectories/imported_{name}")
    played = load_trajectories(imported.path)
    extra = {"tokenizer": tokenizer or imported.manifest["tokenizer"]}
    made = save_trajectories(f"{path}/trajectories/{name}", played, extra=extra)
    written = {t.id: Skill(f"Go to the {THINGS[t.id][1]}.", "hindsight", t.task_id, t.id, True) for t in played}
    save_skills(f"{path}/skills/{name}", written, extra={"played": {"of": made.digest}})
    return made


def test_several_artifacts_are_read_together_with_the_skills_beside_each() -> None:
    one, two = artifact_of("r", "one", "ab"), artifact_of("r", "two", "c")
    done = diagnosed(f"{one.path},{two.path}", ("own_skill", "other_skill"))
    assert set(tokens(done, "own_skill")) == set(tokens(done, "other_skill")) == {"a", "b", "c"}
    assert [Path(entry["path"]).parts[-2:] for entry in done.manifest["inputs"]] == [
        ("trajectories", "one"),
        ("trajectories", "two"),
        ("skills", "one"),
        ("skills", "two"),
    ]
    both = diagnosed(f"{one.path},{episodes('three.jsonl', 'c')}", ("none",))
    assert set(tokens(both, "none")) == {"a", "b", "c"}
    with pytest.raises(ValueError, match=r"trajectory 'a' stands twice in what --trajectories names"):
        diagnosed(f"{one.path},{one.path}")


def test_ids_of_another_tokenizer_are_not_mixed() -> None:
    one, two = artifact_of("r", "one", "ab"), artifact_of("r", "two", "c", tokenizer="another")
    with pytest.raises(ValueError, match=r"made the ids of some of the --trajectories only; read them apart"):
        diagnosed(f"{one.path},{two.path}")
    imported = load_artifact("runs/tiny/trajectories/imported_one")
    extra = {"tokenizer": "another", "rendered": 2, "remarks": []}
    save_trajectories("elsewhere", load_trajectories(imported.path), extra=extra)
    with pytest.raises(ValueError, match=r"elsewhere was imported for another tokenizer; give the file"):
        diagnosed("elsewhere")


def test_a_backend_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="unknown backend 'vlm'; did you mean 'vllm'?"):
        diagnose_subject("no/such/model", TINY, contexts=["none"], measures=["change"], backend="vlm")
