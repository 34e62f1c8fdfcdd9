"""The page of a run: self-contained, escaped, honest about what is missing."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest

from analysis.frames import metrics_frame
from analysis.report import ONE_SEED, SMOLLM, TINY, Page, final_and_best, report_run, skill_hits, write_report
from analysis.tables import save_tables

PNG = bytes.fromhex("89504e470d0a1a0a")


def test_page_is_self_contained_and_escaped(tmp_path):
    figure = tmp_path / "f.png"
    figure.write_bytes(PNG)
    hostile = "<script>alert(1)</script>"
    table = pd.DataFrame({"type": [hostile], "success": [0.4567], "p": [0.01234], "n_tasks": [12], "low": [None]})
    page = Page(hostile, [hostile], [figure], {hostile: table}, {"model": hostile}, [("table", hostile, "ab12")])
    html = write_report(tmp_path / "report.html", page).read_text()
    assert hostile not in html and html.count("&lt;script&gt;") >= 6
    assert "data:image/png;base64,iVBORw0KGgo=" in html
    assert not re.search(r'(src|href)="(?!data:)', html)
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
