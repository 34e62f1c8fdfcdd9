"""Checkpoints: an ordinary Hugging Face model folder plus what an exact resume needs.

    checkpoints/step_10/   config.json model.safetensors tokenizer files   (the export: any tool reads it as it is)
                           optimizer.safetensors modules.safetensors state.json manifest.json

A folder is written aside and renamed, manifest last: what bears the name step_<n> is complete or gets refused by its
sha256. There is no generator state to keep: every draw of step n depends on (seed, n) only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from diagnostics.artifact import Artifact, ArtifactError, load_artifact, remove_stale, save_artifact
from training.models.load import quiet

log = logging.getLogger(__name__)

OPTIMIZER, MODULES = "optimizer.safetensors", "modules.safetensors"


@dataclass(frozen=True, eq=False)
class Learned:
    """What training changes: the model, the method's own modules (if any), and an AdamW for each."""

    model: Any  # a Hugging Face causal language model
    optimizer: torch.optim.Optimizer
    modules: Any = None  # nn.Module with `lr` and `extra_updates`
    module_optimizer: torch.optim.Optimizer | None = None

    @property
    def parts(self) -> list[tuple[str, nn.Module, torch.optim.Optimizer]]:
        parts: list[tuple[str, nn.Module, torch.optim.Optimizer]] = [("model", self.model, self.optimizer)]
        if self.modules is not None and self.module_optimizer is not None:
            parts.append(("modules", self.modules, self.module_optimizer))
        return parts


def checkpoint_path(run: str | Path, step: int) -> Path:
    return Path(run) / "checkpoints" / f"step_{step}"


def save_checkpoint(
    run: str | Path, step: int, learned: Learned, tokenizer: Any, state: Mapping[str, Any], **manifest: Any
) -> Artifact:
    """Write `checkpoints/step_<step>`; further arguments are those of save_artifact (config, args, seeds, inputs).

    Args: step, steps done; state, anything JSON can hold (update counter, method, seed).
    Raises: ArtifactError when the disk refuses; earlier checkpoints stay, the half-written folder is removed.
    """

    def write(folder: Path) -> None:
        with quiet():
            learned.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        tensors = {}
        for name, module, optimizer in learned.parts:
            tensors.update(_flat(name, module, optimizer))
        save_file(tensors, folder / OPTIMIZER)
        if learned.modules is not None:
            save_file(dict(learned.modules.state_dict()), folder / MODULES)

    documents = {"state": {**state, "step": step}}
    return save_artifact(checkpoint_path(run, step), "checkpoint", write=write, documents=documents, **manifest)


def load_checkpoint(path: str | Path, learned: Learned) -> dict[str, Any]:
    """Put weights, modules and optimiser states of a checkpoint into `learned`; returns its state document.

    Modules that the checkpoint does not have (a branch that starts another method) keep their initial values.
    Raises: ArtifactError when the checkpoint is incomplete or altered, or was made of another model.
    """
    artifact = load_artifact(path, "checkpoint")
    load_weights(learned.model, artifact.path)
    tensors = load_file(artifact.path / OPTIMIZER)
    for name, module, optimizer in learned.parts:
        if name == "modules":
            if MODULES not in artifact.names:
                continue
            _strictly(module, load_file(artifact.path / MODULES), artifact.path)
        _restore(name, module, optimizer, tensors)
    return artifact.document("state")


def load_weights(model: Any, folder: str | Path) -> None:
    """Overwrite the weights of `model` by those of a model folder of the same architecture, in place."""
    with quiet():
        source = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True)
    _strictly(model, source.state_dict(), Path(folder))


def latest_complete(run: str | Path) -> Path | None:
    """The last checkpoint of a run that is complete and unaltered; None when there is none.

    A broken one is passed over with a warning that names it and the one used instead; leftovers of a writer that was
    killed are removed (case B69), and those of a run that goes on are left alone.
    """
    folder = Path(run) / "checkpoints"
    remove_stale(folder / "step_*")
    broken: list[str] = []
    chosen: Path | None = None
    found = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True):
        try:
            load_artifact(path, "checkpoint")
        except ArtifactError as error:
            broken.append(f"{path.name} ({error})")
        else:
            chosen = path
            break
    if broken:
        instead = f"continuing from {chosen.name}" if chosen else "there is no complete checkpoint, starting anew"
        log.warning("passed over %s; %s", "; ".join(broken), instead)
    return chosen


def save_reference(run: str | Path, reference: Any) -> None:
    """Keep the KL anchor as `<run>/reference`, so that a resumed or branched run is pulled to the same weights."""

    def write(folder: Path) -> None:
        with quiet():
            reference.save_pretrained(folder)

    save_artifact(Path(run) / "reference", "reference", write=write)


def reference_folder(run: str | Path) -> Path | None:
    """Where the KL anchor of a run lies; None in a run without one. Raises ArtifactError when it is altered."""
    folder = Path(run) / "reference"
    return load_artifact(folder, "reference").path if folder.is_dir() else None


def run_of(checkpoint: str | Path) -> Path:
    """The run folder that a checkpoint folder stands in."""
    return Path(checkpoint).resolve().parent.parent


def _flat(prefix: str, module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimiser state by parameter name: `model/lm_head.weight/exp_avg`."""
    return {
        f"{prefix}/{name}/{key}": value.detach().cpu().contiguous()
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _restore(prefix: str, module: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of _flat. Learning rate and decay stay those of the configuration."""
    optimizer.state.clear()
    for name, parameter in module.named_parameters():
        start = f"{prefix}/{name}/"
        state = {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}
        if state:  # AdamW's step counter stays on the CPU
            optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in state.items()
            }


def _strictly(module: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        detail = str(error).splitlines()[-1].strip()
        raise ArtifactError(
            f"{folder} holds another architecture than this run ({detail}); use its own recipe"
        ) from error
