"""Log-probs of a vLLM server or engine, and hidden states of an engine in this process.

vLLM gives the log-probs of a prompt to anyone who asks (`prompt_logprobs`). States it does not hand out; where the
model runs in this process `LLM.apply_model` lets us put hooks on it. A live model is read through an engine that is
opened on its weights. vLLM keeps the residual stream in two parts: what a block returns is (change, residual), and the
state is their sum.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diagnostics.capture.hf import Capture, Layers, Select, chosen_layers, find_blocks, weight_versions

ALONE = {  # an engine that works alone: its parts find one another on this machine, and it reports to nobody
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_CACHE = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB on a CPU, unless the user says more; vLLM would take all memory
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # "0": the engine, and with it the model, runs in the caller's process
FREE_SHARE = 0.8  # of a GPU's memory that is free when an engine is opened beside a live model

# live model -> the state of its weights when the engine was opened, and the engine
_engines: WeakKeyDictionary[Any, tuple[list[int], Any]] = WeakKeyDictionary()


def open_engine(folder: str, dtype: str = "auto", **options: Any) -> Any:
    """A vLLM engine in this process whose states can be read.

    Args: folder, of a Hugging Face checkpoint; dtype, of its weights ("float32" to compare with other backends);
    options, further arguments of vllm.LLM.
    """
    os.environ |= {**CPU_CACHE, **os.environ, **ALONE, IN_PROCESS: "0"}
    from vllm import LLM

    # eager: a compiled graph passes hooks by. No prefix cache: a token that is not read again has no state.
    plain = {"enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    return LLM(model=folder, dtype=dtype, **{**plain, **options})


def capture_states(
    model: Any,
    ids: Int[Tensor, "B T"],
    attention_mask: Int[Tensor, "B T"],
    layers: Layers = "all",
    select: Select | None = None,
) -> Capture:
    """The states of hf.capture_states, read from a vLLM engine row by row; places of pads are zero.

    There are no gradients.
    Source: ours. Args: model, an engine of open_engine, or a live model: its engine is opened once, and again after the
    weights have changed; the others and Returns: see hf.capture_states.
    Raises ValueError on an unknown layer, or where the engine's model is out of reach.
    """
    if hasattr(model, "save_pretrained"):
        model = _engine(model)
    if not hasattr(model, "apply_model"):
        what = "a vLLM server" if isinstance(model, str) else f"a {type(model).__name__}"
        raise ValueError(
            f"{what} gives no hidden states to the vllm backend: read the checkpoint with open_engine(folder)"
        )
    if os.environ.get(IN_PROCESS) != "0":
        raise ValueError(f"this vLLM engine runs in another process: open it with open_engine, or with {IN_PROCESS}=0")
    names: tuple[str, ...] = model.apply_model(lambda inner: chosen_layers(_as_hf(inner), layers))[0]
    read: defaultdict[str, list[Tensor]] = defaultdict(list)
    handles = model.apply_model(partial(_hook, names=(*names, "final_norm"), read=read))[0]
    rows: list[dict[str, Tensor]] = []
    try:
        for row in _real(ids, attention_mask):
            read.clear()
            _generate(model, [row])
            rows.append({name: torch.cat(pieces) for name, pieces in read.items()})  # a long prompt comes in pieces
            if any(len(rows[-1].get(name, ())) != len(row) for name in (*names, "final_norm")):
                raise ValueError(
                    f"vLLM read {len(row)} tokens but its hooks did not see each once: open the engine with open_engine"
                )
    finally:
        for handle in handles:
            handle.remove()

    def place(name: str) -> Tensor:
        real = torch.cat([row[name] for row in rows]).to(ids.device)
        states = real.new_zeros(*ids.shape, real.shape[-1])
        states[attention_mask.bool()] = real
        return states if select is None else states[select]

    return Capture(place("final_norm"), {name: place(name) for name in names})


def token_logprobs(
    model: Any, ids: Int[Tensor, "B T"], attention_mask: Int[Tensor, "B T"], select: Select
) -> Float[Tensor, "M"]:
    """Log-probs OF the tokens at some places, at temperature 1, from the prompt_logprobs of vLLM.

    Source: ours. Args: model, an engine or the address of a server (`http://127.0.0.1:8000`); attention_mask, 1 on
    real tokens; select, (row, position) of the M tokens.
    Returns [M] nats.
    Raises ValueError on a place with nothing to read before it, or where no vLLM server answers.
    """
    rows = _real(ids, attention_mask)
    found = _ask(model, rows) if isinstance(model, str) else _generate(model, rows)
    values = torch.full(ids.shape, torch.nan)
    for row, (tokens, prompt) in enumerate(zip(rows, found, strict=True)):
        logprobs = [choices[token] for token, choices in zip(tokens[1:], prompt[1:], strict=True)]
        values[row, attention_mask[row].nonzero()[1:, 0].cpu()] = torch.tensor(logprobs)
    chosen = values[select[0].cpu(), select[1].cpu()]
    if chosen.isnan().any():
        index = int(chosen.isnan().nonzero()[0])
        raise ValueError(
            f"row {int(select[0][index])}, position {int(select[1][index])} has no log-prob: it is a pad or a row's "
            "first token"
        )
    return chosen


def _engine(model: Any) -> Any:
    """The engine on a live model's weights, in their dtype."""
    weights = weight_versions(model)
    if model not in _engines or _engines[model][0] != weights:
        _engines.pop(model, None)  # frees the former one first
        options = {}
        if model.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(model.device)
            options["gpu_memory_utilization"] = FREE_SHARE * free / total
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            _engines[model] = weights, open_engine(folder, str(model.dtype).removeprefix("torch."), **options)
    return _engines[model][1]


def _real(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The tokens of each row without its pads, which vLLM would read as text."""
    return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]


def _as_hf(inner: Any) -> Any:
    """vLLM's model as find_blocks expects one."""
    return SimpleNamespace(config=inner.config, base_model=inner)


def _hook(inner: Any, names: Sequence[str], read: Mapping[str, list[Tensor]]) -> list[Any]:
    """Hooks that append the states of the tokens of each forward."""
    path, blocks = find_blocks(_as_hf(inner))
    norm = list(inner.get_submodule(path.rpartition(".")[0]).children())[-1]  # what follows the blocks

    def entering(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # (positions, hidden_states, residual) or (hidden_states,): the only matrix of floats
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        read["embed"].append(tensors[0].clone())  # a later block writes into it

    def leaving(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                read[name].append(output.clone())
            else:
                read[name].append(output[0].clone() if name == "final_norm" else output[0] + output[1])

        return hook

    handles = [blocks[int(name)].register_forward_hook(leaving(name)) for name in names if name.isdigit()]
    handles.append(norm.register_forward_hook(leaving("final_norm")))
    if "embed" in names:
        handles.append(blocks[0].register_forward_pre_hook(entering, with_kwargs=True))
    return handles


def _generate(engine: Any, rows: Sequence[Sequence[int]]) -> list[list[dict[int, float]]]:
    """Per row and token, the log-probs by token id; vLLM says None for the first token, we nothing."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": list(row)} for row in rows], params, use_tqdm=False)
    return [
        [{token: choice.logprob for token, choice in (place or {}).items()} for place in prompt]
        for prompt in (answer.prompt_logprobs for answer in answers)
    ]


def _ask(address: str, rows: Sequence[Sequence[int]]) -> list[list[dict[int, float]]]:
    """The same from a server."""
    served = _http(f"{address}/v1/models")["data"][0]["id"]
    asked = {"model": served, "prompt": rows, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    choices = sorted(_http(f"{address}/v1/completions", asked)["choices"], key=lambda choice: choice["index"])
    if any(choice.get("prompt_logprobs") is None for choice in choices):
        raise ValueError(f"the server at {address} sends no prompt_logprobs: it is not vLLM, or they are switched off")
    prompts = [choice["prompt_logprobs"] for choice in choices]
    return [[{int(key): value["logprob"] for key, value in (place or {}).items()} for place in p] for p in prompts]


def _http(address: str, content: Any = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = Request(address, data, {"Content-Type": "application/json"})
    try:
        with build_opener(ProxyHandler({})).open(request) as answer:  # the server is on this machine: no proxy
            return json.load(answer)
    except HTTPError as error:
        raise ValueError(f"the server at {address} refused: {error.code} {error.read().decode()[:300]}") from error
    except (URLError, ConnectionError) as error:
        raise ValueError(
            f"no server answers at {address}: start one with python -m vllm.entrypoints.openai.api_server --model DIR "
            "--host 127.0.0.1"
        ) from error
