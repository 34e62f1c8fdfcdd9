"""The backends of capture against each other: every layer, both pad sides, four architectures; and a vLLM server."""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from diagnostics.capture import BACKENDS, backend, capture_states, layer_names
from diagnostics.capture import vllm as vllm_backend
from diagnostics.capture.hf import decoder_blocks, output_head
from diagnostics.capture.parity import parity, relative_deviation
from diagnostics.records import Provenance
from tests.diagnostics.tiny import tiny_model

BOUND = 1e-4  # relative, fp32


def _unless_installed(library: str) -> Any:
    package = next(package for _, needed, package in BACKENDS.values() if needed == library)
    absent = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(absent, reason=f"{library} is not installed (pip install {package})")


OTHERS = [pytest.param(name, marks=_unless_installed(name)) for name in ("transformer_lens", "nnsight")]
KINDS = ["qwen2", "qwen3", "llama", "gpt2"]


@functools.cache
def model_of(kind: str) -> Any:
    """A random model; heads of 32, the fewest that vLLM reads on a CPU."""
    torch.manual_seed(0)
    common = {"vocab_size": 300, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        return AutoModelForCausalLM.from_config(GPT2Config(n_embd=64, n_layer=3, n_head=2, **common)).eval()
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32}
    config = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}[kind]
    return AutoModelForCausalLM.from_config(
        config(**shape, num_attention_heads=2, num_key_value_heads=1, **common)
    ).eval()


def ragged(side: str, lengths: tuple[int, ...] = (9, 4, 7)) -> tuple[Tensor, Tensor]:
    """Rows of these lengths and their pads, which are tokens like any other to who forgets the mask."""
    chance = torch.Generator().manual_seed(1)
    ids, mask = torch.full((len(lengths), max(lengths)), 7), torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, length in enumerate(lengths):
        real = slice(-length, None) if side == "left" else slice(0, length)
        ids[row, real] = torch.randint(1, 300, (length,), generator=chance)
        mask[row, real] = 1
    return ids, mask


def measured(model: Any, ids: Tensor, mask: Tensor, captures: dict[str, Any]) -> dict[tuple[str, str], float]:
    rows = parity(model, ids, mask, captures, Provenance(model="tiny", seed=3)).to_pylist()
    assert {(row["model"], row["seed"]) for row in rows} == {("tiny", 3)}
    return {(row["metric"].removeprefix("parity/"), row["layer"]): row["value"] for row in rows}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_b02_b17_every_layer_and_the_log_probs_agree(name: str, kind: str, side: str) -> None:
    model = model_of(kind)
    found = measured(model, *ragged(side), {name: backend(name)})
    expected = [(f"{name}/states", layer) for layer in layer_names(model)]
    assert list(found) == [*expected, (f"{name}/logprobs", "")]
    assert max(found.values()) <= BOUND, found


def test_parity_is_large_when_a_layer_is_another_one_or_the_mask_is_forgotten() -> None:
    """Negative controls: labels shifted by one (B02, a block's input taken for its output), pads read as text."""
    model = model_of("gpt2")
    ids, mask = ragged("left")

    def shifted(model: Any, ids: Tensor, mask: Tensor, layers: Any, select: Any) -> Any:
        capture = capture_states(model, ids, mask, layers, select)
        below = dict(zip(list(capture.states)[1:], capture.states.values(), strict=False))
        return SimpleNamespace(final=capture.final, states={**capture.states, **below})

    def maskless(model: Any, ids: Tensor, mask: Tensor, layers: Any, select: Any) -> Any:
        return capture_states(model, ids, torch.ones_like(mask), layers, select)

    found = measured(model, ids, mask, {"shifted": shifted, "maskless": maskless, "hf": capture_states})
    assert all(found["shifted/states", layer] > 0.1 for layer in layer_names(model)[1:])
    assert found["shifted/logprobs", ""] == 0
    assert found["maskless/states", "embed"] > 0.1 and found["maskless/logprobs", ""] > 0.1
    assert {value for (metric, _), value in found.items() if metric.startswith("hf/")} == {0.0}


def test_relative_deviation_is_the_worst_token() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    assert relative_deviation(reference + torch.tensor([[0.0, 0.5], [0.0, 0.5]]), reference) == pytest.approx(0.1)
    assert relative_deviation(reference, reference) == 0


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_b04_left_pads_change_nothing(name: str, kind: str) -> None:
    model, capture = model_of(kind), backend(name)
    ids, mask = ragged("left", (9, 9))
    bare = capture(model, ids, mask, layer_names(model))
    for pads in (1, 3, 8):
        padded = capture(
            model, nn.functional.pad(ids, (pads, 0), value=7), nn.functional.pad(mask, (pads, 0)), layer_names(model)
        )
        for layer, state in padded.states.items():
            assert relative_deviation(state[:, pads:].flatten(0, 1), bare.states[layer].flatten(0, 1)) <= BOUND
        logprobs = [output_head(model)(final).log_softmax(-1) for final in (padded.final[:, pads:], bare.final)]
        torch.testing.assert_close(logprobs[0], logprobs[1], rtol=0, atol=BOUND)


@pytest.mark.parametrize("name", ["hf", *OTHERS])
def test_b06_nothing_at_a_pad_gets_into_what_is_selected(name: str) -> None:
    """Selection, not multiplication: the selected places are the same whatever ids stand at the pads."""
    model, capture = model_of("qwen2"), backend(name)
    ids, mask = ragged("left", (9, 4))
    select = (torch.tensor([1, 0, 1]), torch.tensor([5, 8, 8]))
    with torch.no_grad():
        one = capture(model, ids, mask, layer_names(model), select)
        other = capture(model, torch.where(mask == 1, ids, 11), mask, layer_names(model), select)
    for layer, state in one.states.items():
        assert state.shape == (3, 64) and state.isfinite().all()
        assert torch.equal(state, other.states[layer])


@pytest.mark.parametrize("name", OTHERS)
def test_b14_shapes_names_and_selected_places(name: str) -> None:
    model, capture = model_of("gpt2"), backend(name)
    ids, mask = ragged("right", (5, 5))
    whole = capture(model, ids, mask)
    assert list(whole.states) == ["embed", "0", "1", "2"]
    assert all(state.shape == (2, 5, 64) for state in (*whole.states.values(), whole.final))
    select = (torch.tensor([1, 0, 1]), torch.tensor([2, 4, 0]))
    some = capture(model, ids, mask, ["2", "final_norm", "embed"], select)
    assert list(some.states) == ["2", "final_norm", "embed"]
    assert torch.equal(some.states["2"], whole.states["2"][select])
    assert torch.equal(some.states["embed"], whole.states["embed"][select])
    assert torch.equal(some.states["final_norm"], some.final) and torch.equal(some.final, whole.final[select])
    assert capture(model, ids, mask, ()).states == {}
    with pytest.raises(ValueError, match="unknown layer 'last'; this model has embed, 0, 1, 2, final_norm"):
        capture(model, ids, mask, ["last"])


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_the_live_model_is_not_touched(name: str, kind: str) -> None:
    model, capture = tiny_model(kind).train(), backend(name)
    ids, mask = ragged("left")
    modules = {path: (type(module), set(vars(module)), module.training) for path, module in model.named_modules()}
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    attention, storage = model.config._attn_implementation, [weight.data_ptr() for weight in model.parameters()]
    before = capture_states(model.eval(), ids, mask).final
    capture(model.train(), ids, mask)
    assert {p: (type(m), set(vars(m)), m.training) for p, m in model.named_modules()} == modules
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(weight, weights[key]) for key, weight in model.state_dict().items())
    assert [weight.data_ptr() for weight in model.parameters()] == storage
    assert model.config._attn_implementation == attention
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in decoder_blocks(model))
    assert torch.equal(capture_states(model.eval(), ids, mask).final, before)


@pytest.mark.parametrize("name", OTHERS)
def test_weights_that_changed_are_read_anew(name: str) -> None:
    model, capture = tiny_model("gpt2"), backend(name)
    ids, mask = ragged("right")
    stale = capture(model, ids, mask).final
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    assert measured(model, ids, mask, {name: capture})[f"{name}/logprobs", ""] <= BOUND
    assert (capture(model, ids, mask).final - stale).abs().max() > 0.1  # negative control: the change matters


def test_a_backend_is_found_by_name_or_named() -> None:
    assert backend("hf") is capture_states
    with pytest.raises(ValueError, match="unknown backend 'transformerlens'; did you mean 'transformer_lens'?"):
        backend("transformerlens")
    with pytest.raises(ValueError, match="unknown backend 'x'; backends are hf, transformer_lens, nnsight, vllm"):
        backend("x")


@pytest.mark.parametrize(
    ("name", "package"),
    [("transformer_lens", r'"undertow\[backends\]"'), ("nnsight", r'"undertow\[backends\]"'), ("vllm", "vllm")],
)
def test_a_library_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setattr("diagnostics.capture.find_spec", lambda library: None)
    with pytest.raises(ValueError, match=rf"'{name}' needs .* is not installed: run pip install {package}$"):
        backend(name)


# vLLM: a server that answers as the documented one does, from a table of log-probs

TABLE = torch.randn(300, 300, generator=torch.Generator().manual_seed(2)).log_softmax(-1)  # [token before, token]


class _Server(BaseHTTPRequestHandler):
    asked: dict[str, Any]
    prompt_logprobs = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else None)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).asked = asked
        choices = [{"index": i, "text": "", **self._prompt(ids)} for i, ids in enumerate(asked["prompt"])]
        self._answer({"choices": choices[::-1]} if self.path == "/v1/completions" else None)

    def _prompt(self, ids: list[int]) -> dict[str, Any]:
        if not self.prompt_logprobs:
            return {}
        said = [{str(b): {"logprob": float(TABLE[a, b]), "rank": 1, "decoded_token": "x"}} for a, b in pairwise(ids)]
        return {"prompt_logprobs": [None, *said]}

    def _answer(self, content: Any) -> None:
        body = json.dumps(content or {"error": "no such page"}).encode()
        self.send_response(200 if content else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(**attributes: Any) -> Iterator[tuple[str, type[_Server]]]:
    handler = type("Handler", (_Server,), attributes)
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_server_is_asked_for_real_tokens_and_answers_by_place(side: str) -> None:
    ids, mask = ragged(side)
    select = (torch.tensor([2, 0, 1]), torch.tensor([3, 8, 7 if side == "left" else 1]))
    with serving() as (address, server):
        found = vllm_backend.token_logprobs(address, ids, mask, select)
        torch.testing.assert_close(found, TABLE[ids[select[0], select[1] - 1], ids[select]], rtol=0, atol=1e-6)
        rows = [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]
        assert server.asked == {
            "model": "tiny",
            "prompt": rows,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        for position in (0, 5) if side == "left" else (0, 4):  # row 1 holds four tokens: a pad, its first token
            with pytest.raises(ValueError, match=f"row 1, position {position} has no log-prob: it is a pad or a row's"):
                vllm_backend.token_logprobs(address, ids, mask, (torch.tensor([1]), torch.tensor([position])))


def test_a_server_that_cannot_answer_is_named() -> None:
    ids, mask = ragged("right")
    select = (torch.tensor([0]), torch.tensor([1]))
    with serving() as (address, _):
        with pytest.raises(ValueError, match=r"/x/v1/models refused: 404 .*no such page"):
            vllm_backend.token_logprobs(f"{address}/x", ids, mask, select)
        with pytest.raises(
            ValueError, match="a vLLM server gives no hidden states to the vllm backend: read the check"
        ):
            vllm_backend.capture_states(address, ids, mask)
    with pytest.raises(ValueError, match=f"no server answers at {address}/v1/models: start one with python -m vllm"):
        vllm_backend.token_logprobs(address, ids, mask, select)
    with serving(prompt_logprobs=False) as (address, _), pytest.raises(ValueError, match="sends no prompt_logprobs"):
        vllm_backend.token_logprobs(address, ids, mask, select)


# vLLM in this process: an engine that keeps the residual stream in two parts and reads a long prompt in pieces


class _Block(nn.Module):
    def __init__(self, factor: float, split: bool) -> None:
        super().__init__()
        self.factor, self.split = factor, split

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None = None) -> Any:
        if not self.split:
            return hidden * self.factor
        residual = hidden if residual is None else residual.add_(hidden)  # in place, as the fused kernels do
        return residual * (self.factor - 1), residual


class _Norm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> Any:
        return hidden + 1000 if residual is None else (hidden + residual + 1000, residual)


class _Engine:
    """As much of vllm.LLM as the backend uses. State of token id x: x * [1, 2], then * 2 and * 3 in the blocks."""

    def __init__(self, split: bool, piece: int) -> None:
        inner = nn.Module()
        inner.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
        inner.model = nn.Module()
        inner.model.layers = nn.ModuleList([_Block(2, split), _Block(3, split)])
        inner.model.norm = _Norm()
        self.inner, self.piece = inner, piece

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.inner)]

    def generate(self, rows: list[list[int]]) -> None:
        for row in rows:
            for piece in torch.tensor(row).split(self.piece):
                stream: Any = (piece[:, None] * torch.tensor([1.0, 2.0]),)
                for block in self.inner.model.layers:
                    stream = block(torch.arange(len(piece)), *stream)
                    stream = stream if isinstance(stream, tuple) else (stream,)
                self.inner.model.norm(*stream)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(vllm_backend.IN_PROCESS, "0")
    monkeypatch.setattr(vllm_backend, "_generate", lambda engine, rows: engine.generate(rows))
    return _Engine


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("piece", [3, 100])
def test_b02_states_of_an_engine_are_named_as_everywhere(engine: Any, side: str, split: bool, piece: int) -> None:
    made = engine(split, piece)
    ids, mask = ragged(side)
    factors = {"embed": 1, "0": 2, "1": 6}
    right = {name: (ids * mask)[..., None] * torch.tensor([1.0, 2.0]) * factor for name, factor in factors.items()}
    right["final_norm"] = (right["1"] + 1000) * mask[..., None]
    found = vllm_backend.capture_states(made, ids, mask, ["final_norm", "1", "embed", "0"])
    assert list(found.states) == ["final_norm", "1", "embed", "0"]
    assert all(torch.equal(state, right[name]) for name, state in found.states.items())
    assert torch.equal(found.final, right["final_norm"])
    select = (torch.tensor([1, 0]), torch.tensor([6 if side == "left" else 2, 8]))
    some = vllm_backend.capture_states(made, ids, mask, "all", select)
    assert list(some.states) == ["embed", "0", "1"]
    assert torch.equal(some.states["1"], right["1"][select]) and torch.equal(some.final, right["final_norm"][select])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.inner.modules())


def test_an_engine_out_of_reach_is_named(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine(True, 100)
    ids, mask = ragged("right")
    with pytest.raises(ValueError, match="unknown layer '2'; this model has embed, 0, 1, final_norm"):
        vllm_backend.capture_states(made, ids, mask, ["2"])
    monkeypatch.setattr(vllm_backend, "_generate", lambda engine, rows: engine.generate([row[1:] for row in rows]))
    with pytest.raises(ValueError, match="vLLM read 9 tokens but its hooks did not see each once"):
        vllm_backend.capture_states(made, ids, mask)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.inner.modules())
    monkeypatch.delenv(vllm_backend.IN_PROCESS)
    with pytest.raises(ValueError, match="runs in another process: open it with open_engine"):
        vllm_backend.capture_states(made, ids, mask)
    with pytest.raises(ValueError, match="a Linear gives no hidden states to the vllm backend"):
        vllm_backend.capture_states(nn.Linear(1, 1), ids, mask)


def test_a_live_model_is_read_through_an_engine_that_is_opened_on_its_weights(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def open_engine(folder: str, dtype: str, **options: Any) -> Any:
        twin = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        opened.append(SimpleNamespace(folder=folder, dtype=dtype, options=options, twin=twin))
        opened[-1].engine = _HFEngine(twin)
        return opened[-1].engine

    monkeypatch.setattr(vllm_backend, "open_engine", open_engine)
    model = tiny_model("gpt2")
    for _ in range(2):
        assert max(measured(model, *ragged("left"), {"vllm": vllm_backend.capture_states}).values()) <= BOUND
    (one,) = opened
    assert one.dtype == "float32" and one.options == {} and not Path(one.folder).exists()
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    assert max(measured(model, *ragged("left"), {"vllm": vllm_backend.capture_states}).values()) <= BOUND
    assert len(opened) == 2


class _Replay(nn.Module):
    def forward(self, entering: Tensor, leaving: Tensor) -> Tensor:
        return leaving


class _HFEngine:
    """An engine that computes what a Hugging Face model does, on rows of tokens without a batch axis."""

    def __init__(self, model: Any) -> None:
        self.model, self.inner = model, nn.Module()
        self.inner.config = model.config
        self.inner.layers = nn.ModuleList(_Replay() for _ in decoder_blocks(model))
        self.inner.norm = _Replay()

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.inner)]

    @torch.no_grad()
    def generate(self, rows: list[list[int]]) -> None:
        for row in rows:
            ids = torch.tensor([row])
            states = [
                state[0] for state in capture_states(self.model, ids, torch.ones_like(ids), "all").states.values()
            ]
            for block, (entering, leaving) in zip(self.inner.layers, pairwise(states), strict=True):
                block(entering, leaving)
            self.inner.norm(states[-1], capture_states(self.model, ids, torch.ones_like(ids)).final[0])


@_unless_installed("vllm")
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])  # a residual stream in two parts, and in one
def test_a_real_engine_agrees(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 2**26}
    real = vllm_backend.open_engine(str(tmp_path), "float32", **sizes)
    ids, mask = ragged("left")
    captures = {"vllm": lambda model, *asked: vllm_backend.capture_states(real, *asked)}
    found = measured(model, ids, mask, captures)
    assert max(found.values()) <= BOUND, found
    select = (torch.tensor([1, 0, 2]), torch.tensor([6, 8, 5]))
    before = (select[0], select[1] - 1)
    with torch.no_grad():
        logprobs = output_head(model)(capture_states(model, ids, mask, (), before).final).log_softmax(-1)
    own = logprobs.gather(-1, ids[select][:, None])[:, 0]
    torch.testing.assert_close(vllm_backend.token_logprobs(real, ids, mask, select), own, rtol=0, atol=BOUND)
