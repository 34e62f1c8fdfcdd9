"""Checkpoints that are complete or refused, and a log in which every step stands once."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import training.checkpoint as checkpoint
from diagnostics.artifact import ArtifactError
from tests.training.bandit import TOKENIZER, model, same, weights
from training.checkpoint import Learned, latest_complete, load_checkpoint, load_weights, save_checkpoint
from training.models.projector import Projector
from training.monitor import Log, Means, effective_rank, read_metrics


def learned(seed: int = 0, projector: bool = True, steps: int = 2) -> Learned:
    policy = model(seed)
    modules = Projector(2, 64, 8, lr=1e-3) if projector else None
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    other = torch.optim.AdamW(modules.parameters(), lr=1e-3) if modules is not None else None
    ours = Learned(policy, optimizer, modules, other)
    for _ in range(steps):
        for _, module, of in ours.parts:
            of.zero_grad()
            sum(p.square().sum() for p in module.parameters()).backward()
            of.step()
    return ours


def state(ours: Learned) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}.{key}": value
        for part, module, optimizer in ours.parts
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def test_round_trip_is_exact(tmp_path: Path) -> None:
    ours = learned()
    save_checkpoint(tmp_path, 3, ours, TOKENIZER, {"update": 7})
    theirs = learned(seed=4, steps=1)
    assert load_checkpoint(tmp_path / "checkpoints/step_3", theirs) == {"update": 7, "step": 3}
    assert same(weights(ours.model), weights(theirs.model))
    assert same(dict(ours.modules.state_dict()), dict(theirs.modules.state_dict()))
    assert same(state(ours), state(theirs)) and len(state(ours)) > 10


def test_a_checkpoint_is_a_model_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = learned()
    save_checkpoint(tmp_path, 1, ours, TOKENIZER, {})
    folder = tmp_path / "checkpoints/step_1"
    assert same(weights(AutoModelForCausalLM.from_pretrained(folder)), weights(ours.model))
    assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == TOKENIZER("a b")["input_ids"]
    assert json.loads((folder / "manifest.json").read_text())["kind"] == "checkpoint"
    assert not [file for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pkl")]


def test_modules_of_another_method_are_not_wanted(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, learned(projector=False), TOKENIZER, {})
    branch = learned(seed=1)
    before = {name: value.clone() for name, value in branch.modules.state_dict().items()}
    load_checkpoint(tmp_path / "checkpoints/step_1", branch)
    assert same(before, dict(branch.modules.state_dict()))


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    from tests.diagnostics.tiny import tiny_model

    save_checkpoint(tmp_path, 1, learned(), TOKENIZER, {})
    with pytest.raises(ArtifactError, match="another architecture"):
        load_weights(tiny_model(layers=3), tmp_path / "checkpoints/step_1")


def truncate(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: truncate(folder / "optimizer.safetensors"),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "state.json").write_text('{"step": 9}'),
    ],
)
def test_b69_a_broken_checkpoint_is_passed_over_by_name(tmp_path: Path, break_it: Any, caplog: Any) -> None:
    ours = learned()
    for step in (2, 10):
        save_checkpoint(tmp_path, step, ours, TOKENIZER, {})
    assert latest_complete(tmp_path) == tmp_path / "checkpoints/step_10"  # by number, not by name
    break_it(tmp_path / "checkpoints/step_10")
    with caplog.at_level(logging.WARNING):
        assert latest_complete(tmp_path) == tmp_path / "checkpoints/step_2"
    assert "step_10" in caplog.text and "continuing from step_2" in caplog.text
    assert latest_complete(tmp_path / "nowhere") is None


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_b69_a_save_that_stops_half_way_leaves_the_previous_one(tmp_path: Path, monkeypatch: Any, fault: Any) -> None:
    ours = learned()
    save_checkpoint(tmp_path, 1, ours, TOKENIZER, {})

    def full(*_: Any) -> None:
        raise fault

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises((ArtifactError, KeyboardInterrupt)) as caught:
        save_checkpoint(tmp_path, 2, ours, TOKENIZER, {})
    if isinstance(fault, OSError):
        assert "No space left on device" in str(caught.value) and "step_2" in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert latest_complete(tmp_path) == tmp_path / "checkpoints/step_1"


def test_b69_leftovers_of_a_killed_save_are_removed(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, learned(), TOKENIZER, {})
    leftover = tmp_path / "checkpoints/step_2.partial-999999999"
    living = tmp_path / f"checkpoints/step_3.partial-{os.getppid()}"  # of a run that is being looked at
    for partial in (leftover, living):
        partial.mkdir()
        (partial / "model.safetensors").write_bytes(b"half")
    assert latest_complete(tmp_path) == tmp_path / "checkpoints/step_1"
    assert not leftover.exists() and living.exists()


# --- the log ---------------------------------------------------------------------------------------------------------


def test_b71_every_step_once_and_the_attempt_beside_it(tmp_path: Path) -> None:
    first = Log(tmp_path, 0)
    for step in range(11):
        first.write(step, {"loss": float(step)})
    second = Log(tmp_path, 5)
    for step in range(6, 13):
        second.write(step, {"loss": -float(step)})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(13))
    assert [row["attempt"] for row in rows] == [0] * 6 + [1] * 7
    assert rows[7]["loss"] == -7


def test_a_row_cut_by_a_kill_is_dropped(tmp_path: Path) -> None:
    Log(tmp_path, 0).write(1, {"a": 1.0, "b": float("nan")})
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 2, "att')
    assert read_metrics(tmp_path) == [{"step": 1, "attempt": 0, "a": 1.0, "b": None}]
    Log(tmp_path, 1).write(2, {"a": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match="line 1"):
        read_metrics(tmp_path)


def test_means_weigh_micro_batches_by_their_tokens() -> None:
    means = Means()
    means.add({"x": (torch.tensor(2.0), 2), "empty": (torch.tensor(0.0), 0)})
    means.add({"x": (torch.tensor(4.0), torch.tensor(8))})
    assert means.result() == {"x": pytest.approx(0.6)}


def test_effective_rank_counts_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(1, 200, 8, generator=generator)
    line = torch.randn(1, 200, 1, generator=generator) * torch.randn(1, 1, 8, generator=generator)
    shifted = line + 100 * torch.randn(1, 1, 8, generator=generator)
    ranks = effective_rank(torch.cat([full, line, shifted, torch.ones(1, 200, 8)]))
    assert ranks.tolist() == pytest.approx([8, 1, 1, 1], rel=0.05)
    torch.testing.assert_close(effective_rank(full * 7), effective_rank(full))
