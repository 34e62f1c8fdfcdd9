"""A real vLLM engine beside the forward hooks, on the shipped policy of Search-QA and episodes that it has played."""

import importlib.util
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from diagnostics.artifact import Artifact
from diagnostics.capture import capture_states, layer_names
from diagnostics.capture import vllm as vllm_backend
from diagnostics.capture.parity import relative_deviation
from diagnostics.records import Provenance, Trajectory
from diagnostics.run import diagnose
from training.config import RECIPES
from training.models.load import load_policy, model_source
from training.session import Session

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here; `make test-cluster` runs this"
)
BOUND = 1e-3  # relative, of a state; nats, of a log-prob; both in float32
Played = tuple[Any, Any, list[Trajectory]]


@pytest.fixture(scope="module")
def played() -> Played:
    tiny = RECIPES["tiny-search-grpo"]
    config = replace(tiny, env=replace(tiny.env, workers=1), eval=replace(tiny.eval, size=4))
    model, tokenizer = load_policy("tiny-search")
    with Session(config, model, tokenizer) as session:
        return model, tokenizer, session.evaluate(0)


@torch.no_grad()
def test_states_and_logprobs_at_response_tokens(played: Played) -> None:
    model, _, episodes = played
    segments = [segment for episode in episodes for segment in episode.segments]
    rows = [torch.from_numpy(segment.ids.astype("int64")) for segment in segments]
    ids, mask = (pad_sequence(each, batch_first=True) for each in (rows, [torch.ones_like(row) for row in rows]))
    row, token = pad_sequence([torch.from_numpy(s.response_mask) for s in segments], batch_first=True).nonzero().T
    assert len(token) > 100
    layers = layer_names(model)
    theirs = capture_states(model, ids, mask, layers, (row, token - 1))  # the state that a token is read from
    engine = vllm_backend.open_engine(model_source("tiny-search")[0], "float32")
    ours = vllm_backend.capture_states(engine, ids, mask, layers, (row, token - 1))
    apart = {layer: relative_deviation(ours.states[layer], theirs.states[layer]) for layer in layers}
    assert max(apart.values()) <= BOUND and relative_deviation(ours.final, theirs.final) <= BOUND, apart
    # negative control (case B02): no layer passes for its neighbour
    assert min(relative_deviation(ours.states[a], theirs.states[b]) for a, b in pairwise(layers)) > 100 * BOUND
    own = model(ids, attention_mask=mask).logits[row, token - 1].log_softmax(-1).gather(1, ids[row, token, None])
    found = vllm_backend.token_logprobs(engine, ids, mask, (row, token))
    torch.testing.assert_close(found, own[:, 0], rtol=0, atol=BOUND)


def test_diagnose_reads_the_same_through_an_engine(played: Played, tmp_path: Path) -> None:
    """A live model, and another one beside it."""
    model, tokenizer, episodes = played
    other = load_policy("tiny-search")[0]
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    skills = {episode.id: f"answer at once. {number}" for number, episode in enumerate(episodes)}

    def read(backend: str) -> Artifact:
        given = (episodes, skills, ["own_skill", "other_skill", "none"], ("change", "cka", "gaps"))
        source = Provenance("run", "grpo", "searchqa", "tiny-search", 0, 0)
        return diagnose(model, tokenizer, *given, source, tmp_path / backend, backend=backend, against=other)

    def rows(artifact: Artifact) -> dict[Any, float]:
        keys = ("trajectory", "context", "token_class", "layer", "metric")
        return {tuple(row[key] for key in keys): row["value"] for row in artifact.table("measurements").to_pylist()}

    theirs, done = rows(read("hf")), read("vllm")
    ours = rows(done)
    parity = {key: ours.pop(key) for key in list(ours) if key[-1].startswith("parity/")}
    assert ours.keys() == theirs.keys() and 0 < max(parity.values()) <= BOUND
    means = [key for key in theirs if key[-1].endswith("/mean") or key[-1].startswith("cka")]
    apart = np.array([abs(ours[key] - theirs[key]) for key in means])
    assert len(means) > 50 and np.nanmax(apart) <= BOUND and np.nanmax([theirs[key] for key in means]) > 10 * BOUND
    assert any(remark.startswith("Backend vllm against the forward hooks") for remark in done.manifest["remarks"])
