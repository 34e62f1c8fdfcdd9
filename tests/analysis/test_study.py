"""Studies of small fake stages: resume, failure, interruption, progress."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from analysis.board import Row, time_left
from analysis.study import Stage, output_digest, run_study
from diagnostics.artifact import save_artifact

ROOT = Path(__file__).parents[2]


def stage(folder: Path, name: str, code: str = "", needs: tuple[str, ...] = ()) -> Stage:
    """Counts its own runs in <name>.runs and writes its output."""
    out, runs = folder / f"{name}.out", folder / f"{name}.runs"
    script = f"open({str(runs)!r}, 'a').write('x')\n{code}\nopen({str(out)!r}, 'w').write('{name}')"
    return Stage(name, (sys.executable, "-c", script), out, needs)


def runs(folder: Path, *names: str) -> list[int]:
    return [len(path.read_text()) if (path := folder / f"{name}.runs").exists() else 0 for name in names]


def test_second_run_keeps_everything(tmp_path):
    stages = [stage(tmp_path, "a"), stage(tmp_path, "b", needs=("a",))]
    assert run_study(stages, tmp_path / "study") == 0
    assert run_study(stages, tmp_path / "study") == 0
    assert runs(tmp_path, "a", "b") == [1, 1]
    records = json.loads((tmp_path / "study" / "study.json").read_text())
    assert records["b"]["inputs"] == {"a": output_digest(tmp_path / "a.out")}


def test_lost_output_changed_command_and_changed_input_run_again(tmp_path):
    study = tmp_path / "study"
    stages = [stage(tmp_path, "a"), stage(tmp_path, "b", needs=("a",)), stage(tmp_path, "c")]
    run_study(stages, study)
    (tmp_path / "c.out").unlink()
    run_study(stages, study)
    assert runs(tmp_path, "a", "b", "c") == [1, 1, 2]
    same_output = stage(tmp_path, "a", code="1 + 1")  # another command, equal bytes: what needs it is kept
    run_study([same_output, *stages[1:]], study)
    assert runs(tmp_path, "a", "b", "c") == [2, 1, 2]
    out = tmp_path / "a.out"
    other = Stage("a", (sys.executable, "-c", f"open({str(out)!r}, 'w').write('other')"), out)
    run_study([other, *stages[1:]], study)
    assert runs(tmp_path, "a", "b", "c") == [2, 2, 2]


def test_failed_stage_takes_only_its_dependants(tmp_path, capfd):
    stages = [
        stage(tmp_path, "bad", code="raise SystemExit('no games in here')"),
        stage(tmp_path, "child", needs=("bad",)),
        stage(tmp_path, "grandchild", needs=("child",)),
        stage(tmp_path, "free"),
    ]
    assert run_study(stages, tmp_path / "study") == 1
    assert runs(tmp_path, "bad", "child", "grandchild", "free") == [1, 0, 0, 1]
    said = capfd.readouterr().err
    log = tmp_path / "study" / "logs" / "bad.log"
    assert f"stage bad failed: exit code 1; see {log}" in said
    assert "stage child was skipped: needs bad" in said and "stage grandchild was skipped: needs child" in said
    assert "no games in here" in log.read_text()
    repaired = [stage(tmp_path, "bad"), *stages[1:]]
    assert run_study(repaired, tmp_path / "study") == 0
    assert runs(tmp_path, "bad", "child", "grandchild", "free") == [2, 1, 1, 1]


def test_stages_run_side_by_side_where_their_needs_allow(tmp_path):
    """a and b can only end together; c waits for both, d for neither but for a place."""
    meet = """
import pathlib, time
here = pathlib.Path({here!r})
here.write_text("")
end = time.monotonic() + 30
while not pathlib.Path({other!r}).exists():
    assert time.monotonic() < end, "alone"
    time.sleep(0.01)
"""
    a, b = (str(tmp_path / name) for name in ("a.here", "b.here"))
    last = f"import pathlib; assert pathlib.Path({str(tmp_path / 'b.out')!r}).exists()"
    stages = [
        stage(tmp_path, "a", meet.format(here=a, other=b)),
        stage(tmp_path, "b", meet.format(here=b, other=a)),
        stage(tmp_path, "c", last, needs=("a", "b")),
        stage(tmp_path, "d", "raise SystemExit(3)"),
        stage(tmp_path, "e", needs=("d",)),
    ]
    assert run_study(stages, tmp_path / "study", jobs=2) == 1
    assert runs(tmp_path, "a", "b", "c", "d", "e") == [1, 1, 1, 1, 0]
    records = json.loads((tmp_path / "study" / "study.json").read_text())
    assert [records[name]["state"] for name in "abcd"] == ["done", "done", "done", "failed"] and "e" not in records
    assert run_study(stages, tmp_path / "study", jobs=2) == 1
    assert runs(tmp_path, "a", "b", "c", "d", "e") == [1, 1, 1, 2, 0]


def test_jobs_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="jobs is 0, expected 1 or more"):
        run_study([], tmp_path, jobs=0)


@pytest.mark.parametrize(
    "command, note", [((sys.executable, "-c", "0"), "left no"), (("/no/such/program",), "cannot start")]
)
def test_no_output_or_no_program_is_a_failure(tmp_path, capfd, command, note):
    assert run_study([Stage("a", command, tmp_path / "a.out")], tmp_path / "study") == 1
    assert note in capfd.readouterr().err


def test_graph_is_checked_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="needs 'b', which is no earlier stage"):
        run_study([stage(tmp_path, "a", needs=("b",)), stage(tmp_path, "b")], tmp_path)
    with pytest.raises(ValueError, match="two stages are named 'a'"):
        run_study([stage(tmp_path, "a"), stage(tmp_path, "a")], tmp_path)
    assert runs(tmp_path, "a", "b") == [0, 0]


def test_plain_lines_show_progress(tmp_path, capfd):
    code = """
        from diagnostics.progress import progress
        with progress("rollout", 4) as report:
            for step in range(4):
                report(step + 1, success=0.5)
    """
    prefix = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    assert run_study([stage(tmp_path, "a", code=prefix + textwrap.dedent(code))], tmp_path / "study") == 0
    assert "✓ a  done  4/4  50.0%" in capfd.readouterr().err


DRIVER = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from analysis.study import Stage, run_study
code = '''
import os, sys, time, pathlib
done = pathlib.Path({out!r})
mark = pathlib.Path({out!r} + ".started")
if mark.exists():
    done.write_text("continued")
else:
    mark.write_text(str(os.getpid()))
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        pathlib.Path({out!r} + ".clean").write_text("")
        raise
'''
sys.exit(run_study([Stage("slow", (sys.executable, "-c", code), Path({out!r}))], Path({study!r})))
"""


def test_a_study_killed_while_it_makes_an_output_again_does_not_trust_the_rest(tmp_path):
    study, half_done = tmp_path / "study", tmp_path / "a.out"
    code = f"""
import os, pathlib
pathlib.Path({str(half_done)!r}).write_text("half")
if os.environ.get("KILL"):
    os.kill(os.getppid(), 9)
else:
    pathlib.Path({str(half_done)!r}).write_text("whole")
"""
    command = (sys.executable, "-c", code)
    driver = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\nfrom analysis.study import Stage, run_study\n"
        f"sys.exit(run_study([Stage('a', {command!r}, Path({str(half_done)!r}))], Path({str(study)!r})))"
    )

    def run(**environment: str) -> int:
        return subprocess.run([sys.executable, "-c", driver], env={**os.environ, **environment}, check=False).returncode

    assert run() == 0
    half_done.unlink()
    assert run(KILL="1") == -signal.SIGKILL and half_done.read_text() == "half"
    assert run() == 0 and half_done.read_text() == "whole"


@pytest.mark.parametrize("ignored", [False, True], ids=["", "started-with-&"])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_stops_the_stage_and_a_second_run_continues(tmp_path, stop, ignored):
    out, study = tmp_path / "out", tmp_path / "study"
    driver = DRIVER.format(root=str(ROOT), out=str(out), study=str(study))
    shell = "trap '' INT; exec \"$@\"" if ignored else 'exec "$@"'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", driver]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    started = Path(f"{out}.started")
    while not (started.exists() and started.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    with pytest.raises(ValueError, match="another process works in"):
        run_study([], study)
    process.send_signal(stop)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and "run the same command again" in said
    assert Path(f"{out}.clean").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert subprocess.run([sys.executable, "-c", driver], capture_output=True, check=False).returncode == 0
    assert out.read_text() == "continued"


def test_time_left_follows_the_measured_pace():
    waiting = Row("b", weight=100)
    assert time_left([Row("a", weight=50), waiting]) == 150
    done = Row("a", weight=50, state="done", seconds=180)
    assert time_left([done, waiting]) == pytest.approx((180 + 30) / (50 + 30) * 100)
    half = Row("b", weight=100, state="running", step=1, total=2, seconds=50)
    assert time_left([half]) == pytest.approx(50)
    assert time_left([Row("a", weight=50, state="done"), waiting]) == 100  # kept from an earlier run: no pace


def test_digest_of_artifacts_is_that_of_their_content(tmp_path):
    folder = tmp_path / "run"
    first, rows = save_artifact(folder / "a", "table", tables={"t": [{"x": 1}]}), output_digest(folder)
    manifest = json.loads((first.path / "manifest.json").read_text())
    (first.path / "manifest.json").write_text(json.dumps({**manifest, "created": "another time"}))
    assert output_digest(folder) == rows
    save_artifact(folder / "a", "table", tables={"t": [{"x": 2}]})
    assert output_digest(folder) != rows


def test_digest_of_plain_files_reads_all_of_them(tmp_path):
    (tmp_path / "a.txt").write_text("1")
    before = output_digest(tmp_path)
    (tmp_path / "a.txt").write_text("2")
    assert output_digest(tmp_path) != before
