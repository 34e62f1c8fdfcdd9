"""The kinds of environment: where the data of each lies, which tasks it has, and how one is made in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from training.config import EnvConfig
from training.envs.alfworld import AlfworldEnv
from training.envs.base import Env, Task
from training.envs.folders import games_folder
from training.envs.games import load_tasks
from training.envs.questions import load_questions
from training.envs.search_folders import search_folder
from training.envs.search_qa import make_search_qa
from training.envs.webshop.env import WebShopEnv
from training.envs.webshop.folders import shop_folder
from training.envs.webshop.shop import load_tasks as load_goals


@dataclass(frozen=True)
class Kind:
    """`make_env` gives a picklable callable, for EnvPool, from the settings and the policy's tokenizer."""

    folder: Callable[[EnvConfig], Path]
    tasks: Callable[[Path, str], list[Task]]  # (folder, split) -> all tasks of the split
    make_env: Callable[[EnvConfig, Any], Callable[[], Env]]


def _alfworld(env: EnvConfig, tokenizer: Any) -> Callable[[], Env]:
    return partial(AlfworldEnv, max_turns=env.max_turns)


def _webshop(env: EnvConfig, tokenizer: Any) -> Callable[[], Env]:
    if env.shop.products < 1:
        raise ValueError(f"env.shop.products is {env.shop.products}, expected 1 or more products on a page of results")
    return partial(WebShopEnv, max_turns=env.max_turns, products=env.shop.products)


KINDS: dict[str, Kind] = {
    "household": Kind(games_folder, load_tasks, _alfworld),
    "alfworld": Kind(games_folder, load_tasks, _alfworld),
    "searchqa": Kind(search_folder, load_questions, make_search_qa),
    "webshop": Kind(shop_folder, load_goals, _webshop),
}
