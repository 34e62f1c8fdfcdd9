"""A tiny policy: a Qwen2-shaped player of one kind of environment that trains and answers on a laptop CPU.

`build` makes it from nothing but the packages: generate games, let an expert play them, learn a word vocabulary,
imitate. What is played and how it is worded are its `Lessons`; training/models/policies.py lists them. The results are
the project's own assets (training/models/assets).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from diagnostics.records import Message
from training.envs.rooms import keyed_generator, rooms
from training.models.corpus import Example, make_corpus, renamed, texts

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<action>", "</action>", "<skill>", "</skill>")
NUMBERS = 40  # the largest number of a receptacle or an object that is one token


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, given machine and thread count."""

    seed: int = 0
    games: int = 1600  # household train games, in rooms of their own seed
    games_seed: int = 1000  # no run uses it: the policy has seen none of the games it is measured on
    plays: int = 4  # expert plays a game
    tokens: int = 11_000_000  # read in all
    batch_tokens: int = 6_144  # padded
    max_tokens: int = 1536  # longer examples are cut
    lr: float = 2.5e-3  # falls linearly to a twentieth
    weight_decay: float = 0.01
    observation_weight: float = 0.1  # loss on what the policy reads, beside 1 on what it says
    renamed: float = 0.5  # share of examples with permuted object names
    replaced: float = 0.2  # share with permuted receptacle names as well
    vocabulary: int = 2048
    d_model: int = 160
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    d_mlp: int = 448
    threads: int = 2


Report = Callable[[str, int, int, float], None]  # (stage, done, in all, running loss)


@dataclass(frozen=True)
class Lessons:
    """What a tiny policy of one kind of environment is taught, and the words it is worded in."""

    corpus: Callable[[Recipe, Path, Report], list[Example]]  # (recipe, folder for generated games, report)
    # other names for the same things: (messages, generator, also the second kind of names)
    renamed: Callable[[Sequence[Message], np.random.Generator, bool], tuple[Message, ...]]
    words: Callable[[], Sequence[str]]  # each one token, at the start of a line and after a space
    whole: Callable[[], Sequence[str]]  # strings that are one token wherever they stand


def _household_corpus(recipe: Recipe, work: Path, report: Report) -> list[Example]:
    from training.envs.household import generate

    games = generate(
        work / f"tiny-games-{recipe.games}-{recipe.games_seed}",
        {"train": recipe.games, "valid_seen": 0, "valid_unseen": 0},
        seed=recipe.games_seed,
        progress=lambda done, total: report("games", done, total, math.nan),
    )
    return make_corpus(
        [games],
        seed=recipe.seed,
        plays=recipe.plays,
        progress=lambda done, total: report("expert play", done, total, math.nan),
    )


def _household_words() -> list[str]:
    table = rooms()
    words = sorted({name.lower() for names in (table["places"], table["holds"]) for name in names})
    words += ["system", "user", "assistant", "Skill", "Task", "Outcome", "success", "failure"]
    words += ["go", "open", "close", "take", "move", "put", "use", "clean", "heat", "cool", "examine"]
    return [*words, "skill", "not", "seen", "back"]


HOUSEHOLD = Lessons(
    corpus=_household_corpus,
    renamed=renamed,
    words=_household_words,
    whole=lambda: [f" {number}" for number in range(1, NUMBERS + 1)],
)


def make_tokenizer(corpus: Sequence[str], vocabulary: int, lessons: Lessons = HOUSEHOLD) -> Qwen2Tokenizer:
    """Byte-level BPE whose merges make every word of the games one token, with a ChatML template.

    Qwen2's pre-tokeniser parts a number from its space and into digits; numbers with their space are added tokens, so
    that "cabinet 14" is two tokens and `AutoTokenizer`, which rebuilds that pre-tokeniser, reads the folder alike.
    """
    words = lessons.words()
    lists = ["".join(f" {word}" for word in words), "\n".join(words)] * 200
    base = Qwen2Tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = base.backend_tokenizer.normalizer, base.backend_tokenizer.pre_tokenizer
    bpe.train_from_iterator([*lists, *corpus], trainer)
    learned: dict[str, Any] = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=merges,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    whole = [*TAGS, *lessons.whole()]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(recipe: Recipe, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Random weights of the recipe's shape and seed."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.d_model,
        intermediate_size=recipe.d_mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)  # transformers initialises from the global generator
        return Qwen2ForCausalLM(config)


def encode_example(
    tokenizer: Qwen2Tokenizer, messages: Sequence[Message], scored: Sequence[bool], recipe: Recipe
) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T] and the loss weight [T] of each as a target: 1 on scored replies (end of turn included), 0 on unscored
    ones, `observation_weight` elsewhere."""
    text = "".join(f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages)
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"][: recipe.max_tokens], dtype=np.int64)
    weight = np.full(len(ids), recipe.observation_weight, dtype=np.float32)
    starts = np.flatnonzero(ids == tokenizer.convert_tokens_to_ids("<|im_start|>"))
    ends = np.flatnonzero(ids == tokenizer.eos_token_id)
    header = len(tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"])
    flags = iter(scored)
    for message, start, end in zip(messages, starts, [*ends, *[len(ids)] * (len(starts) - len(ends))], strict=False):
        if message.role == "assistant":
            weight[start + header : end + 1] = float(next(flags))
    return ids, weight


def batches(
    examples: Sequence[Example], tokenizer: Qwen2Tokenizer, recipe: Recipe, lessons: Lessons = HOUSEHOLD
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and weights [B, T], right-padded, examples of like length together; endless, decided by the seed."""
    epoch = 0
    while True:
        rng = keyed_generator("epoch", recipe.seed, epoch)
        order = rng.permutation(len(examples))
        for start in range(0, len(order), 1024):
            rows = []
            for index in order[start : start + 1024]:
                example, draw = examples[index], rng.random()
                messages: Sequence[Message] = example.messages
                if draw < recipe.renamed:
                    messages = lessons.renamed(messages, rng, draw < recipe.replaced)
                rows.append(encode_example(tokenizer, messages, example.scored, recipe))
            rows.sort(key=lambda row: len(row[0]))
            groups: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]
            for row in rows:
                if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > recipe.batch_tokens:
                    groups.append([])
                groups[-1].append(row)
            for g in rng.permutation(len(groups)):
                width = max(len(ids) for ids, _ in groups[g])
                ids = np.stack([np.pad(ids, (0, width - len(ids))) for ids, _ in groups[g]])
                weight = np.stack([np.pad(weight, (0, width - len(weight))) for _, weight in groups[g]])
                yield torch.from_numpy(ids), torch.from_numpy(weight)
        epoch += 1


def imitate(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    examples: Sequence[Example],
    recipe: Recipe,
    progress: Callable[[int, float], None] | None = None,
    lessons: Lessons = HOUSEHOLD,
) -> float:
    """Weighted next-token cross-entropy until `recipe.tokens` tokens are read; returns the last running loss (nats).

    Matrices of the blocks are updated by Muon, embeddings, norms and biases by AdamW, at one learning rate.
    """
    blocks = [p for p in model.model.layers.parameters() if p.ndim == 2]
    matrices = {id(p) for p in blocks}
    rest = [p for p in model.parameters() if id(p) not in matrices]
    optimisers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(blocks, lr=recipe.lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    model.train()
    seen, running, update = 0, math.nan, 0
    for ids, weight in batches(examples, tokenizer, recipe, lessons):
        done = seen / recipe.tokens
        rate = recipe.lr * max(0.05, 1 - done) * min(1.0, (update + 1) / 50)  # 50 updates of warm-up
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        logits = model(input_ids=ids).logits[:, :-1]
        target, scale = ids[:, 1:], weight[:, 1:]
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        loss = (nats * scale.flatten()).sum() / scale.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        seen, update = seen + int((weight > 0).sum()), update + 1
        running = loss.item() if math.isnan(running) else 0.98 * running + 0.02 * loss.item()
        if progress is not None:
            progress(seen, running)
        if seen >= recipe.tokens:
            break
    model.eval()
    return running


def build(out: Path, recipe: Recipe, work: Path, progress: Report, lessons: Lessons = HOUSEHOLD) -> Path:
    """Make the asset folder from the recipe: games, corpus, tokenizer, weights (bf16) and the build record.

    Byte-equal on one machine with one thread count; elsewhere equal in play up to the panel's interval.
    Args: work: folder for the generated games. progress: called with (stage, done, in all, running loss).
    """
    check_free(out)
    torch.set_num_threads(recipe.threads)
    examples = lessons.corpus(recipe, work, progress)
    tokenizer = make_tokenizer(list(texts(examples)), recipe.vocabulary, lessons)
    model = make_model(recipe, tokenizer)
    loss = imitate(
        model,
        tokenizer,
        examples,
        recipe,
        lambda seen, loss: progress("imitation", seen, recipe.tokens, loss),
        lessons,
    )
    return save(out, model, tokenizer, recipe, {"loss": loss, "examples": len(examples)})


def save(out: Path, model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, recipe: Recipe, record: dict[str, Any]) -> Path:
    """Weights in bf16 and the build record with their digest, made beside their place and renamed.

    Raises: ValueError when `out` holds anything already.
    """
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        copy.deepcopy(model).bfloat16().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        weights = (partial / "model.safetensors").read_bytes()
        build_record = {
            "recipe": asdict(recipe),
            **record,
            "parameters": sum(p.numel() for p in model.parameters()),
            "torch": torch.__version__,
            "sha256": hashlib.sha256(weights).hexdigest(),
        }
        (partial / "build.json").write_text(json.dumps(build_record, indent=1) + "\n")
        check_free(out)  # somebody may have written there in the meantime
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def check_free(out: Path) -> None:
    """Raises ValueError when something is in the place where a policy is to be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; remove it or choose another --out")
