"""Command line of Undertow. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from training import options
from training.cluster.layout import ClusterConfig
from training.config import Config


def train(words: Sequence[str]) -> int:
    from training.arguments import parse_config, plain_config

    parsed = parse_config(options.Train(), words, "undertow train")
    config = plain_config(parsed)
    run = Path(parsed.out or f"runs/{config.recipe}")
    args = {"command": "train", "words": list(words)}
    if parsed.dry_run:
        return _dry_run(config, run, parsed.cluster)
    if parsed.engine == "cluster":
        from training.cluster import train_on_cluster

        checkpoint = train_on_cluster(config, run, args, parsed.cluster)
    else:
        from training.start import start

        checkpoint = start(config, run, args)
    print(f"checkpoint: {checkpoint}")
    return 0


def evaluate(words: Sequence[str]) -> int:
    from training.arguments import numbers, parse, sampler_words

    words = sampler_words(words)
    given = parse(options.Eval(), words, "undertow eval")
    seeds = numbers(given.seeds, "--seeds")
    if given.trials is not None and given.trials < 1:
        raise ValueError(f"--trials is {given.trials}, expected 1 or more attempts")
    from training.subject import find_subject

    subject = find_subject(str(given.target), options.played_as(str(given.target)), given.out)
    config = subject.config
    own = replace(options.Eval(), env=config.env, sampler=config.sampler, skills=config.skills)
    given = parse(own, words, "undertow eval")
    play = replace(
        config.eval,
        panel=given.panel or config.eval.panel,
        size=config.eval.size if given.size is None else given.size,
        temperature=config.eval.temperature if given.temperature is None else given.temperature,
    )
    config = replace(config, env=given.env, sampler=given.sampler, skills=given.skills, eval=play)
    from training.episodes import play_seeds

    trials = (given.trials or options.TRIALS[given.protocol]) if given.protocol in options.TRIALS else 1
    artifacts = play_seeds(subject, config, seeds, protocol=given.protocol, trials=trials, device=given.device)
    from analysis.plain import print_table
    from analysis.scores import graded_table
    from analysis.trials import evaluation

    table, remark = evaluation(artifacts, given.protocol, trials)
    print_table(table, f"{subject.name} on {config.env.kind} {play.panel}, {given.protocol}{remark}")
    if len(graded := graded_table(artifacts)):
        print_table(graded, "score of an episode, beside its success")
    for artifact in artifacts:
        print(f"episodes: {artifact.path}")
    return 0


def diagnose(words: Sequence[str]) -> int:
    from training.arguments import parse

    given = parse(options.Diagnose(), words, "undertow diagnose")
    contexts, measures = given.contexts.split(","), given.measures.split(",")
    from training.diagnosis import diagnose_subject

    artifact = diagnose_subject(
        str(given.target),
        options.played_as(str(given.target)),
        contexts=contexts,
        measures=measures,
        trajectories=given.trajectories,
        skills=given.skills,
        reader=given.model,
        episodes=given.episodes,
        max_tokens=given.max_tokens,
        backend=given.backend,
        against=given.against,
        device=given.device,
        seed=given.seed,
        out=given.out,
    )
    if {"change", "all"} & set(measures):
        from analysis.measured import measured_tables
        from analysis.plain import print_table

        table = measured_tables({artifact.path.name: artifact.path}, ["changes"])[0].get("changes")
        if table is None:
            print("no shares: without the context `unrelated` there is no null to hold changes against")
        else:
            shown = table[table["channel"].isin(("hidden_change", "output_change"))]
            names = ["channel", "token_class", "context", "share", "low", "high", "threshold"]
            names += ["n_tokens", "n_trajectories"]
            print_table(shown[names], "tokens that change more than the 99th percentile under an unrelated text")
    for remark in artifact.manifest["remarks"]:
        print(remark)
    print(f"measurements: {artifact.path}")
    return 0


def figures(words: Sequence[str]) -> int:
    from training.arguments import parse

    given = parse(options.Figures(), words, "undertow figures")
    folder = _folder(given.target)
    from figures.publish import publish, redraw

    if given.only:
        redraw(folder, given.only)
    else:
        publish(folder)
    return 0


def report(words: Sequence[str]) -> int:
    from training.arguments import parse

    folder = _folder(parse(options.Report(), words, "undertow report").target)
    from analysis.report import report_run

    print(f"report: {report_run(folder)}")
    return 0


def data(words: Sequence[str]) -> int:
    from training.arguments import data_words, parse

    given = parse(options.Data(), data_words(words), "undertow data")
    sizes = {name: getattr(given, name) for name in ("train", "valid_seen", "valid_unseen")}
    sizes = {name: count for name, count in sizes.items() if count is not None}
    out = Path(given.out) if given.out else None
    from training.envs.bring import Request, bring

    kind = given.generate or given.kind or ("alfworld" if given.source else "")
    print(bring(kind, Request(given.source, out, sizes, given.seed, given.workers, given.goals)))
    return 0


def build(words: Sequence[str]) -> int:
    from training.arguments import parse

    given = parse(options.Build(), words, "undertow build")
    from diagnostics.progress import parts
    from training.cache import cache_dir
    from training.models.policies import POLICIES
    from training.models.tiny import build as build_policy

    if given.target not in POLICIES:
        known = ", ".join(f"`undertow build {name}`" for name in POLICIES)
        raise ValueError(f"there is nothing named {given.target!r} to build; say {known}")
    recipe, lessons = POLICIES[given.target]
    chosen = {name: value for name in ("games", "tokens", "threads") if (value := getattr(given, name)) is not None}
    out = Path(given.out or f"runs/{given.target}-policy")
    with parts() as report:
        build_policy(out, replace(recipe, seed=given.seed, **chosen), cache_dir(), report, lessons)
    print(f"policy: {out}")
    return 0


def methods(words: Sequence[str]) -> int:
    from training.arguments import parse
    from training.method import available_methods, describe, load_method

    given = parse(options.Methods(), words, "undertow methods")
    described = [describe(load_method(name)) for name in available_methods()]
    if given.json:
        print(json.dumps(described, indent=1))
        return 0
    from analysis.plain import method_tables, print_table

    table, settings = method_tables(described)
    print_table(table, "methods: --method NAME, or --method FILE.py; what the first distilling step needs")
    print_table(settings, "settings: --method-config.NAME, and where each default comes from")
    return 0


def doctor(words: Sequence[str]) -> int:
    from training.arguments import parse

    given = parse(options.Doctor(), words, "undertow doctor")
    if given.losses:
        return _verify(given)
    from training.doctor import examine

    failed = 0
    for finding in examine(given.skills):
        failed += not finding.well
        print(f"{'ok ' if finding.well else 'BAD'}  {finding.name:16} {finding.text}", flush=True)
    return int(bool(failed))


def reproduce(words: Sequence[str]) -> int:
    from training.arguments import numbers, parse

    given = parse(options.Reproduce(), words, "undertow reproduce")
    from analysis.reproduce import ALL, chosen_studies, reproduce_study
    from figures.publish import publish

    seeds, target = None if given.seed is None else numbers(given.seed, "--seed"), str(given.target)
    out, codes = Path(given.out or f"runs/{target}"), [0]
    for name in chosen_studies(target, given.recipe, seeds):
        folder = out / name if target == ALL else out
        codes.append(reproduce_study(name, folder, given.recipe, seeds, given.jobs))
        if codes[-1] == 130:
            return 130
        publish(folder, printed=True, failed=bool(codes[-1]))
    return max(codes)


def ablate(words: Sequence[str]) -> int:
    from training.arguments import check_training, numbers, parse
    from training.settings import suggestion

    given = parse(options.Ablate(), words, "undertow ablate")
    from analysis.ablation import PRESETS, ablate_study
    from analysis.arms import find_study

    if given.recipe not in PRESETS:
        raise ValueError(f"there is no recipe {given.recipe!r} of ablations; {suggestion(given.recipe, PRESETS)}")
    study, sizes = find_study(str(given.target)), PRESETS[given.recipe]
    seeds = None if given.seeds is None else numbers(given.seeds, "--seeds")
    folder = Path(given.out or f"runs/{study.name}-{given.recipe}")
    check = partial(check_training, options.Train(), given.method)
    code = ablate_study(folder, study, sizes, seeds, starred=given.starred, jobs=given.jobs, check=check)
    if code != 130:
        from figures.publish import publish

        publish(folder, printed=True, failed=bool(code))
    return code


def power(words: Sequence[str]) -> int:
    from training.arguments import parse

    given = parse(options.Power(), words, "undertow power")
    from analysis.plain import print_table
    from analysis.power import power_tables

    for title, table in power_tables(given.a, given.b, given.discordance).items():
        print_table(table, title)
    if given.out:
        from figures import fig_power

        print(f"\nfigure: {fig_power.write(Path(given.out), {}, given.a, given.b).png}")
    return 0


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train, "train a policy, or continue a run"),
    "eval": (evaluate, "success on a fixed panel, by task type, with intervals"),
    "diagnose": (diagnose, "what a skill in the context changes, on a run or any model and its episodes"),
    "figures": (figures, "draw the figures of a run or a study"),
    "report": (report, "one HTML page of a run or a study"),
    "reproduce": (reproduce, "a whole study, e.g. invisible-advantage"),
    "ablate": (ablate, "compare methods that start from the same checkpoint, e.g. channels"),
    "power": (power, "how many episodes tell two success rates apart, e.g. 0.66 0.71"),
    "data": (data, "bring ALFWorld's games into place, or generate new ones"),
    "build": (build, "build the tiny policy from expert play"),
    "methods": (methods, "the methods that can be trained"),
    "doctor": (doctor, "check versions, games, dialect, models and folders"),
}


def main() -> int:
    """Entry point. Returns the exit code: 0, 1 (a stage or a check failed), 2 (a wrong request), 130 (Ctrl-C)."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print("usage: undertow COMMAND [OPTIONS]\n")
        print("\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items()))
        print("\nundertow COMMAND --help lists the options of a command.")
        return 0
    for name, value in (("TRANSFORMERS_VERBOSITY", "error"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(name, value)
    try:
        if words[0] not in COMMANDS:
            from training.settings import suggestion

            raise ValueError(f"there is no command {words[0]!r}; {suggestion(words[0], COMMANDS)}")
        return COMMANDS[words[0]][0](words[1:])
    except KeyboardInterrupt:
        print("stopped; the same command goes on from what is complete on disk", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        if os.environ.get("UNDERTOW_DEBUG"):
            raise
        print(f"undertow: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _dry_run(config: Config, run: Path, cluster: ClusterConfig) -> int:
    """What a run on a cluster would be: verl's command and settings, memory and time; 1 when it does not fit."""
    from analysis.plain import print_rows
    from training.cluster.dry_run import dry_run
    from training.cluster.weights import origin

    said = dry_run(config, run, cluster, origin(config))
    print(said.command, json.dumps(said.settings, indent=1), sep="\n\n")
    for title, rows in said.tables.items():
        print_rows(rows, title)
    print(said.verdict)
    return int(said.plan is not None and not said.plan.fits)


def _verify(given: options.Doctor) -> int:
    """The doctor's look at the methods; 1 when one of them is off."""
    from analysis.plain import print_rows
    from training.verify import TOLERANCE, verify

    assert given.losses is not None
    found, tolerance = verify(given.losses, given.device, given.dtype), TOLERANCE[given.dtype]
    well = [off.within(tolerance) for off in found]
    rows = [{"": "ok" if ok else "BAD", **asdict(off)} for ok, off in zip(well, found, strict=True)]
    title = f"largest deviation from {given.losses}, relative to the largest entry; {given.dtype} on {given.device}"
    print_rows(rows, f"{title}, tolerance {tolerance:.0e}")
    return int(not all(well))


def _folder(target: str) -> Path:
    if not Path(target).is_dir():
        raise ValueError(f"there is no folder {target}; give a run or a study")
    return Path(target)


if __name__ == "__main__":
    sys.exit(main())
