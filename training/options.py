"""The options of every command of the command line: what each is called, what it means, what it is unless asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from training.cluster.layout import ClusterConfig
from training.config import RECIPES, Config, EnvConfig, SamplerConfig, SkillsConfig

TINY = RECIPES["tiny-grpo"]


def played_as(target: str) -> Config:
    """How a model that is no run plays: as its own recipe says, else as the tiny policy of household games."""
    return RECIPES.get(f"{target}-grpo", TINY)


Protocol = Literal["vanilla", "skill_prompt", "own_skill", "reflexion", "expel", "expert"]
TRIALS = {"reflexion": 3, "expert": 2}  # attempts at a task under the protocols that repeat it
REPRODUCED = "invisible-advantage, pcsd, sdar, pr-opd-webshop, table1 or all"
SUBJECT = "a run, a checkpoint, a model folder, or a model's name"


@dataclass(frozen=True)
class Train(Config):
    """Train a policy, or continue a run. Recipe, then config file, then single fields: the later wins."""

    recipe: str = "tiny-grpo"  # preset to start from
    config: str | None = None  # JSON file with fields to set, in the form of a run's config.json
    out: str | None = None  # run folder; None: runs/<recipe>
    engine: Literal["local", "cluster"] = "local"  # one process here, or verl on Ray: docs/cluster.md
    dry_run: bool = False  # of the cluster: print verl's command, memory and time, and start nothing
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


@dataclass(frozen=True)
class Eval:
    """Play the fixed evaluation panel and print success by task type, with 95 % intervals."""

    target: Positional[Annotated[str, arg(metavar="RUN|MODEL", help=SUBJECT)]] = ""
    panel: str | None = None  # split of the panel; None: the run's own
    size: int | None = None  # tasks of the panel; 0: the whole split, None: the run's own
    seeds: str = "0"  # evaluation seeds, e.g. 0,1,2
    protocol: Protocol = "vanilla"  # what stands in the player's prompt besides the task, or who plays: docs/methods.md
    trials: int | None = None  # attempts at a task; None: 3 under reflexion, 2 under expert
    temperature: float | None = None  # None: the run's own
    device: str = "cpu"
    out: str | None = None  # folder of the results; None: the run itself, or runs/<model>
    env: EnvConfig = field(default_factory=lambda: TINY.env)
    sampler: SamplerConfig = field(default_factory=lambda: TINY.sampler)
    skills: SkillsConfig = field(default_factory=lambda: TINY.skills)  # library and retrieval of skill_prompt


@dataclass(frozen=True)
class Diagnose:
    """Read the same responses with and without a skill and measure what changes."""

    target: Positional[Annotated[str, arg(metavar="RUN|MODEL", help=SUBJECT)]] = ""
    measures: str = "change"  # change, cka, probe, gaps, perturbation, agreement, tokens, patching, audit; or all
    contexts: str = "own_skill,other_skill,unrelated,shuffled,none,floor"  # what stands in front of the task
    trajectories: str | None = None  # artifacts or JSONL with the episodes, with commas; None: those played last
    skills: str | None = None  # artifact or JSONL with their skills; None: beside the episodes, else the policy writes
    model: str | None = None  # another model that reads the episodes; None: the policy itself
    episodes: int = 0  # how many are read, chosen by their ids; 0: all
    max_tokens: int | None = None  # of an episode, the rest is cut; None: all
    backend: str = "hf"  # what reads the states: hf, transformer_lens, nnsight or vllm
    against: str | None = None  # other weights, whose states are held against these (CKA): a run, a checkpoint, a model
    device: str = "cpu"
    seed: int = 0  # of the contexts
    out: str | None = None  # artifact to write; None: <run>/measurements/<reader>


@dataclass(frozen=True)
class Figures:
    """Draw the figures of a run or a study from its artifacts, and write claims.json and report.html."""

    target: Positional[Annotated[str, arg(metavar="RUN", help="folder of a run or a study")]] = ""
    only: str = ""  # beginning of a figure's name, e.g. fig5: drawn from the stored tables, and nothing else


@dataclass(frozen=True)
class Report:
    """Write report.html of a run or a study from the tables and figures that are there."""

    target: Positional[Annotated[str, arg(metavar="RUN", help="folder of a run or a study")]] = ""


@dataclass(frozen=True)
class Data:
    """Bring an environment's data into place (KIND --from PATH), or make new ones (--generate KIND)."""

    kind: str = ""  # alfworld, household, webshop or searchqa
    source: Annotated[str | None, arg(name="from")] = None  # folder, .zip or .tar archive with ALFWorld's games
    generate: str | None = None  # household, webshop or searchqa
    out: str | None = None  # folder; None: $ALFWORLD_DATA, or the cache
    train: int | None = None  # games of each split
    valid_seen: int | None = None
    valid_unseen: int | None = None
    goals: Literal["synthetic", "human"] = "synthetic"  # webshop: whose instructions are asked
    seed: int = 0
    workers: int = 2


@dataclass(frozen=True)
class Build:
    """Build a tiny policy from expert play: the same bytes on the same machine and thread count."""

    target: Positional[Annotated[str, arg(metavar="POLICY", help="tiny, tiny-search or tiny-webshop")]] = ""
    out: str | None = None  # folder; None: runs/<policy>-policy
    games: int | None = None  # games, questions or goals of the imitation; None: those of the policy's recipe
    tokens: int | None = None  # trained on; None: those of the recipe
    seed: int = 0
    threads: int | None = None  # None: those of the recipe


@dataclass(frozen=True)
class Reproduce:
    """Run a whole study; stopped and repeated, it goes on where it was."""

    target: Positional[Annotated[str, arg(metavar="STUDY", help=REPRODUCED)]] = ""
    recipe: str = "tiny"  # sizes of the stages: tiny or, but for invisible-advantage, smoke
    out: str | None = None  # folder; None: runs/<study>
    seed: str | None = None  # of training; but for invisible-advantage also several, e.g. 0,1,2; None: the recipe's
    jobs: int = 1  # stages that run at once and share the cores, but for invisible-advantage


@dataclass(frozen=True)
class Ablate:
    """Compare methods that start from the same checkpoint; stopped and repeated, it goes on where it was."""

    target: Positional[Annotated[str, arg(metavar="STUDY", help="channels, ... or a YAML file: docs/ablation.md")]] = ""
    recipe: str = "tiny"  # sizes of the stages: tiny or smoke
    seeds: str | None = None  # training seeds, e.g. 0,1,2; None: the recipe's
    out: str | None = None  # folder; None: runs/<study>-<recipe>
    starred: bool = False  # also evaluate every arm with a library's skills in its prompt
    jobs: int = 1  # stages that run at once and share the cores: arms, and whole training seeds
    method: str | None = None  # .py file of a method of your own, which the study's arms may name


@dataclass(frozen=True)
class Power:
    """Plan an evaluation: how many episodes tell two success rates apart, and what so many of them can show."""

    a: Positional[Annotated[float, arg(metavar="RATE", help="success of one arm, e.g. 0.66")]] = 0.0
    b: Positional[Annotated[float, arg(metavar="RATE", help="success of the other, e.g. 0.71")]] = 0.0
    discordance: float | None = None  # share of tasks that only one of the arms wins; None: least, middle, independent
    out: str | None = None  # folder for the power curve as a figure; None: no figure


@dataclass(frozen=True)
class Methods:
    """List the methods that can be trained: paper, channel, what they need, and their settings."""

    json: bool = False  # print one JSON list instead of tables


@dataclass(frozen=True)
class Doctor:
    """Check versions, compiler, games, action dialect, models, cache and threads; or, with --losses, the methods."""

    skills: str | None = None  # artifact or library of skills whose verbs are compared with the engine's
    losses: str | None = None  # golden file whose losses and gradients are recomputed here, instead of the checks
    device: str = "cpu"  # of the recomputation
    dtype: Literal["float32", "float64", "bfloat16"] = "float64"  # of its log-probs and states
