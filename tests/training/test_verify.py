from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Say
from training.method import available_methods
from training.methods import sdar
from training.verify import CHECKS, NOT_OURS, TOLERANCE, Deviation, verify

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.json"


@pytest.fixture
def document() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


@pytest.fixture
def changed(tmp_path: Path, document: dict[str, Any]) -> Any:
    """Writes a golden file in which some places hold other values: `a.b.2` is document["a"]["b"][2]."""

    def write(**places: Any) -> Path:
        made = copy.deepcopy(document)
        for place, value in places.items():
            *path, last = place.split(".")
            at = made
            for key in path:
                at = at[int(key)] if isinstance(at, list) else at[key]
            at[int(last) if isinstance(at, list) else last] = value
        (tmp_path / "golden.json").write_text(json.dumps(made))
        return tmp_path / "golden.json"

    return write


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_answer_is_met_in_every_precision(dtype: Any, document: dict[str, Any]) -> None:
    found = verify(GOLDEN, dtype=dtype)
    assert [off.name for off in found] == [name for name in document["answers"] if name not in NOT_OURS]
    assert all(off.within(TOLERANCE[dtype]) for off in found), found
    assert all(off.value is not None and (off.gradient is not None or off.name == "advantage_ddof1") for off in found)
    if dtype != "float64":  # the precision asked for is the one computed in
        assert max(off.gradient or 0 for off in found) > TOLERANCE["float64"]


def test_the_tolerances_tell_the_precisions_apart() -> None:
    half, single = (verify(GOLDEN, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert any(not off.within(TOLERANCE["float32"]) for off in half)
    assert any(not off.within(TOLERANCE["float64"]) for off in single)


def test_what_the_file_holds_is_recomputed_and_nothing_else(changed: Any, document: dict[str, Any]) -> None:
    answers = document["answers"]
    few = {"sdar": {"grad": answers["sdar"]["grad"]}, "grpo": {"loss_token_mean": answers["grpo"]["loss_token_mean"]}}
    one, two = verify(changed(answers=few))
    assert (one.name, one.value, two.name, two.gradient) == ("sdar", None, "grpo", None)
    assert one.gradient is not None and one.gradient < 1e-12


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("sdar.grad.0.3", "sdar"),
        ("sdar.other_gates.soft_or.1.2", "sdar"),
        ("sdar.loss_sequence_mean", "sdar"),
        ("grpo.dual_clipped_tokens", "grpo"),
        ("kl_k3.grad.2.4", "kl_k3"),
        ("grpo_opsd.code_grad.0.2", "grpo_opsd"),
        ("pcsd.weight.1.3", "pcsd"),
        ("skill_sd.clamped_token.grad", "skill_sd"),
        ("rlsd.advantage.0.4", "rlsd"),
        ("sod.advantage.0.4", "sod"),
        ("opid_episode.loss_token_mean", "opid_episode"),
        ("opd_policy_gradient.grad.1.1", "opd_policy_gradient"),
        ("pr_opd_alignment.per_layer_token.1.2", "pr_opd_alignment"),
        ("advantage_ddof1.2", "advantage_ddof1"),
    ],
)
@pytest.mark.parametrize("wrong", [7.5, float("nan")])
def test_one_wrong_number_is_found_where_it_stands(changed: Any, place: str, name: str, wrong: float) -> None:
    found = verify(changed(**{f"answers.{place}": wrong}))
    assert [off.name for off in found if not off.within(TOLERANCE["float64"])] == [name]


def test_a_method_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sdar.METHOD.loss
    assert right is not None

    def flipped(*arguments: Any) -> Any:
        return [replace(term, value=-term.value) for term in right(*arguments)]

    monkeypatch.setattr(sdar, "METHOD", replace(sdar.METHOD, loss=flipped))
    [wrong] = [off for off in verify(GOLDEN) if not off.within(TOLERANCE["float64"])]
    assert wrong.name == "sdar" and wrong.gradient == pytest.approx(2.0)


def test_what_stands_outside_the_mask_is_nothing(changed: Any, document: dict[str, Any]) -> None:
    holes = {
        f"inputs.{name}.{row}.{column}": float("-inf")
        for name in ("student", "teacher", "rollout", "reference")
        for row, marks in enumerate(document["inputs"]["mask"])
        for column, mark in enumerate(marks)
        if not mark
    }
    assert holes and all(off.within(TOLERANCE["float64"]) for off in verify(changed(**holes)))


def test_deviations() -> None:
    assert Deviation("x", 0.1, None).within(0.1) and Deviation("x", None, None).within(0.0)
    assert not Deviation("x", 0.0, 0.2).within(0.1) and not Deviation("x", float("nan"), 0.0).within(1.0)


def test_every_method_with_worked_numbers_is_among_ours() -> None:
    names = {
        name.removesuffix("_episode").removesuffix("_policy_gradient").removesuffix("_alignment") for name in CHECKS
    }
    assert names - {"advantage_ddof1", "kl_k3"} <= set(available_methods())


@pytest.mark.parametrize(
    ("places", "parts"),
    [
        ({"answers.sdra": {"grad": []}}, ["'sdra'", "'sdar'"]),
        ({"answers.sdar": {"gradient": []}}, ["'sdar'", "loss_sequence_mean"]),
        ({"answers.sdar.grad": [[1.0]]}, ["'sdar'", "grad has 1 entries"]),
        ({"answers.sdar.grad": [[1.0], [1.0, 2.0]]}, ["'sdar'", "cannot be compared"]),
        ({"answers.pcsd.config.alfa": 0.8}, ["'pcsd'", "alfa"]),
        ({"answers": {}}, ["no answers"]),
        ({"inputs.teacher": [[0.0]]}, ["'teacher'"]),
        ({"inputs.rewards": [1.0]}, ["'rewards'"]),
        ({"inputs.mask": None}, ["no golden file", "mask"]),
        ({"inputs.student.0.0": "x"}, ["'grpo'", "cannot be compared"]),
    ],
)
def test_a_wrong_file_is_one_sentence(changed: Any, say: Say, places: dict[str, Any], parts: list[str]) -> None:
    code, _, complaint = say("doctor", "--losses", changed(**places))
    assert code == 2 and complaint.count("\n") == 1 and all(part in complaint for part in parts), complaint


def test_the_doctor_says_what_is_off(say: Say, changed: Any, tmp_path: Path) -> None:
    code, printed, _ = say("doctor", "--losses", GOLDEN, "--dtype", "float32")
    assert code == 0 and "float32 on cpu" in printed and "BAD" not in printed and printed.count("ok ") == len(CHECKS)
    code, printed, _ = say("doctor", "--losses", changed(**{"answers.sod.loss_token_mean": 1.0}))
    lines = [line for line in printed.splitlines() if line.startswith("BAD")]
    assert code == 1 and len(lines) == 1 and "sod" in lines[0]
    for words, part in (
        (("nowhere.json",), "nowhere.json"),
        ((GOLDEN, "--device", "abacus"), "'abacus'"),
        ((GOLDEN, "--dtype", "float8"), "float64"),
    ):
        code, _, complaint = say("doctor", "--losses", *words)
        assert code == 2 and part in complaint and complaint.count("\n") == 1, complaint
