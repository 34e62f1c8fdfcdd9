"""A vLLM server on this machine that the run starts, asks in token ids, and starts again when it dies.

Only this user's processes can ask it: it has no port, but a socket file in a folder that is closed to others (a port on
the loopback address would be open to everyone on the machine: vLLM asks for a key on some of its paths alone).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any

from diagnostics.capture.vllm import ALONE, CPU_CACHE, IN_PROCESS

log = logging.getLogger(__name__)

TIED = Path(__file__).with_name("tied.py")
TRIES = 3  # times in a row that a dead server is started again
START_SECONDS = 900.0  # until a server answers: large weights on a slow disk
REPLY_SECONDS = 900.0  # of one reply
GRACE = 2.0  # in which a server that does not answer may still be ending
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # dimensions of an attention head, vLLM 0.24 to 0.31
FREE_SHARE = 0.8  # of a GPU's memory that is free when the server starts

Command = Callable[[Path], list[str]]  # socket file -> what is started


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
    words += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
    share = _free_share()
    if share is None:
        _check_heads(folder)
    # on a CPU vLLM would compile for minutes
    words += ["--enforce-eager"] if share is None else ["--gpu-memory-utilization", f"{share:.2f}"]
    return lambda path: [*words, "--uds", str(path)]


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
        self.restarts = 0  # over its whole life
        self._failures = 0  # since the last reply
        self._life = 0  # which start of the server is running
        self._given_up: str | None = None  # why
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="undertow-vllm-")
        self.log = Path(self._folder.name) / "0.log"  # of the server that runs

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
                code, answer = self._ask("POST", "/v1/completions", REPLY_SECONDS, json.dumps(asked).encode())
            except (OSError, HTTPException) as error:  # refused, reset, timed out, cut in the middle
                self._lost(life, str(error) or type(error).__name__)
                continue
            if code >= 500:
                self._lost(life, f"it answers {code}")
            elif code >= 400:
                refusal = answer.decode(errors="replace")[:300]
                raise ValueError(f"the vLLM server refuses a request: {code} {refusal}")
            else:
                self._failures = 0
                return _completion(json.loads(answer)["choices"][0], runner_up)

    def end(self) -> None:
        """End the server for good; whoever waits for it, or for its start, is told so."""
        self._given_up = "the vLLM server was ended"
        self._stop()

    def _running(self) -> int:
        """The number of the server that runs; the first call starts it."""
        with self._lock:
            if self._given_up is not None:
                raise ValueError(self._given_up)
            if self._process is None and (fault := self._start()) is not None:
                raise ValueError(f"{fault}; its last words: {self._tail()}")
            return self._life

    def _lost(self, life: int, reason: str) -> None:
        """Start the server again, unless another thread has done so since `life`."""
        with self._lock:
            if self._given_up is not None:
                raise ValueError(self._given_up)
            if life != self._life:
                return
            code, process = None, self._process
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):  # the connection breaks before the process is gone
                    code = process.wait(GRACE)
            lost = f"the vLLM server does not answer ({reason})" if code is None else f"the vLLM server ended ({code})"
            while True:
                self._stop()
                if self._given_up is not None:  # while it was waited for
                    raise ValueError(self._given_up)
                self._failures += 1
                if self._failures > TRIES:
                    self._given_up = f"{lost}, after {TRIES} new starts without a reply; its last words: {self._tail()}"
                    raise ValueError(self._given_up)
                log.warning("%s; new start %d of %d, lost replies are asked for again", lost, self._failures, TRIES)
                self.restarts += 1
                fault = self._start()
                if fault is None:
                    return
                lost = fault

    def _start(self) -> str | None:
        """Start a server and wait until it answers. Returns: why it does not."""
        self._life += 1
        self._socket, self.log = (self.log.with_name(f"{self._life}.{kind}") for kind in ("socket", "log"))
        with self.log.open("ab") as said:
            # a session of its own: Ctrl-C is for us, and its children can be ended together
            self._process = process = subprocess.Popen(
                [sys.executable, str(TIED), *self.command(self._socket)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**CPU_CACHE, **os.environ, **ALONE, IN_PROCESS: "1", "VLLM_API_KEY": ""},
                start_new_session=True,
            )
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit and self._given_up is None:
            if (code := process.poll()) is not None:
                self._stop()  # what it has left
                return self._given_up or f"the vLLM server does not start (code {code})"
            with contextlib.suppress(OSError, HTTPException):
                if self._ask("GET", "/health", 5.0)[0] == 200:
                    return None
            time.sleep(0.2)
        self._stop()
        return self._given_up or f"the vLLM server does not answer after {START_SECONDS:.0f} s"

    def _ask(self, method: str, path: str, timeout: float, content: bytes | None = None) -> tuple[int, bytes]:
        with contextlib.closing(_Connection(self._socket, timeout)) as connection:
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _tail(self) -> str:
        """The last line of the server's log that tells of an error, or its last line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        said = [line.strip() for line in lines if line.strip()]
        errors = [line for line in said if "Error" in line and "WARNING" not in line]
        return (errors or said or ["nothing"])[-1][:300]


class _Connection(HTTPConnection):
    """HTTP over a socket file."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


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
