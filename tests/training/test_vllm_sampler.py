"""The vLLM sampler over a stand-in for the server: ids in and out, temperature, seeds, a server that dies."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from diagnostics.render import prompt_ids, task_messages
from tests.diagnostics.tiny import chat_tokenizer
from tests.training.clockwork import TASKS, ClockworkPool
from training.rollout import group_starts, rollout
from training.samplers import server as server_file
from training.samplers.base import Request, Sampler, Session
from training.samplers.server import TRIES, VLLMServer, vllm_command
from training.samplers.vllm import VLLMSampler, check_logprobs, seed_of

FAKE = Path(__file__).with_name("fake_vllm.py")
TOKENIZER = chat_tokenizer()
VOCAB = len(TOKENIZER)
Make = Callable[..., VLLMSampler]


class Bigram(torch.nn.Module):
    """The policy of the stand-in, as transformers would have it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.from_numpy(np.load(folder / "table.npy")).float())

    dtype = torch.float32
    device = torch.device("cpu")

    def forward(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.table[ids])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.save(tmp_path / "table.npy", np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 3)
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def sampler(*options: str, **given: Any) -> VLLMSampler:
            def command(path: Path) -> list[str]:
                return [sys.executable, str(FAKE), str(folder), str(path), *options]

            server = stack.enter_context(VLLMServer(command))
            return VLLMSampler(server, TOKENIZER, **{"max_new_tokens": 8, "batch_size": 4, **given})

        yield sampler


def asked(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "asked.jsonl").read_text().splitlines()]


def test_it_is_a_sampler(make: Make) -> None:
    sampler = make()
    assert isinstance(sampler, Sampler) and isinstance(sampler.session(2), Session)


def test_ids_go_in_and_come_out_as_they_are(make: Make, folder: Path) -> None:
    sampler = make()
    session = sampler.session(2)
    first = session.reply({0: Request(("a",), [5, 6]), 1: Request(("b",), [7])})
    second = session.reply({0: Request(("c",), [8])})
    sent = {tuple(request["prompt"]) for request in asked(folder)}
    assert sent == {(5, 6), (7,), (5, 6, *first[0].ids.tolist(), 8)}
    assert second[0].ids.dtype == np.int32 and second[0].logprobs.dtype == np.float32
    fresh = session.reply({0: Request(("d",), [9], fresh=True)})
    assert asked(folder)[-1]["prompt"] == [9] and len(fresh) == 1
    with pytest.raises(ValueError, match="row 1 has left"):
        session.reply({1: Request(("e",), [1])})
    with pytest.raises(ValueError, match="no tokens"):
        sampler.session(1).reply({0: Request(("f",), [])})


def test_what_is_asked_leaves_nothing_to_the_model_s_own_defaults(make: Make, folder: Path) -> None:
    make(temperature=0.4).generate([[5]], [("k",)], max_new_tokens=3)
    (request,) = asked(folder)
    assert (request["temperature"], request["max_tokens"], request["seed"]) == (0.4, 3, seed_of(("k",)))
    assert (request["top_p"], request["top_k"], request["repetition_penalty"]) == (1.0, -1, 1.0)
    assert request["ignore_eos"] and request["stop_token_ids"] == [TOKENIZER.eos_token_id]


def test_a_reply_depends_on_its_key_alone(make: Make) -> None:
    sampler, alone = make(), make(batch_size=1)
    prompts, keys = [[5], [5], [6], [7]], [("a", 1), ("a", 2), ("b", 1), ("c", 1)]
    together = sampler.generate(prompts, keys)
    apart = [alone.generate([prompt], [key])[0] for prompt, key in zip(prompts, keys, strict=True)]
    assert [r.ids.tolist() for r in together] == [r.ids.tolist() for r in apart]
    assert together[0].ids.tolist() != together[1].ids.tolist()
    assert 0 <= seed_of(("a", 1)) < 2**63 and seed_of(("a", 1)) != seed_of(("a", "1"))


def test_case_b22(make: Make, folder: Path) -> None:
    table = np.full((VOCAB, VOCAB), -1e9)
    table[:, :3] = [2.0, 0.0, -1.0]
    np.save(folder / "table.npy", table)
    replies = make(temperature=0.4).generate([[5]] * 60, [("k", n) for n in range(60)], max_new_tokens=40)
    found = {id: lp for r in replies for id, lp in zip(r.ids.tolist(), r.logprobs.tolist(), strict=True)}
    assert found[1] == pytest.approx(-5.0073, abs=1e-4)


def test_the_check_on_load_reads_the_same_numbers(make: Make, folder: Path) -> None:
    model = Bigram(folder)
    assert all(check_logprobs(make(temperature=t), model) < 1e-5 for t in (0.0, 0.4, 1.0))
    assert check_logprobs(make("raw", temperature=1.0), model) < 1e-5  # nothing to see at temperature 1
    with pytest.raises(ValueError, match=r"temperature 0\.4 .* off .*another"):
        check_logprobs(make("raw", temperature=0.4), model)
    with torch.no_grad():
        model.table += 0.01 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="other weights"):
        check_logprobs(make(temperature=1.0), model)


def test_greedy_is_the_table_s_own_choice_and_counts_near_ties(make: Make, folder: Path) -> None:
    table = np.load(folder / "table.npy")
    sampler = make(temperature=0.0)
    (reply,) = sampler.generate([[5]], [("k",)])
    expected, last = [], 5
    for _ in range(8):
        last = int(table[last].argmax())
        expected.append(last)
        if last == TOKENIZER.eos_token_id:
            break
    assert reply.ids.tolist() == expected and reply.near_ties == 0
    table[5, :] = 0.0
    table[5, 40:42] = 9.0
    np.save(folder / "table.npy", table)
    (tied,) = make(temperature=0.0).generate([[5]], [("k",)], max_new_tokens=1)
    assert tied.near_ties == 1


def test_a_reply_ends_with_the_end_token(make: Make, folder: Path) -> None:
    table = np.full((VOCAB, VOCAB), -50.0)
    table[:, TOKENIZER.eos_token_id] = 50.0
    np.save(folder / "table.npy", table)
    (reply,) = make().generate([prompt_ids(TOKENIZER, task_messages("t", "o", None))], [("k",)])
    assert reply.ids.tolist() == [TOKENIZER.eos_token_id] and reply.ended and reply.text == ""


def episodes(sampler: VLLMSampler) -> list[Any]:
    return rollout(sampler, ClockworkPool(), group_starts(TASKS, 2), seed=0, max_turns=4, max_context=4000)[0]


def test_a_server_that_is_killed_costs_no_episode(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sampler = make("die=9")
        survived = episodes(sampler)
    assert sampler.server.restarts == 1
    assert "ended (137); new start 1 of 3" in caplog.text
    undisturbed = episodes(make())
    assert [t.stop_reason for t in survived] == [t.stop_reason for t in undisturbed]
    for a, b in zip(survived, undisturbed, strict=True):
        assert all(np.array_equal(x.ids, y.ids) for x, y in zip(a.segments, b.segments, strict=True))


def test_a_server_that_dies_every_time_ends_the_run_with_one_sentence(make: Make) -> None:
    sampler = make("die=1", "always")
    with pytest.raises(ValueError, match="ended.*after 3 new starts without a reply") as told:
        sampler.generate([[5]] * 6, [("k", n) for n in range(6)])
    assert "\n" not in str(told.value) and sampler.server.restarts == TRIES
    assert str(told.value).count("last words") == 1
    with pytest.raises(ValueError, match="after 3 new starts"):  # nobody starts it once more
        sampler.generate([[5]], [("k",)])
    assert sampler.server.restarts == TRIES


def test_a_server_that_never_starts_says_why(make: Make) -> None:
    with pytest.raises(ValueError, match="does not start .code 3.*no room for the cache"):
        make("never").generate([[5]], [("k",)])


def test_a_refused_request_is_not_asked_again(make: Make) -> None:
    sampler = make()
    with pytest.raises(ValueError, match="refuses a request: 400"):
        sampler.generate([[VOCAB]], [("k",)])
    assert sampler.server.restarts == 0


def test_the_server_ends_with_the_session(make: Make) -> None:
    sampler = make()
    with sampler.server as server:
        sampler.generate([[5]], [("k",)])
        process = server._process
        assert process is not None and process.poll() is None
    assert process.poll() is not None and not server.log.exists()


def test_the_server_ends_with_us_even_when_we_are_killed(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from training.samplers.server import VLLMServer\n"
        "server = VLLMServer(lambda path: [sys.executable, sys.argv[1], sys.argv[2], str(path)])\n"
        "server.complete([5], seed=0, max_tokens=1, temperature=1.0, stop=2)\n"
        "print(server._process.pid, flush=True)\n"
        "input()"
    )
    words = [sys.executable, "-c", code, str(FAKE), str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        group = psutil.Process(int(run.stdout.readline()))
        family = [group, *group.children(recursive=True)]
        assert len(family) == 2
        run.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


@pytest.mark.parametrize("option", [[], ["slow"]])  # while it answers, and while it starts
def test_a_keyboard_interrupt_does_not_wait_for_the_server(make: Make, option: list[str]) -> None:
    sampler = make(*option)
    if not option:
        sampler.generate([[5]], [("k",)])

    def interrupt() -> None:
        while (process := sampler.server._process) is None:
            time.sleep(0.05)
        if not option:
            psutil.Process(process.pid).children()[0].suspend()  # it will never answer
        time.sleep(0.5)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        sampler.generate([[5]] * 3, [("k", n) for n in range(3)])
    assert sampler.server._process is None and sampler.server.restarts == 0
    with pytest.raises(ValueError, match="the vLLM server was ended"):
        sampler.generate([[5]], [("k",)])


def test_nobody_else_can_ask_the_server(make: Make) -> None:
    sampler = make()
    sampler.generate([[5]], [("k",)])
    server = sampler.server
    assert server.log.parent.stat().st_mode & 0o077 == 0 and server._socket.is_socket()
    family = psutil.Process(server._process.pid)  # type: ignore[union-attr]
    assert not [place for one in (family, *family.children(recursive=True)) for place in one.net_connections("inet")]


def test_heads_that_a_cpu_cannot_serve_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_file.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(server_file, "_free_share", lambda: None)
    config = {"hidden_size": 160, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="40 dimensions.*sampler.engine hf"):
        vllm_command(str(tmp_path), "float32")
    (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": 64}))
    assert "--enforce-eager" in vllm_command(str(tmp_path), "float32")(Path("a.socket"))


def test_the_command_of_a_real_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed"):
        vllm_command("model", "float32")
    monkeypatch.setattr(server_file.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(server_file, "_free_share", lambda: 0.55)
    words = " ".join(vllm_command("model", "bfloat16")(Path("a.socket")))
    assert "--logprobs-mode processed_logprobs" in words and "--generation-config vllm" in words
    assert words.endswith("--uds a.socket") and "--port" not in words and "--gpu-memory-utilization 0.55" in words
    monkeypatch.setattr(server_file, "_free_share", lambda: None)
    assert "--enforce-eager" in vllm_command("model", "float32")(Path("a.socket"))
