"""`sampler.engine vllm` in a session: a server on the folder of the weights, checked once, ended with the session."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.test_vllm_sampler import TOKENIZER, VOCAB, Bigram
from training import session as session_file
from training.arguments import sampler_words
from training.config import RECIPES
from training.samplers.server import Command
from training.session import Session
from training.start import start

FAKE = Path(__file__).with_name("fake_vllm.py")
TINY = RECIPES["tiny-grpo"]
CONFIG = replace(TINY, sampler=replace(TINY.sampler, engine="vllm", max_new_tokens=8))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    np.save(tmp_path / "table.npy", np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 3)

    def command(folder: str, dtype: str) -> Command:
        assert folder == str(tmp_path) and dtype == "float32"
        return lambda path: [sys.executable, str(FAKE), folder, str(path)]

    monkeypatch.setattr(session_file, "vllm_command", command)
    monkeypatch.setattr(session_file, "model_source", lambda name: (name, True))
    return tmp_path


def test_a_session_checks_the_server_once_at_each_temperature(folder: Path) -> None:
    with Session(CONFIG, Bigram(folder), TOKENIZER, source=str(folder)) as session:
        first, again, greedy = session.sampler(0.4), session.sampler(0.4), session.sampler(0.0)
        assert first.server is again.server is greedy.server  # type: ignore[attr-defined]
        asked = (folder / "asked.jsonl").read_text().splitlines()
        assert len(asked) == 2 * 3  # three prompts of the check, at two temperatures
        assert len(first.generate([[5]], [("k",)])) == 1
        process: Any = session._server._process
    assert process.poll() is not None


def test_a_server_with_other_weights_is_refused(folder: Path) -> None:
    model = Bigram(folder)
    np.save(folder / "table.npy", np.random.default_rng(1).normal(size=(VOCAB, VOCAB)) * 3)
    with (
        Session(CONFIG, model, TOKENIZER, source=str(folder)) as session,
        pytest.raises(ValueError, match="other weights"),
    ):
        session.sampler(1.0)


def test_training_here_does_not_play_with_vllm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--engine cluster"):
        start(CONFIG, tmp_path / "run", {})
    assert not (tmp_path / "run").exists()
    with Session(CONFIG, None, TOKENIZER) as session, pytest.raises(ValueError, match="stay as they are"):
        session.sampler(1.0)


def test_the_short_word_for_the_engine() -> None:
    assert sampler_words(["runs/a", "--sampler", "vllm"]) == ["runs/a", "--sampler.engine", "vllm"]
    assert sampler_words(["--sampler=vllm", "--seeds=0"]) == ["--sampler.engine=vllm", "--seeds=0"]
    assert sampler_words(["--sampler.engine", "hf"]) == ["--sampler.engine", "hf"]
