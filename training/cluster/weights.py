"""Weights between files and shards. A checkpoint of the cluster is one of the local engine's, file by file.

verl's own checkpoints are pickled shards that only as many workers can load; ours are gathered in the first process
and written in safetensors: any number of workers, and the local engine, can go on from them, and nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from diagnostics.artifact import save_artifact
from training.checkpoint import MODULES, OPTIMIZER, Learned, checkpoint_path, reference_folder, run_of
from training.config import Config
from training.models.load import model_source, quiet


def origin(config: Config) -> str:
    """Folder or hub name of the weights a run starts from, which every worker loads first."""
    return config.init_from or model_source(config.model.name)[0]


def anchor(config: Config, run: Path) -> str | None:
    """Model folder of the KL anchor, where it is not what the workers have loaded: as on the local engine."""
    kept = reference_folder(run)
    if kept is not None:
        return str(kept)
    if config.model.reference is not None:
        source, local = model_source(config.model.reference)
        return source if local else snapshot_download(source)
    branched = None if config.init_from is None else reference_folder(run_of(config.init_from))
    return None if branched is None else str(branched)


def gather(tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """All of each tensor, in the memory of the first process; {} in the others, which must call it too.

    Args: device, where shards are exchanged, wherever they lie.
    """
    first, whole = dist.get_rank() == 0, {}
    for name, tensor in tensors:
        there: Any = tensor.to(device)
        full = there.full_tensor() if isinstance(tensor, DTensor) else tensor
        if first:
            whole[name] = full.detach().cpu().contiguous()
    return whole


@torch.no_grad()
def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Puts the weights of a model folder into the shards, tensor by tensor.

    Raises: ValueError when the folder is of another architecture.
    """
    read = _Tensors(Path(folder), "model*.safetensors")
    known = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    for name in read.names - known:
        raise ValueError(
            f"{name} of {folder} has no place in this model: it was made of another one; use its own recipe"
        )
    for name, parameter in model.named_parameters():
        _fill(parameter, read.get(name), f"{name} of {folder}")


@torch.no_grad()
def load_optimiser(learned: Learned, folder: Path) -> None:
    """Puts the optimiser states and the method's modules of a checkpoint in place. Source of format: checkpoint.py."""
    read = _Tensors(folder, OPTIMIZER)
    has_modules = (folder / MODULES).is_file()
    for part, module, optimizer in learned.parts:
        if part == "modules":
            if not has_modules:
                continue
            weights = _Tensors(folder, MODULES)
            for name, parameter in module.named_parameters():
                _fill(parameter, weights.get(name), f"{name} of {folder / MODULES}")
        optimizer.state.clear()
        for name, parameter in module.named_parameters():
            state = {key: read.get(f"{part}/{name}/{key}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if state["step"] is None:
                continue
            optimizer.state[parameter] = {
                key: value if key == "step" else _shard(value, parameter) for key, value in state.items()
            }


def digest(model: Any, device: torch.device) -> str:
    """What training.episodes.policy_digest says of the same weights; called by all processes."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        for _, whole in gather([(name, value)], device).items():  # one at a time, in the first process
            sha.update(name.encode())
            sha.update(whole.float().numpy().tobytes())
    return sha.hexdigest()


def save_reference(run: Path, model: Any, device: torch.device) -> None:
    """<run>/reference, as the local engine keeps it. Called by all processes."""
    weights = gather(model.named_parameters(), device)
    if dist.get_rank() == 0:
        save_artifact(run / "reference", "reference", write=lambda folder: _save_model(model, weights, folder))


def save_checkpoint(
    run: Path,
    step: int,
    learned: Learned,
    tokenizer: Any,
    state: Mapping[str, Any],
    config: Config,
    device: torch.device,
) -> None:
    """<run>/checkpoints/step_<step>, written by the first process; called by all."""
    weights = gather(learned.model.named_parameters(), device)
    optimiser: dict[str, Tensor] = {}
    for part, module, optimizer in learned.parts:
        named = module.named_parameters()
        states = [(f"{part}/{name}/{key}", v) for name, p in named for key, v in optimizer.state.get(p, {}).items()]
        optimiser |= gather(states, device)

    def write(folder: Path) -> None:
        _save_model(learned.model, weights, folder)
        tokenizer.save_pretrained(folder)
        save_file(optimiser, folder / OPTIMIZER)
        if learned.modules is not None:
            save_file({name: t.cpu() for name, t in learned.modules.state_dict().items()}, folder / MODULES)

    if dist.get_rank() == 0:
        save_artifact(
            checkpoint_path(run, step),
            "checkpoint",
            write=write,
            documents={"state": {**state, "step": step}},
            config=config,
            seeds=[config.seed],
        )


def _save_model(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """A plain Hugging Face folder of gathered weights."""
    with quiet(), torch.device("meta"):
        shell: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        shell.generation_config = model.generation_config
    with quiet():
        shell.save_pretrained(folder, state_dict=weights)


class _Tensors:
    """The tensors of some safetensors files, read one by one."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob(pattern)):
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def get(self, name: str) -> Tensor | None:
        return self._files[name].get_tensor(name) if name in self._files else None


def _fill(parameter: Tensor, whole: Tensor | None, where: str) -> None:
    if whole is None or whole.shape != parameter.shape:
        found = "is missing" if whole is None else f"has shape {tuple(whole.shape)}, not {tuple(parameter.shape)}"
        raise ValueError(f"{where} {found}: it was made of another model; use its own recipe")
    shard = _shard(whole, parameter)
    if isinstance(parameter, DTensor) and isinstance(shard, DTensor):
        parameter.to_local().copy_(shard.to_local())
    else:
        parameter.copy_(shard)


def _shard(whole: Any, like: Tensor) -> Tensor:
    """The part of a tensor that this process holds, laid like another one."""
    if not isinstance(like, DTensor):
        return whole.to(device=like.device, dtype=like.dtype)
    shard = distribute_tensor(whole.to(like.dtype), like.device_mesh, like.placements, src_data_rank=None)
    return shard.to(like.to_local().device)  # shards may lie in host memory
