"""The diagnose run through every backend: the same numbers, the measured parity beside them, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diagnostics.artifact import Artifact
from diagnostics.capture import capture_states, layer_names
from diagnostics.capture.parity import beginnings
from diagnostics.measures import MEASURES, measure
from diagnostics.paired import run_pairs
from diagnostics.run import diagnose
from tests.diagnostics.test_run import PROVENANCE, SKILLS, Unread, make_trajectories, tokenizer
from tests.diagnostics.tiny import random_pair, tiny_model

OTHERS = [
    pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} not installed"))
    for name in ("transformer_lens", "nnsight")
]
CONTEXTS = ["own_skill", "other_skill", "unrelated", "none", "floor"]


def run(out: Path, backend: str, measures: tuple[str, ...] = ("change", "cka"), **options: Any) -> Artifact:
    options = {"trajectories": make_trajectories(), "tokenizer": tokenizer(), "model": tiny_model(layers=2), **options}
    options = {"skills": SKILLS, "contexts": CONTEXTS, "provenance": PROVENANCE, **options}
    return diagnose(out=out, measures=measures, backend=backend, **options)


def rows_of(artifact: Artifact) -> dict[tuple[str, ...], float]:
    keys = ("trajectory", "context", "token_class", "layer", "metric")
    return {tuple(row[k] for k in keys): row["value"] for row in artifact.table("measurements").to_pylist()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return run(tmp_path_factory.mktemp("hf") / "m", "hf")


@pytest.mark.parametrize("name", OTHERS)
def test_every_backend_measures_the_same(name: str, reference: Artifact, tmp_path: Path) -> None:
    model = tiny_model(layers=2)
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    done = run(tmp_path / "m", name, model=model)
    ours, theirs = rows_of(reference), rows_of(done)
    parity = {key: theirs.pop(key) for key in list(theirs) if key[-1].startswith("parity/")}
    assert theirs.keys() == ours.keys() and len(ours) > 300
    means = [key for key in ours if key[-1].endswith("/mean") or key[-1].startswith("cka/")]
    apart = [abs(theirs[key] - ours[key]) for key in means]
    assert max(apart) <= 1e-4 and max(ours[key] for key in means if key[-1] == "hidden_change/mean") > 0.01
    assert {theirs[key] for key in means if key[1] == "none" and not key[-1].startswith("cka/")} == {0.0}
    layers = [(f"parity/{name}/states", layer) for layer in layer_names(model)]
    assert [(key[-1], key[3]) for key in parity] == [*layers, (f"parity/{name}/logprobs", "")]
    assert 0 <= max(parity.values()) <= 1e-4
    assert done.manifest["backend"] == name and reference.manifest["backend"] == "hf"
    (remark,) = done.manifest["remarks"]
    worst = max(value for key, value in parity.items() if key[-1].endswith("/states"))
    assert remark.startswith(f"Backend {name} against the forward hooks on ")
    assert f"deviation of a state {worst:.1e}, of a log-prob" in remark and reference.manifest["remarks"] == []
    assert all(torch.equal(weight, weights[key]) for key, weight in model.state_dict().items())


def test_a_backend_that_reads_other_states_is_told_by_its_parity(
    monkeypatch: pytest.MonkeyPatch, reference: Artifact, tmp_path: Path
) -> None:
    """Negative control: what is measured is what the backend read, and the parity rows say how far off it was."""

    def off(*asked: Any, **named: Any) -> Any:
        found = capture_states(*asked, **named)
        scale = torch.linspace(0, 2, found.final.shape[-1])
        return dataclasses.replace(found, states={name: state * scale for name, state in found.states.items()})

    monkeypatch.setattr("diagnostics.run.capture_backend", lambda name: off)
    done = run(tmp_path / "m", "nnsight")
    found, ours = rows_of(done), rows_of(reference)
    assert max(value for key, value in found.items() if key[-1] == "parity/nnsight/states") > 0.01
    assert found["", "", "", "", "parity/nnsight/logprobs"] == 0
    key = ("t1", "own_skill", "all", "mean", "hidden_change/mean")
    assert abs(found[key] - ours[key]) > 1e-4


def test_whatever_streams_is_read_through_the_backend_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(*asked: Any, **named: Any) -> Any:
        raise AssertionError("the forward hooks were asked")

    monkeypatch.setattr("diagnostics.run.capture_backend", lambda name: capture_states)
    monkeypatch.setattr("diagnostics.forward.capture_states", refused)
    plays = [dataclasses.replace(t, task_id=f"task {i // 2}", success=True) for i, t in enumerate(make_trajectories())]
    streams = tuple(name for name in MEASURES if measure(name).start)
    given = {"trajectories": plays, "weights": {"gap": lambda gap, turn, row: gap}}
    done = run(tmp_path / "m", "nnsight", streams, **given)
    quality = done.table("perturbation").column("quality_own").drop_null()
    assert len(quality) > 0 and len(done.manifest["remarks"]) == 1
    with pytest.raises(AssertionError, match="the forward hooks were asked"):  # negative control
        run(tmp_path / "n", "hf", ("gaps",))


def test_measures_that_patch_the_model_stay_on_the_hooks_and_say_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read: list[Any] = []

    def counted(*asked: Any, **named: Any) -> Any:
        read.append(asked)
        return capture_states(*asked, **named)

    monkeypatch.setattr("diagnostics.run.capture_backend", lambda name: counted)
    done = run(tmp_path / "m", "nnsight", ("patching",), contexts=["own_skill"])
    assert len(read) == 1  # the parity batch alone
    remark = "Measures that patch or differentiate the model read it through hf, not nnsight: patching."
    assert done.manifest["remarks"][1:] == [remark] and done.table("patching").num_rows > 0


def test_remarks_are_kept_in_front_of_those_on_the_backend(tmp_path: Path) -> None:
    done = run(tmp_path / "m", "hf", ("change",), contexts=["none"], remarks=["Ids were rendered."], extra={"a": 1})
    assert done.manifest["remarks"] == ["Ids were rendered."] and done.manifest["a"] == 1


def test_a_backend_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown backend 'nnsigth'; did you mean 'nnsight'?"):
        run(tmp_path / "m", "nnsigth", model=Unread())
    monkeypatch.setattr("diagnostics.capture.find_spec", lambda library: None)
    with pytest.raises(ValueError, match="'vllm' needs vllm, which is not installed: run pip install vllm"):
        run(tmp_path / "m", "vllm", model=Unread())
    with pytest.raises(ValueError, match="gradients flow through the forward hooks alone"):
        run_pairs(Unread(), [random_pair(0)], student_grad=True, capture=capture_states)
    assert not (tmp_path / "m").exists()


def test_the_batch_of_the_parity_is_two_beginnings_of_unequal_length() -> None:
    (some,) = make_trajectories(1)[0].segments
    segments = [dataclasses.replace(some, ids=np.arange(1, n + 1, dtype=np.int32)) for n in (200, 90, 50)]
    ids, mask = beginnings(segments)
    assert ids.tolist() == [list(range(1, 129)), [*range(1, 65), *[0] * 64]]
    assert mask.tolist() == [[1] * 128, [1] * 64 + [0] * 64]
    assert beginnings(segments[2:])[0].shape == (1, 50)
