"""The page of a run: self-contained, escaped, honest about what is missing."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from platform import python_version

import pandas as pd
import pytest

from analysis.card import PACKAGES, reproduction_card
from analysis.claims import FAILS, HOLDS, MISSING, OPEN, Claim, claim_table, write_claims
from analysis.findings import MOST, findings
from analysis.frames import metrics_frame
from analysis.page import MARKS, Page, caption, write_report
from analysis.report import ONE_SEED, SMOLLM, TINY, final_and_best, report_run, skill_hits
from analysis.tables import save_tables
from diagnostics.artifact import save_artifact

PNG = bytes.fromhex("89504e470d0a1a0a")


def test_page_is_self_contained_and_escaped(tmp_path):
    figure = tmp_path / "f.png"
    figure.write_bytes(PNG)
    hostile = "<script>alert(1)</script>"
    table = pd.DataFrame({"type": [hostile], "success": [0.4567], "p": [0.01234], "n_tasks": [12], "low": [None]})
    (tmp_path / "f.json").write_text(json.dumps({"interval": hostile}))
    page = Page(
        hostile,
        found=[hostile],
        warnings=[hostile],
        figures=[figure],
        tables={hostile: table},
        samples=[(hostile, hostile)],
        config={"model": hostile},
        inputs=[("table", hostile, "ab12")],
    )
    html = write_report(tmp_path / "report.html", page).read_text()
    assert hostile not in html and html.count("&lt;script&gt;") >= 11
    assert "data:image/png;base64,iVBORw0KGgo=" in html
    assert not re.search(r'(src|href)="(?!data:|#)', html) and "url(" not in html and "@import" not in html
    for cell in ("45.7 %", "0.01234", "12", "–"):
        assert f"<td>{cell}</td>" in html


def test_report_of_a_run_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"method": "pr_opd"}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/success": 0.5}\n')
    (tmp_path / "study.json").write_text(json.dumps({"train": {"state": "failed", "log": "logs/train.log"}}))
    changes = pd.DataFrame({"reader": ["tiny", "smollm2-135m"], "share": [0.8, 0.7]})
    curves = pd.DataFrame({"arm": ["grpo"], "step": [3], "success": [0.5], "n_errors": [2]})
    saved = save_tables(tmp_path / "tables" / "all", {"changes": changes, "curves": curves}, inputs=[])
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "fig1.json").write_text("{}")
    (tmp_path / "figures" / "fig1.png").write_bytes(PNG)
    html = report_run(tmp_path).read_text()
    for text in (TINY.replace("'", "&#39;"), SMOLLM, ONE_SEED, saved.digest, "tables/all: changes", "training metrics"):
        assert text in html
    assert "Stage train failed; its log is logs/train.log." in html
    assert "up to 2 episodes of a row ended in an error" in html and "iVBORw0KGgo=" in html


def test_no_reader_no_warning(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval/success": 0.5}\n')
    html = report_run(tmp_path).read_text()
    assert "taught to read skills" not in html and 'class="warnings"' not in html


def test_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to report in"):
        report_run(tmp_path)


def test_b72_final_and_best_are_apart():
    frame = pd.DataFrame(
        {"step": [2, 1, 3, 3], "attempt": 0, "metric": ["s/success"] * 3 + ["loss"], "value": [0.7, 0.2, 0.6, 9.0]}
    )
    assert final_and_best(frame).to_dict("records") == [
        {"metric": "s/success", "final": 0.6, "final_step": 3, "best": 0.7, "best_step": 2}
    ]


def test_long_tables_are_cut_and_say_so(tmp_path):
    page = Page("long", tables={"t": pd.DataFrame({"x": range(200)})})
    html = write_report(tmp_path / "report.html", page).read_text()
    assert "First 60 of 200 rows" in html and "<td>59</td>" in html and "<td>60</td>" not in html


def test_skills_and_what_the_teacher_read_are_on_the_page(tmp_path):
    rows = [
        {"step": 1, "skills/hit/heat": 1.0, "skills/hit/cool": 0.0, "distill/over_budget": 0.5},
        {"step": 2, "skills/hit/heat": 0.5, "distill/over_budget": 0.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "samples").mkdir()
    for step in (2, 9, 10):
        sample = {"trajectory": f"t{step}", "task": "a", "teacher_prompt": f"<|im_start|>Skill of step {step}"}
        (tmp_path / "samples" / f"step_{step}.json").write_text(json.dumps([sample]))
    hits = skill_hits(metrics_frame(tmp_path)).set_index("task_type")["share"].to_dict()
    assert hits == {"heat": 0.75, "cool": 0.0, "all: over budget": 0.25}
    html = report_run(tmp_path).read_text()
    assert "step_2, t2" in html and "step_10, t10" in html and "step_9" not in html
    assert "&lt;|im_start|&gt;Skill of step 10" in html


CHANGES = pd.DataFrame(
    [
        {"reader": "tiny", "channel": channel, "token_class": token_class, "context": context, "share": share}
        for channel, token_class, context, share in (
            ("hidden_change", "all", "own_skill", 0.8125),
            ("output_change", "all", "own_skill", 0.2),
            ("hidden_change", "think", "own_skill", 0.9),
            ("hidden_change", "all", "unrelated", 0.01),
        )
    ]
).assign(low=lambda f: f["share"] - 0.01, high=lambda f: f["share"] + 0.01)


def test_what_was_found_in_plain_lines():
    gains = pd.DataFrame({"baseline": "grpo", "arm": ["pr_opd", "alignment"], "step": 35, "n_tasks": 128})
    gains = gains.assign(difference=[0.1, -0.0001], low=[0.05, -0.02], high=[0.2, 0.01])
    assert findings({"changes": CHANGES, "gains": gains}, None) == [
        "tiny: the own skill changes the hidden state of 81.2\u00a0% [80.2, 82.2] and the probability of "
        "20.0\u00a0% [19.0, 21.0] of the tokens, by more than an unrelated text does to 99 % of them.",
        "pr_opd against grpo, step 35: +10.0 points of success [5.0, 20.0]; 128 tasks.",
        "alignment against grpo, step 35: 0.0 points of success [−2.0, 1.0]; 128 tasks.",
    ]
    many = pd.concat([gains] * MOST)
    assert findings({"gains": many}, None)[-1] == f"{MOST} more differences are in their table."


def test_success_is_told_where_nothing_is_compared():
    curves = pd.DataFrame({"arm": "grpo", "step": [3, 9], "success": [0.2, 0.5], "low": 0.4, "high": 0.6})
    told = findings({"curves": curves.assign(n_episodes=40)}, None)
    assert told == ["grpo succeeds in 50.0\u00a0% [40.0, 60.0] of 40 episodes."]
    assert findings({}, None) == [] and findings({"changes": pd.DataFrame({"reader": ["x"]})}, None) == []


def _claims() -> pd.DataFrame:
    arguments = {"channel": "hidden_change"}
    bounds = {"holds": 0.8, "fails": 0.9, "open": 0.81}
    made = [Claim(f"pr-opd/{k}", "PR-OPD", "Fig. 1", f"{k}.", "change_share", arguments, v) for k, v in bounds.items()]
    made[0] = Claim(**{**made[0].__dict__, "published": ("change/hidden",), "note": "Ours & <theirs>."})
    missing = Claim("sdar/m", "SDAR", "Fig. 2", "Not seen.", "change_share", {"channel": "none"}, 0)
    return claim_table({"study": {"changes": CHANGES}}, [*made, missing])


def test_claims_stand_on_the_page_with_verdicts_numbers_and_remarks(tmp_path):
    write_claims(tmp_path / "claims.json", _claims(), {})
    html = report_run(tmp_path).read_text()
    for verdict in (HOLDS, FAILS, OPEN, MISSING):
        assert len(re.findall(rf'<td><b aria-hidden="true">{re.escape(MARKS[verdict])}</b> {verdict}</td>', html)) == 1
    first = re.search(r'<td class="text">holds\..*?</tr>', html, re.S)[0]
    assert "Ours &amp; &lt;theirs&gt;." in first and "0.812 [0.802, 0.823]" in first and "0.813 to 0.933" in first
    assert (
        "Of 4 sentences of the papers 3 were tested, in 3 readings (one a model or arm): "
        "holds 1, does not hold 1, cannot tell at this power 1."
    ) in html
    counts = [re.findall(r"<td>([^<\s]+)</td>", row) for row in re.findall(r"<tr>(?:<td>[^<]*</td>)+</tr>", html)]
    assert ["PR-OPD", "1", "1", "1", "0"] in counts and ["SDAR", "0", "0", "0", "1"] in counts
    assert 'href="#claims"' in html and 'href="#figures"' not in html


@pytest.mark.parametrize("text", ["{", "[]", '{"claims": [{"id": 1}]}'])
def test_broken_claims_are_named(tmp_path, text):
    (tmp_path / "claims.json").write_text(text)
    with pytest.raises(ValueError, match=r"claims.json holds no claims .*; remove it"):
        report_run(tmp_path)


def test_a_caption_says_interval_papers_and_script():
    record = {"interval": "95 %, bootstrap", "script": "figures.fig_x", "inputs": {"a": "1"}}
    record["references"] = ["PR-OPD (arXiv 2609.36642), Fig. 1", "PR-OPD (arXiv 2609.36642), Fig. 4", "a log."]
    assert caption(record) == (
        "Interval: 95 %, bootstrap. Marks of papers: PR-OPD (arXiv 2609.36642), Fig. 1, Fig. 4; a log. "
        "Drawn by figures.fig_x from 1 artifact."
    )
    assert caption({}) == ""


def _run(folder, **config):
    folder.mkdir(parents=True)
    told = {"recipe": "tiny-grpo", "method": "pr_opd", "seed": 7, "steps": 5, "model": {"name": "tiny"}}
    told |= {"eval": {"panel": "valid_seen", "size": 16}, "env": {"kind": "household"}, **config}
    (folder / "config.json").write_text(json.dumps(told))
    words = ["--out", "runs/a b", "--seed", "7"]
    (folder / "args.json").write_text(json.dumps({"command": "train", "words": words}))
    (folder / "code.diff").write_text("")
    for seed in (100, 2):
        played = {"panel": "f286", "seed": seed}
        extra = {"played": played}
        save_artifact(folder / "trajectories" / f"seed{seed}", "trajectories", tables={"t": [{"x": 1}]}, extra=extra)


def test_the_card_says_how_to_make_a_run_again(tmp_path):
    _run(tmp_path / "run")
    html = report_run(tmp_path / "run").read_text()
    for text in ("tiny-grpo", "f286", "2, 100", "valid_seen, 16 tasks", python_version(), version("torch")):
        assert f"<td>{text}</td>" in html
    assert "undertow train --out &#39;runs/a b&#39; --seed 7" in html and "docs/methods.md" in html
    assert "with changes (code.diff)" not in html
    (tmp_path / "run" / "code.diff").write_text("- a")
    described = {"doc": "PR-OPD.\n1. The projector is plain.", "config": [{"name": "width", "default": 512}]}
    described["config"][0]["source"] = "ours"
    (tmp_path / "run" / "method.json").write_text(json.dumps(described))
    html = report_run(tmp_path / "run").read_text()
    assert "with changes (code.diff)" in html and "1. The projector is plain." in html
    assert "Settings that no paper gives: width 512." in html and "the run recorded none" not in html


def test_the_card_of_a_study_has_its_runs_and_stages(tmp_path):
    _run(tmp_path / "seed0" / "grpo", method="grpo")
    _run(tmp_path / "seed0" / "own", method="/somewhere/own.py")
    (tmp_path / "seed0" / "grpo" / "checkpoints").mkdir()
    (tmp_path / "seed0" / "config.json").write_text('{"hidden_size": 8}')  # a model's, not a run's
    stage = {"command": ["/p/python", "-m", "undertow", "eval", "tiny"], "state": "done", "log": "l"}
    (tmp_path / "study.json").write_text(json.dumps({"play": stage}))
    card = reproduction_card(tmp_path, [])
    assert list(card.runs["run"]) == ["seed0/grpo", "seed0/own"] and list(card.runs["method"]) == ["grpo", "own.py"]
    assert list(card.commands) == [("play", "done", "undertow eval tiny")]
    assert set(PACKAGES) <= set(card.versions["package"]) and [name for name, _ in card.departures] == [
        "grpo",
        "own.py",
    ]
