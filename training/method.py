"""The contract between the trainer and a method. The trainer reads `needs` and knows nothing else.

A method is one file in training/methods/ that defines METHOD. See docs/methods.md for the frame.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from diagnostics.paired import PairedPass
    from training.batch import Batch
    from training.skills.growth import Growth


@dataclass(frozen=True)
class Needs:
    """What a method asks of one training step."""

    skill: Literal["none", "retrieved", "hindsight"] = "none"
    step_skill: bool = False  # hindsight at two levels: also a skill for single turns, read by a second teacher
    seen_by: Literal["teacher", "student"] = "teacher"  # student: the skill stands in the player's own prompt
    grow: Growth | None = None  # the library grows after the step, see training/skills/growth.py
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
    """The METHOD of training/methods/<name>.py, or of a file of your own when `name` ends in .py.

    Such a file is run, once a process: only a name that the command line gave may come here, none out of a data file.
    Raises: ValueError with the nearest name when there is none, or with what is wrong in the file.
    """
    if name.endswith(".py"):
        return _load_file(Path(name).resolve())
    names = available_methods()
    if name not in names:
        import difflib

        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown method {name!r}{hint} (available: {', '.join(names)}, or a .py file of your own)")
    return importlib.import_module(f"training.methods.{name}").METHOD


def is_loaded(name: str) -> bool:
    """Whether load_method(name) runs no file of anybody's: a method of ours, or a file that has been loaded."""
    return not name.endswith(".py") or Path(name).resolve() in _LOADED


_LOADED: dict[Path, Method] = {}  # a file is run once, so that its config is one class


def _load_file(path: Path) -> Method:
    if path in _LOADED:
        return _LOADED[path]
    if not path.is_file():
        raise ValueError(f"there is no method file {path}; give the path of a .py file that defines METHOD")
    name = f"method file {path}"  # not a name that an import statement can say
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the types of their fields
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"method file {path} cannot be run ({type(error).__name__}: {error})") from error
    method = getattr(module, "METHOD", None)
    if not isinstance(method, Method):
        raise ValueError(f"method file {path} defines no METHOD; end it with METHOD = Method(name, paper, ...)")
    if not is_dataclass(method.config):
        raise ValueError(f"METHOD.config in {path} is no dataclass; give the class of its settings")
    _LOADED[path] = method
    return method


LOOK_AHEAD = 1000  # steps in which a method starts to distil, if it ever does


def describe(method: Method) -> dict[str, Any]:
    """What can be said of a method without running it, as JSON: its contract and its settings.

    Returns: name, paper, channel; needs, of the first step that reads a skill (else of step 0) under the default
    settings, and that step; config, a list of name, type, default and source ("paper", "code", "ours";
    None: the file does not say).
    """
    config = method.config()
    step = next((step for step in range(LOOK_AHEAD) if method.needs(config, step).skill != "none"), 0)
    settings = [
        {
            "name": f.name,
            "type": f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type)),
            "default": getattr(config, f.name),
            "source": f.metadata.get("source"),
        }
        for f in fields(method.config)
    ]
    return {
        "name": method.name,
        "paper": method.paper,
        "channel": method.channel,
        "needs": asdict(method.needs(config, step)),
        "step": step,
        "config": settings,
    }
