"""Methods by name and from a file, and what is said of each."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from diagnostics.paired import PairedPass
from training import method
from training.batch import Batch
from training.config import ObjectiveConfig
from training.method import Needs, available_methods, describe, is_loaded, load_method
from training.methods import rlsd
from training.objective import objective

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from training.method import Method, Needs, setting

@dataclass(frozen=True)
class OwnConfig:
    size: float = setting(2.0, "ours")
    plain: int = 3

METHOD = Method("own", "none", "reward", OwnConfig, lambda config, step: Needs())
"""


def written(folder: Path, text: str, name: str = "own.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize("name", available_methods())
def test_every_method_is_described(name: str) -> None:
    found = load_method(name)
    said = describe(found)
    assert said["name"] == name == json.loads(json.dumps(said))["name"]
    assert said["channel"] in {
        "reward", "sampled token", "full distribution", "hidden states", "advantage", "prompt"
    }  # fmt: skip
    own = {setting["name"]: setting for setting in said["config"]}
    assert list(own) == [f.name for f in dataclasses.fields(found.config)]
    assert all(setting["source"] in ("paper", "code", "ours") for setting in own.values())
    assert (said["needs"]["skill"] != "none") == (name != "grpo")
    if said["needs"]["teacher"] != "none":  # an ablation can give every arm the same source of skills
        assert own.get("skill", {"default": "hindsight"})["default"] == said["needs"]["skill"]


def test_needs_are_those_of_the_first_step_that_distils() -> None:
    assert describe(load_method("pr_opd"))["step"] == 100
    assert describe(load_method("grpo"))["step"] == 0
    assert describe(rlsd.METHOD)["needs"] == dataclasses.asdict(rlsd.METHOD.needs(rlsd.RlsdConfig(), 0))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'rlds'; did you mean 'rlsd'\?.*\.py file of your own"):
        load_method("rlds")


def test_a_file_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, OWN)
    assert not is_loaded(path) and is_loaded("rlsd")
    own = load_method(path)
    assert own.config() == own.config(size=2.0) and own.needs(own.config(), 0) == Needs()
    assert is_loaded(path)
    monkeypatch.chdir(tmp_path)
    assert load_method("own.py") is own is load_method(path)  # run once: its config is one class
    said = {setting["name"]: setting for setting in describe(own)["config"]}
    assert said["size"] == {"name": "size", "type": "float", "default": 2.0, "source": "ours"}
    assert said["plain"]["source"] is None
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert load_method(written(other, OWN)) is not own  # two files of one name are two methods


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("METHOD = (", "cannot be run .SyntaxError"),
        ("import nothing_of_this_name", "cannot be run .ModuleNotFoundError"),
        ("x = 1", "defines no METHOD"),
        ("METHOD = 'own'", "defines no METHOD"),
        (OWN.replace('"reward", OwnConfig', '"reward", dict'), "is no dataclass"),
    ],
)
def test_files_that_are_no_method(tmp_path: Path, text: str, complaint: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=complaint) as caught:
        load_method(path)
    assert path in str(caught.value) and not is_loaded(path)
    written(tmp_path, OWN)
    assert load_method(path).name == "own"  # put right, it loads


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no method file"):
        load_method(str(tmp_path / "nothing.py"))
    assert method.is_loaded("grpo")


def test_the_worked_example_of_the_docs(tmp_path: Path) -> None:
    """docs/methods.md, "Adding a method": what it says is run, and is the method it says it is."""
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    margin = load_method(written(tmp_path, example, "margin.py"))
    assert margin.needs(margin.config(), 0) == Needs("retrieved", teacher="rollout", teacher_logprobs=True)
    assert margin.needs(margin.config(coefficient=0.0), 0) == Needs()
    student = torch.tensor([-1.0, -1.0, -1.0, float("nan")], requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    ones = torch.ones(4, dtype=torch.long)
    batch = Batch(
        row=ones, trajectory=ones, turn=ones, token_class=ones, mask=mask, distilled=mask, advantages=torch.ones(4),
        rollout_logprobs=student.detach(), old_logprobs=student.detach(), reference_logprobs=None,
        scale=mask / 3, distill_scale=mask / 3, n_tokens=3, n_distilled=3,
    )  # fmt: skip
    pair = PairedPass(ones, mask, student, teacher_logprobs=torch.tensor([-0.5, -0.95, -2.0, float("-inf")]))
    terms = margin.loss(batch, pair, margin.config(), 0, None)
    needs = Needs(policy_coefficient=0.0, regularised=False, teacher_logprobs=True)
    value = objective(batch, pair, ObjectiveConfig(), needs, terms).loss
    value.backward()
    assert value.item() == pytest.approx(0.01 * 0.5 / 3)  # the gap of 0.05 is under the margin, that of -1 negative
    assert student.grad.tolist() == pytest.approx([-0.01 / 3, 0, 0, 0])
