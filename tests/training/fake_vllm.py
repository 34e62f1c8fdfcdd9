"""Stands in for a vLLM server: a bigram table answers /v1/completions in vLLM's form. Run as a program.

    fake_vllm.py FOLDER SOCKET [raw] [die=N] [always] [never] [slow]

FOLDER holds table.npy (logits [V, V] by last token). raw: log-probs before temperature, as a server started without
--logprobs-mode says them. die=N: the server is killed at the N-th request of its first life; with `always`, of every
life. never: it does not start. slow: it takes 30 s to start.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import numpy as np

FOLDER, SOCKET, OPTIONS = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
TABLE = np.load(FOLDER / "table.npy")
LOCK = threading.Lock()
SEEN = 0


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def complete(asked: dict) -> dict:
    ids, generator = list(asked["prompt"]), np.random.default_rng(asked["seed"])
    new: list[int] = []
    logprobs: list[float] = []
    places: list[dict[str, float]] = []
    temperature = asked["temperature"]
    while len(new) < asked["max_tokens"] and not (new and new[-1] in asked["stop_token_ids"]):
        plain = TABLE[ids[-1]]
        scaled = log_softmax(plain / (temperature or 1.0))
        token = int(plain.argmax()) if temperature == 0 else int(generator.choice(len(scaled), p=np.exp(scaled)))
        said = log_softmax(plain) if "raw" in OPTIONS else scaled
        ids.append(token)
        new.append(token)
        logprobs.append(float(said[token]))
        best = np.argsort(-said)[: asked["logprobs"]]
        places.append({f"token_id:{i}": float(said[i]) for i in {*best.tolist(), token}})
    return {"choices": [{"token_ids": new, "logprobs": {"token_logprobs": logprobs, "top_logprobs": places}}]}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, code: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(200, {})

    def do_POST(self) -> None:
        global SEEN
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if max(asked["prompt"]) >= len(TABLE):
            return self.answer(400, {"error": f"token {max(asked['prompt'])} is out of the vocabulary"})
        with LOCK:
            SEEN += 1
            deadly = next((int(option[4:]) for option in OPTIONS if option.startswith("die=")), 0)
            died = FOLDER / "died"
            if deadly == SEEN and ("always" in OPTIONS or not died.exists()):
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with (FOLDER / "asked.jsonl").open("a") as file:
                file.write(json.dumps(asked) + "\n")
        return self.answer(200, complete(asked))

    def log_message(self, *_: object) -> None:
        pass


if "never" in OPTIONS:
    print("ValueError: no room for the cache")
    sys.exit(3)
if "slow" in OPTIONS:
    time.sleep(30)
ThreadingUnixStreamServer(SOCKET, Handler).serve_forever()
