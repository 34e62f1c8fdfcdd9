"""Sampler against `model.generate` called once a turn, on a policy of the tiny shape: tokens a second.

    python benchmarks/sampler.py [rows] [turns]

Both read the same ragged prompts and sample 15 tokens a reply with no end-of-turn; generate reads the whole
conversation again each turn, left-padded, as a rollout without a cache over turns has to.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training.samplers.base import Request
from training.samplers.hf import HFSampler

VOCAB, REPLY, EOS = 1200, 15, 0


class Letters:
    """The little of a tokenizer that a sampler asks for."""

    eos_token_id = EOS

    def decode(self, ids: list[int], **_: object) -> str:
        return ""


def policy() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 160, "intermediate_size": 480, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=VOCAB, num_key_value_heads=4, eos_token_id=None, bos_token_id=None, **shape)
    model = Qwen2ForCausalLM(config).eval()
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, torch.tensor([EOS]), -1e9))
    return model


def prompts(rows: int, turns: int) -> list[list[list[int]]]:
    """[turn][row] -> new ids: 100-160 tokens at first, then 25-55."""
    chance = random.Random(0)
    sizes = [(100, 160)] + [(25, 55)] * (turns - 1)
    return [[chance.choices(range(1, VOCAB), k=chance.randint(*size)) for _ in range(rows)] for size in sizes]


def ours(model: Qwen2ForCausalLM, new: list[list[list[int]]]) -> None:
    session = HFSampler(model, Letters(), max_new_tokens=REPLY).session(len(new[0]))
    for k, turn in enumerate(new):
        session.reply({row: Request((0, row, 0, k), ids) for row, ids in enumerate(turn)})


def generate(model: Qwen2ForCausalLM, new: list[list[list[int]]]) -> None:
    contexts: list[list[int]] = [[] for _ in new[0]]
    for turn in new:
        contexts = [context + ids for context, ids in zip(contexts, turn, strict=True)]
        width = max(map(len, contexts))
        ids = torch.tensor([[EOS] * (width - len(context)) + context for context in contexts])
        mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        out = model.generate(ids, attention_mask=mask, max_new_tokens=REPLY, do_sample=True, top_k=0, pad_token_id=EOS)
        contexts = [c + o for c, o in zip(contexts, out[:, width:].tolist(), strict=True)]


def main() -> None:
    rows, turns = (int(argument) for argument in sys.argv[1:3]) if len(sys.argv) > 2 else (16, 8)
    model, new = policy(), prompts(rows, turns)
    rates = {}
    for play in (ours, generate):
        play(model, new[:1])  # warm-up
        started = time.perf_counter()
        play(model, new)
        rates[play.__name__] = rows * turns * REPLY / (time.perf_counter() - started)
        print(f"{play.__name__:>9}: {rates[play.__name__]:7.0f} tokens/s ({rows} rows, {turns} turns)", flush=True)
    print(f"    ratio: {rates['ours'] / rates['generate']:.1f}x")


if __name__ == "__main__":
    main()
