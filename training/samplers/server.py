"""A vLLM server on this machine that the run starts, asks in token ids, and starts again when it dies.

Only this process can ask it: it listens on the loopback address and wants a key that is made anew for every server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

log = logging.getLogger(__name__)

TIED = Path(__file__).with_name("tied.py")
TRIES = 3  # times in a row that a dead server is started again
START_SECONDS = 900.0  # until a server answers: large weights on a slow disk
REPLY_SECONDS = 900.0  # of one reply
GRACE = 2.0  # in which a server that does not answer may still be ending
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # dimensions of an attention head, vLLM 0.24 to 0.31
FREE_SHARE = 0.8  # of a GPU's memory that is free when the server starts

Command = Callable[[int], list[str]]  # port -> what is started


@dataclass(frozen=True)
class Completion:
    """What the server sampled."""

    ids: list[int]
    logprobs: list[float]  # nats, at the sampling temperature; greedy: at temperature 1
    runners_up: list[float]  # of the likeliest other token, where it was asked for


def vllm_command(folder: str, dtype: str) -> Command:
    """The command of a vLLM server for a model folder.

    Log-probs are those after temperature (case B22), and the sampling defaults that a model's own generation_config may
    hold (Qwen2.5: a repetition penalty, top_k, top_p) are left out.
    Raises: ValueError when vLLM is not installed, or cannot serve this model on a CPU.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vllm is not installed here; install undertow[cluster] (GPUs), or use --sampler.engine hf")
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--dtype", dtype]
    words += ["--host", "127.0.0.1", "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    share = _free_share()
    if share is None:
        _check_heads(folder)
    # on a CPU vLLM would compile for minutes
    words += ["--enforce-eager"] if share is None else ["--gpu-memory-utilization", f"{share:.2f}"]
    return lambda port: [*words, "--port", str(port)]


def _check_heads(folder: str) -> None:
    """Raises ValueError for heads that vLLM has no attention for on a CPU: it would die at the first reply."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    heads = config.get("num_attention_heads")
    width = config.get("head_dim") or (config["hidden_size"] // heads if heads else CPU_HEADS[0])
    if width not in CPU_HEADS:
        raise ValueError(
            f"{folder} has attention heads of {width} dimensions; on a CPU vLLM serves "
            f"{', '.join(map(str, CPU_HEADS))}, so play with --sampler.engine hf"
        )


def _free_share() -> float | None:
    """The part of the first GPU's memory that the server may take; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return FREE_SHARE * free / total


class VLLMServer:
    """One server; `complete` may be called from many threads. Use as a context manager: leaving it ends the server."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.key = secrets.token_hex(16)
        self.restarts = 0  # over its whole life
        self._failures = 0  # since the last reply
        self._life = 0  # which start of the server is running
        self._given_up: str | None = None  # why
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="undertow-vllm-")
        self._http = build_opener(ProxyHandler({}))  # the server is on this machine: no proxy
        self.log = Path(self._folder.name) / "server.log"

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()
        self._folder.cleanup()

    def complete(
        self, ids: Sequence[int], *, seed: int, max_tokens: int, temperature: float, stop: int, runner_up: bool = False
    ) -> Completion:
        """One sampled continuation of `ids`, ended by the token `stop`; the same for the same seed.

        A server that has died, or does not answer, is started again and asked once more; the loss is logged.
        Raises: ValueError when the server refuses the request, or has died TRIES times without a reply in between.
        """
        asked = {
            "prompt": list(ids),
            "seed": seed,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "ignore_eos": True,  # the model's own list of end tokens may be longer than the tokenizer's one
            "stop_token_ids": [stop],
            "logprobs": 2 if runner_up else 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        while True:
            life = self._running()
            try:
                answer = self._ask("/v1/completions", asked, REPLY_SECONDS)
            except HTTPError as error:
                if error.code < 500:
                    refusal = error.read().decode(errors="replace")[:300]
                    raise ValueError(f"the vLLM server refuses a request: {error.code} {refusal}") from error
                self._lost(life, f"it answers {error.code}")
            except (OSError, HTTPException, ValueError) as error:  # refused, reset, timed out, cut in the middle
                self._lost(life, str(error) or type(error).__name__)
            else:
                self._failures = 0
                return _completion(answer["choices"][0], runner_up)

    def _running(self) -> int:
        """The number of the server that runs; the first call starts it."""
        with self._lock:
            if self._given_up is not None:
                raise ValueError(self._given_up)
            if self._process is None:
                self._start()
            return self._life

    def _lost(self, life: int, reason: str) -> None:
        """Start the server again, unless another thread has done so since `life`."""
        with self._lock:
            if self._given_up is not None:
                raise ValueError(self._given_up)
            if life != self._life:
                return
            code = None
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # the connection breaks before the process is gone
                    code = self._process.wait(GRACE)
            lost = f"the vLLM server does not answer ({reason})" if code is None else f"the vLLM server ended ({code})"
            while True:
                self._stop()
                self._failures += 1
                if self._failures > TRIES:
                    self._given_up = f"{lost}, after {TRIES} new starts without a reply; its last words: {self._tail()}"
                    raise ValueError(self._given_up)
                log.warning("%s; new start %d of %d, lost replies are asked for again", lost, self._failures, TRIES)
                self.restarts += 1
                try:
                    self._start()
                    return
                except ValueError as error:
                    lost = str(error)

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **os.environ,
            "VLLM_API_KEY": self.key,
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self.log.open("ab") as said:
            # a session of its own: Ctrl-C is for us, and its children can be ended together
            self._process = subprocess.Popen(
                [sys.executable, str(TIED), *self.command(port)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._life += 1
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit:
            if (code := self._process.poll()) is not None:
                self._process = None
                raise ValueError(f"the vLLM server does not start (code {code}); its last words: {self._tail()}")
            with contextlib.suppress(OSError, HTTPException):
                self._http.open(f"{self._address}/health", timeout=5.0).close()
                return
            time.sleep(0.2)
        self._stop()
        raise ValueError(f"the vLLM server does not answer after {START_SECONDS:.0f} s; its last words: {self._tail()}")

    def _ask(self, path: str, content: Any, timeout: float) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = Request(f"{self._address}{path}", json.dumps(content).encode(), headers)
        with self._http.open(request, timeout=timeout) as answer:
            return json.load(answer)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _tail(self) -> str:
        """The last line of the server's log that says something."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if "Error" in line]
        return (errors or said or ["nothing"])[-1][:300]


def _completion(choice: dict[str, Any], runner_up: bool) -> Completion:
    ids = choice["token_ids"]
    logprobs = choice["logprobs"]["token_logprobs"]
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} ids came with {len(logprobs)} log-probs")
    others = []
    for token, place in zip(ids, choice["logprobs"]["top_logprobs"] if runner_up else [], strict=False):
        others.append(max((value for name, value in place.items() if name != f"token_id:{token}"), default=-1e9))
    return Completion(ids, logprobs, others)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and its children, politely first."""
    for kind, seconds in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    if process.stdin is not None:
        process.stdin.close()
