"""Game records: both forms are read alike, faults are named, archives are brought into place."""

from __future__ import annotations

import json
import lzma
import shutil
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from training.envs.base import Task
from training.envs.games import DOMAIN, GRAMMAR, import_games, load_tasks, read_record
from training.envs.household import generate

SIZES = {"train": 3, "valid_seen": 2, "valid_unseen": 0}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("games") / "packed", SIZES, workers=1)


@pytest.fixture(scope="module")
def official(packed: Path) -> Path:
    """The packed training games as official folders, and two games that ALFWorld does not play."""
    folder = packed.parent / "official"
    for task in load_tasks(packed, "train"):
        _write_trial(folder / "json_2.1.1" / "train" / task.id, read_record(task))
    game = read_record(load_tasks(packed, "train")[0])
    _write_trial(folder / "json_2.1.1" / "train" / "pick_two_obj-Sliced-1" / "trial_1", game)
    _write_trial(folder / "json_2.1.1" / "train" / "pick_two_obj-Apple-1" / "trial_2", {**game, "solvable": False})
    return folder


def _write_trial(folder: Path, game: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text(json.dumps(game))
    (folder / "traj_data.json").write_text("{}")


def test_both_forms_hold_the_same_tasks_and_games(packed: Path, official: Path) -> None:
    ours, theirs = load_tasks(packed, "train"), load_tasks(official, "train")
    assert sorted((t.id, t.task_type, t.description) for t in ours) == [
        (t.id, t.task_type, t.description) for t in theirs
    ]
    games = {task.id: read_record(task) for task in ours}
    assert all(read_record(task) == games[task.id] for task in theirs)
    assert all(f'Your task is to: {t.description}"' in games[t.id]["grammar"] for t in ours)  # one full stop, not two


def test_real_games_are_all_there(shared: Path) -> None:
    tasks = load_tasks(shared / "data" / "alfworld", "valid_seen")
    counts = Counter(task.task_type for task in tasks)
    assert len({task.id for task in tasks}) == 140
    assert counts == {
        "look_at_obj_in_light": 13,
        "pick_and_place_simple": 35,
        "pick_clean_then_place_in_recep": 27,
        "pick_cool_then_place_in_recep": 25,
        "pick_heat_then_place_in_recep": 16,
        "pick_two_obj_and_place": 24,
    }
    assert f'Your task is to: {tasks[7].description}"' in read_record(tasks[7])["grammar"]
    train = {task.id for task in load_tasks(shared / "data" / "alfworld", "train")}
    assert len(train) == 3553
    assert not train & {task.id for task in tasks}


def test_faults_are_named(packed: Path, tmp_path: Path) -> None:
    def task(source: str) -> Task:
        return Task("t", "alfworld", "train", "pick", "", source)

    path = packed / "games_train.jsonl.xz"
    with pytest.raises(ValueError, match="#99: the file has 3 games"):
        read_record(task(f"{path}#99"))
    with pytest.raises(ValueError, match="no such file"):
        read_record(task(f"{tmp_path / 'games_train.jsonl.xz'}#0"))
    with pytest.raises(ValueError, match=r"game\.tw-pddl: not a readable game file"):
        read_record(task(str(tmp_path)))
    with pytest.raises(ValueError, match="no games of split 'valid_unseen'"):
        load_tasks(packed, "valid_unseen")
    shutil.copy(path, tmp_path / path.name)
    with pytest.raises(ValueError, match=r"alfred\.pddl is missing"):
        read_record(load_tasks(tmp_path, "train")[0])
    (tmp_path / path.name).write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="damaged xz file"):
        load_tasks(tmp_path, "train")


@pytest.mark.parametrize("form", ["packed", "official"])
@pytest.mark.parametrize("container", ["folder", "zip", "tar"])
def test_import_brings_games_into_place(
    form: str, container: str, packed: Path, official: Path, tmp_path: Path
) -> None:
    folder = {"packed": packed, "official": official}[form]
    source = {
        "folder": lambda: folder,
        "zip": lambda: Path(shutil.make_archive(str(tmp_path / "a"), "zip", folder)),
        "tar": lambda: Path(shutil.make_archive(str(tmp_path / "a"), "gztar", folder)),
    }[container]()
    counts = import_games(source, tmp_path / "data")
    assert counts == ({"train": 3} if form == "official" else {"train": 3, "valid_seen": 2})
    assert [t.id for t in load_tasks(tmp_path / "data", "train")] == [t.id for t in load_tasks(folder, "train")]
    assert read_record(load_tasks(tmp_path / "data", "train")[1]) == read_record(load_tasks(folder, "train")[1])
    assert not list((tmp_path / "data").rglob("*.partial"))
    assert import_games(source, tmp_path / "data") == counts  # again is harmless


def test_import_refuses_what_it_cannot_place(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        import_games(tmp_path / "absent.zip", tmp_path / "data")
    (tmp_path / "text.zip").write_text("not an archive")
    with pytest.raises(ValueError, match="neither a folder nor a zip or tar archive"):
        import_games(tmp_path / "text.zip", tmp_path / "data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds neither"):
        import_games(tmp_path / "empty", tmp_path / "data")
    import_games(packed, tmp_path / "data")
    other = tmp_path / "other"
    shutil.copytree(packed, other)
    (other / GRAMMAR).write_text((packed / GRAMMAR).read_text() + "\n")
    with pytest.raises(ValueError, match="choose another destination"):
        import_games(other, tmp_path / "data")
    assert (tmp_path / "data" / DOMAIN).read_bytes() == (packed / DOMAIN).read_bytes()
    assert (tmp_path / "data" / GRAMMAR).read_bytes() == (packed / GRAMMAR).read_bytes()


def test_archives_cannot_write_outside(tmp_path: Path) -> None:
    text = lzma.compress(b"{}\n")
    (tmp_path / "x").write_bytes(text)
    with tarfile.open(tmp_path / "evil.tar", "w") as archive:
        archive.add(tmp_path / "x", "../../games_train.jsonl.xz")
    with pytest.raises((ValueError, tarfile.TarError)):
        import_games(tmp_path / "evil.tar", tmp_path / "a" / "b")
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr("../../games_train.jsonl.xz", text)
    with pytest.raises(ValueError):
        import_games(tmp_path / "evil.zip", tmp_path / "a" / "b")
    assert not list(tmp_path.glob("games_*"))
    assert not list((tmp_path / "a").glob("games_*"))
