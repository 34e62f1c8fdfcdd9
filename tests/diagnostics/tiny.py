"""Tokenizers and models small enough to be built in a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast, Qwen2Config

from diagnostics.paired import PairedSegment
from diagnostics.records import Segment, Trajectory, Turn
from diagnostics.render import encode, prompt_ids, task_messages, token_classes

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3's way: a thought is kept only behind the last user message
FORGETS_THOUGHTS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<action>", "</action>"]


def chat_tokenizer(
    merges: Sequence[tuple[str, str]] = (), tags: bool = False, template: str | None = CHATML, bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, plus the merges given and, if asked for, one token a tag."""
    vocabulary = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *["".join(pair) for pair in merges]]
    bpe = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(vocabulary)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<pad>", additional_special_tokens=["<|im_start|>"]
    )
    if bos is not None:
        tokenizer.add_special_tokens({"bos_token": bos})
    if tags:
        tokenizer.add_tokens(TAGS, special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(kind: str = "qwen2", vocab: int = 300, layers: int = 3, seed: int = 0) -> Any:
    """A random model whose log-probs differ from token to token and from context to context."""
    torch.manual_seed(seed)
    common = {"bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3, "vocab_size": vocab}
    if kind == "qwen2":
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
        config = Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2, **common)
    else:
        config = GPT2Config(n_embd=64, n_layer=layers, n_head=4, n_positions=256, **common)
    return AutoModelForCausalLM.from_config(config).eval()


def random_pair(seed: int, length: int = 20, skill: int = 6, vocab: int = 300, responses: int = 5) -> PairedSegment:
    """Random ids; the teacher reads `skill` more tokens in front of the same ones."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, vocab, length).astype(np.int32)
    positions = np.sort(rng.choice(np.arange(3, length), responses, replace=False))
    teacher = np.concatenate([ids[:1], rng.integers(1, vocab, skill).astype(np.int32), ids[1:]])
    return PairedSegment(
        student_ids=ids,
        teacher_ids=teacher,
        student_positions=positions,
        teacher_positions=positions + skill,
        response_ids=ids[positions],
        turn=np.zeros(responses, np.int16),
        token_class=np.ones(responses, np.int8),
        trajectory_id=f"trajectory {seed}",
        task_id=f"task {seed}",
        context="own_skill",
    )


def trajectory(
    turns: Sequence[tuple[str, str]], segments: Sequence[Segment] = (), id: str = "t0", description: str = "find a mug."
) -> Trajectory:
    """A trajectory from (observation, reply) texts."""
    return Trajectory(
        id=id,
        task_id="task",
        task_type="pick",
        env="household",
        split="train",
        description=description,
        group=0,
        attempt=0,
        seed=0,
        step=0,
        turns=tuple(Turn(observation, ("look", "help"), reply, "look", True) for observation, reply in turns),
        segments=tuple(segments),
        reward=0.0,
        success=False,
        stop_reason="done",
        first_observation_sha256="",
    )


def one_turn_segment(
    tokenizer: Any, observation: str = "A desk.", reply: str = "<think>go</think><action>look</action>"
) -> Segment:
    """The first prompt of an episode and one reply to it."""
    messages = task_messages("find a mug.", observation, None)
    prompt = prompt_ids(tokenizer, messages)
    response = [*encode(tokenizer, reply), tokenizer.eos_token_id]
    return segment(messages, prompt, response, token_classes(tokenizer, response))


def segment(messages: Any, prompt: Sequence[int], response: Sequence[int], classes: np.ndarray) -> Segment:
    before, after = len(prompt), len(response)
    return Segment(
        messages=tuple(messages),
        ids=np.array([*prompt, *response], np.int32),
        response_mask=np.array([False] * before + [True] * after),
        turn=np.array([-1] * before + [0] * after, np.int16),
        token_class=np.concatenate([np.zeros(before, np.int8), classes.astype(np.int8)]),
        rollout_logprobs=np.zeros(before + after, np.float32),
    )
