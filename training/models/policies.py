"""The tiny policies by name: what each is taught, and the recipe that decides its weights."""

from __future__ import annotations

from training.models import search_corpus, shop_corpus
from training.models.tiny import HOUSEHOLD, Lessons, Recipe

POLICIES: dict[str, tuple[Recipe, Lessons]] = {
    "tiny": (Recipe(), HOUSEHOLD),
    "tiny-search": (
        Recipe(
            games=3072,  # questions
            plays=2,
            tokens=3_000_000,
            batch_tokens=2048,
            max_tokens=512,
            renamed=0.8,
            replaced=0.0,
            vocabulary=768,
            d_model=128,
            d_mlp=352,
            threads=1,
        ),
        search_corpus.LESSONS,
    ),
    "tiny-webshop": (
        Recipe(
            games=2400,  # goals
            plays=1,
            tokens=3_000_000,
            batch_tokens=1024,  # many updates: after about a thousand of them it begins to copy what it clicks
            max_tokens=1024,
            renamed=1.0,
            replaced=0.0,
            vocabulary=1536,
            d_model=128,
            d_mlp=352,
            threads=1,
        ),
        shop_corpus.LESSONS,
    ),
}
