"""Artifacts: exact round trips, crash safety (case B69), and refusal of anything cut or altered."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from diagnostics import artifact as module
from diagnostics.artifact import (
    ArtifactError,
    load_artifact,
    load_skills,
    load_trajectories,
    save_artifact,
    save_skills,
    save_trajectories,
    to_table,
)
from diagnostics.records import MEASUREMENT_COLUMNS, Message, Segment, Skill, Trajectory, Turn, measurement


def make_segment(rng: np.random.Generator, length: int) -> Segment:
    return Segment(
        messages=(Message("system", "s"), Message("user", "find the mug é\n")),
        ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        response_mask=rng.random(length) < 0.5,
        turn=rng.integers(-1, 50, length).astype(np.int16),
        token_class=rng.integers(0, 4, length).astype(np.int8),
        rollout_logprobs=-rng.exponential(size=length).astype(np.float32),
    )


def make_trajectory(index: int, segments: int = 2) -> Trajectory:
    rng = np.random.default_rng(index)
    return Trajectory(
        id=f"t{index}",
        task_id=f"task{index % 2}",
        task_type="pick",
        env="household",
        split="train",
        description="put a mug on the desk.",
        group=index % 2,
        attempt=index,
        seed=2**40 + index,
        step=3,
        turns=(Turn("you see a desk", ("go to desk 1", "look"), "<action>look</action>", "look", True),) * index,
        segments=tuple(make_segment(rng, 3 + 2 * index + k) for k in range(segments)),
        reward=0.1 + index,
        success=bool(index % 2),
        stop_reason="won",
        first_observation_sha256="0" * 64,
        error=None if index % 2 else "timeout",
        skill=None if index else "look first",
        score=0.5 if index % 2 else None,
    )


def assert_equal(a: Trajectory, b: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        if field.name != "segments":
            assert getattr(a, field.name) == getattr(b, field.name)
    assert len(a.segments) == len(b.segments)
    for x, y in zip(a.segments, b.segments, strict=True):
        assert x.messages == y.messages
        for name in ("ids", "response_mask", "turn", "token_class", "rollout_logprobs"):
            left, right = getattr(x, name), getattr(y, name)
            assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), name


@pytest.mark.parametrize("segments", [0, 1, 3])
def test_trajectories_round_trip_exactly(tmp_path: Path, segments: int) -> None:
    trajectories = [make_trajectory(i, segments) for i in range(4)]
    saved = save_trajectories(tmp_path / "a", trajectories, seeds=[7], extra={"tokenizer": "abc"})
    loaded = load_trajectories(tmp_path / "a")
    assert [t.id for t in loaded] == [t.id for t in trajectories]
    for a, b in zip(trajectories, loaded, strict=True):
        assert_equal(a, b)
    assert saved.manifest["tokenizer"] == "abc" and saved.manifest["seeds"] == [7]


def test_no_trajectories_round_trip(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a", [])
    assert load_trajectories(tmp_path / "a") == []


def test_loaded_arrays_can_be_written_and_do_not_share_memory(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a", [make_trajectory(1)])
    first, second = load_trajectories(tmp_path / "a")[0].segments
    before = second.ids.copy()
    first.ids[:] = 0
    assert (second.ids == before).all()


def test_bad_trajectories_are_refused(tmp_path: Path) -> None:
    good = make_trajectory(1)
    with pytest.raises(ArtifactError, match="'t1' occurs twice"):
        save_trajectories(tmp_path / "a", [good, good])
    short = dataclasses.replace(good.segments[0], ids=good.segments[0].ids[:-1])
    with pytest.raises(ArtifactError, match="segment 0 of trajectory 't1'"):
        save_trajectories(tmp_path / "a", [dataclasses.replace(good, segments=(short,))])
    assert list(tmp_path.iterdir()) == []


def test_skills_round_trip(tmp_path: Path) -> None:
    skills = {"t0": Skill("look\nfirst", "hindsight", "task0", "t0", False), "t1": Skill("", "control", "task1")}
    save_skills(tmp_path / "s", skills)
    assert load_skills(tmp_path / "s") == skills


def test_tables_tensors_and_documents_round_trip(tmp_path: Path) -> None:
    weights = {"a": np.arange(6, dtype=np.float16).reshape(2, 3).T, "b": np.array(3.5)}
    rows = [measurement(metric="x", value=1.5), measurement(metric="y", value=-0.1)]
    source = save_artifact(tmp_path / "source", "table", tables={"t": [{"a": 1}]})
    saved = save_artifact(
        tmp_path / "deep" / "m",
        "measurements",
        tables={"measurements": to_table(rows, MEASUREMENT_COLUMNS)},
        tensors={"w": weights},
        documents={"counts": {"left_out": np.int64(2), "path": Path("a/b")}},
        config=Skill("x", "control", "t"),
        args=["--steps", "4"],
        inputs=[source],
    )
    loaded = load_artifact(tmp_path / "deep" / "m", "measurements")
    assert loaded == saved
    assert loaded.table("measurements").column_names == list(MEASUREMENT_COLUMNS)
    assert loaded.table("measurements").column("value").to_pylist() == [1.5, -0.1]
    assert loaded.tensors("w")["a"].dtype == np.float16 and (loaded.tensors("w")["a"] == weights["a"]).all()
    assert loaded.document("counts") == {"left_out": 2, "path": "a/b"}
    assert loaded.manifest["config"]["kind"] == "control"
    assert loaded.manifest["inputs"] == [{"path": "../../source", "digest": source.digest}]
    with pytest.raises(ArtifactError, match=r"no other\.json"):
        loaded.document("other")


def test_digest_depends_on_content_only(tmp_path: Path) -> None:
    def save(name: str, value: int, seed: int) -> str:
        return save_artifact(tmp_path / name, "table", tables={"t": [{"a": value}]}, seeds=[seed]).digest

    assert save("a", 1, 0) == save("b", 1, 1)
    assert save("a", 1, 0) != save("c", 2, 0)


def test_no_pickle_and_no_torch(tmp_path: Path) -> None:
    code = "import sys, diagnostics.artifact; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ArtifactError, match="cannot be written as JSON"):
        save_artifact(tmp_path / "a", "table", documents={"d": {"f": print}})
    with pytest.raises(ArtifactError, match="cannot be written as JSON"):
        save_artifact(tmp_path / "a", "table", documents={"d": float("nan")})


@pytest.mark.parametrize(
    "fault", ["cut", "empty", "flip", "missing", "manifest", "no manifest", "digest", "escape", "newer"]
)
def test_altered_artifacts_are_refused_in_one_sentence(tmp_path: Path, fault: str) -> None:
    save_trajectories(tmp_path / "a", [make_trajectory(1)])
    file, manifest = tmp_path / "a" / "trajectories.parquet", tmp_path / "a" / "manifest.json"
    data, content = file.read_bytes(), json.loads(manifest.read_text())
    if fault == "cut":
        file.write_bytes(data[:-10])
    elif fault == "empty":
        file.write_bytes(b"")
    elif fault == "flip":
        file.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    elif fault == "missing":
        file.unlink()
    elif fault == "manifest":
        manifest.write_text(manifest.read_text()[:100])
    elif fault == "no manifest":
        manifest.unlink()
    elif fault == "digest":
        manifest.write_text(json.dumps({**content, "digest": "0" * 64}))
    elif fault == "escape":
        content["files"][0]["name"] = "../a/trajectories.parquet"
        manifest.write_text(json.dumps(content))
    elif fault == "newer":
        manifest.write_text(json.dumps({**content, "schema": 99}))
    with pytest.raises(ArtifactError) as caught:
        load_trajectories(tmp_path / "a")
    message = str(caught.value)
    assert str(tmp_path / "a") in message and "\n" not in message and len(message) < 400
    if fault in ("cut", "empty", "flip", "missing"):
        assert "trajectories.parquet" in message


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_every_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        saved = save_artifact(tmp_path / "a", "tables", tensors={"x": {"y": np.zeros(3)}}, documents={"z": {}})
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in saved.path.iterdir()} == {0o666 & ~mask}


def test_wrong_kind_and_absent_folder_are_refused(tmp_path: Path) -> None:
    save_skills(tmp_path / "s", {})
    with pytest.raises(ArtifactError, match="is a skills artifact, expected trajectories"):
        load_trajectories(tmp_path / "s")
    with pytest.raises(ArtifactError, match="does not exist"):
        load_artifact(tmp_path / "nowhere")


def test_disk_full_keeps_the_previous_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B69."""
    first = save_artifact(tmp_path / "a", "table", tables={"t": [{"a": 1}]})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module, "_sync", full)
    with pytest.raises(ArtifactError, match="No space left on device.*kept"):
        save_artifact(tmp_path / "a", "table", tables={"t": [{"a": 2}]})
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert load_artifact(tmp_path / "a") == first


@pytest.mark.parametrize("part", ["tables", "tensors", "documents"])
def test_a_write_the_disk_refuses_is_one_sentence(tmp_path: Path, part: str) -> None:
    """Case B69 with the real writers: a file size limit stands in for a small disk."""
    save_artifact(tmp_path / "a", "table", tables={"t": [{"a": 1}]})
    content = {
        "tables": "{'t': __import__('pyarrow').table({'a': rng.random(100000)})}",
        "tensors": "{'t': {'a': rng.random(100000)}}",
        "documents": "{'t': rng.random(100000)}",
    }[part]
    code = (
        "import resource, sys, numpy as np\n"
        "from diagnostics.artifact import save_artifact\n"
        "rng = np.random.default_rng(0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        f"try: save_artifact(sys.argv[1], 'table', {part}={content})\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("could not write table artifact") and done.stdout.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert load_artifact(tmp_path / "a").table("t").column("a").to_pylist() == [1]


@pytest.mark.parametrize("moment", ["sync", "between the renames"])
def test_killed_during_a_save(tmp_path: Path, moment: str) -> None:
    """Case B69: the previous artifact stays readable, and the next save clears what the killed one left."""
    save_artifact(tmp_path / "a", "table", tables={"t": [{"a": 1}]})
    patch = {
        "sync": "module._sync = lambda path: os.kill(os.getpid(), signal.SIGKILL)",
        "between the renames": "rename = os.rename\n"
        "def once(a, b):\n    rename(a, b)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "module.os.rename = once",
    }[moment]
    code = (
        f"import os, signal, sys\nfrom diagnostics import artifact as module\n{patch}\n"
        "module.save_artifact(sys.argv[1], 'table', tables={'t': [{'a': 2}]})"
    )
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "a"], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    assert load_artifact(tmp_path / "a").table("t").column("a").to_pylist() == [1]
    save_artifact(tmp_path / "a", "table", tables={"t": [{"a": 3}]})
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert load_artifact(tmp_path / "a").table("t").column("a").to_pylist() == [3]


def test_a_partial_folder_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    living = tmp_path / f"a.partial-{os.getppid()}"
    living.mkdir()
    save_artifact(tmp_path / "a", "table", tables={"t": pa.table({"a": [1]})})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", living.name]
