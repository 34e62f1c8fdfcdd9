"""The contract between the trainer and a method. The trainer reads `needs` and knows nothing else.

A method is one file in training/methods/ that defines METHOD. See docs/methods.md for the frame.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from diagnostics.paired import PairedPass
    from training.batch import Batch


@dataclass(frozen=True)
class Needs:
    """What a method asks of one training step."""

    skill: Literal["none", "retrieved", "hindsight"] = "none"
    step_skill: bool = False  # hindsight at two levels: also a skill for single turns, read by a second teacher
    seen_by: Literal["teacher", "student"] = "teacher"  # student: the skill stands in the player's own prompt
    teacher: Literal["none", "current", "rollout", "initial"] = "none"  # whose weights read the privileged context
    teacher_logprobs: bool = False
    divergence: Literal["none", "reverse_kl", "forward_kl", "jsd"] = "none"  # over the full vocabulary
    states: Literal["none", "before", "at"] = "none"  # of both branches, every block: before or at each token
    entropy: bool = False  # of the student, beyond what the entropy bonus asks
    policy_coefficient: float = 1.0  # of the surrogate; 0: no policy gradient
    regularised: bool = True  # KL to the reference and entropy bonus


@dataclass(frozen=True)
class LossTerm:
    """One named term: coefficient * sum(mask * weight * value) / denominator.

    `value`, `mask` and `weight` are [M]; `weight` is detached and never enters the denominator, which counts the
    distilled tokens (those with a teacher context) of the whole optimiser mini-batch, known before the first forward.
    With coefficient 0 the term is logged and takes no part in the loss.
    """

    name: str
    value: Tensor  # [M], carries the gradient
    mask: Tensor  # [M], depends on the batch only
    coefficient: float
    weight: Tensor | None = None  # [M], None: ones


# Of the whole step at once, before its first update: batch.old_logprobs is b, pair.teacher_logprobs q.
Advantage = Callable[["Batch", "PairedPass", Any, int], "Tensor"]
Loss = Callable[["Batch", "PairedPass", Any, int, "nn.Module | None"], "list[LossTerm]"]
Modules = Callable[[Any, Any], "nn.Module | None"]  # (model_config, config) -> module with `lr` and `extra_updates`


@dataclass(frozen=True)
class Method:
    """`advantage` replaces the per-token advantage of the surrogate; `loss` adds terms, `modules` trainable parts."""

    name: str
    paper: str
    channel: str  # where the teacher's reading reaches the student, in a few words
    config: type
    needs: Callable[[Any, int], Needs]  # (config, step) -> what this step needs
    advantage: Advantage | None = None
    loss: Loss | None = None
    modules: Modules | None = None


def setting(default: Any, source: Literal["paper", "code", "ours"]) -> Any:
    """A field of a method's config, with where its default comes from."""
    return field(default=default, metadata={"source": source})


def available_methods() -> list[str]:
    """Names of the files in training/methods, sorted; importing none of them."""
    package = importlib.import_module("training.methods")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load_method(name: str) -> Method:
    """The METHOD of training/methods/<name>.py. Raises ValueError with the nearest name when there is none."""
    names = available_methods()
    if name not in names:
        import difflib

        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown method {name!r}{hint} (available: {', '.join(names)})")
    return importlib.import_module(f"training.methods.{name}").METHOD
