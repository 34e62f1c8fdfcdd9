"""Our configuration in verl's words, and verl's own files where verl is installed."""

import importlib.util
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from training.cluster.layout import ClusterConfig, Layout
from training.cluster.verl_config import NEW, command, overrides, spell
from training.config import RECIPES

RUN = Path("/runs/paper")
LAYOUT = Layout("idle", 2, 8192, 0.45)


def made(name: str = "paper-alfworld-3b-pr-opd", cluster: ClusterConfig | None = None, **more: Any) -> dict[str, Any]:
    given = {"model": "MODEL", "reference": True, **more}
    return overrides(RECIPES[name], RUN, cluster or ClusterConfig(4, 2), LAYOUT, **given)


def test_what_verl_needs_to_know_of_a_run() -> None:
    values = made()
    assert values["undertow.config"] == "/runs/paper/config.json"
    assert (values["trainer.n_gpus_per_node"], values["trainer.nnodes"]) == (4, 2)
    assert values["trainer.total_training_steps"] == 150 and values["data.train_batch_size"] == 16
    assert values["actor_rollout_ref.model.path"] == "MODEL"
    rollout = {key.rpartition("rollout.")[2]: value for key, value in values.items() if ".rollout." in key}
    assert (rollout["n"], rollout["temperature"], rollout["name"]) == (8, 1.0, "vllm")
    assert rollout["logprobs_mode"] == "processed_logprobs"  # case B22
    assert (rollout["val_kwargs.temperature"], rollout["val_kwargs.do_sample"]) == (0.4, True)
    assert rollout["tensor_model_parallel_size"] == 2 and rollout["gpu_memory_utilization"] == 0.45
    assert rollout["max_num_seqs"] == 32  # 128 episodes on 8 / 2 replicas
    assert values["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 8192
    assert Path(rollout["agent.agent_loop_config_path"]).parent.name == "cluster"


@pytest.mark.parametrize(
    ("offload", "expected"),
    [("none", (False, False, False)), ("idle", (True, True, False)), ("cpu", (False, False, True))],
)
def test_offload_in_verl_s_words(offload: Any, expected: tuple[bool, ...]) -> None:
    layout = replace(LAYOUT, offload=offload)
    values = overrides(RECIPES["paper-alfworld-3b-grpo"], RUN, ClusterConfig(), layout, model="M", reference=True)
    start = "actor_rollout_ref.actor.fsdp_config."
    assert tuple(values[start + key] for key in ("param_offload", "optimizer_offload", "offload_policy")) == expected


def test_precision_follows_the_model() -> None:
    key = "actor_rollout_ref.actor.fsdp_config.mixed_precision"
    assert made()[key] == {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    assert made("tiny-grpo")[key]["param_dtype"] == "fp32"
    assert made()["actor_rollout_ref.actor.fsdp_config.model_dtype"] == "fp32"  # the weights that AdamW changes


def test_a_cpu_run_has_its_own_replica_and_logical_gpus() -> None:
    values = made("tiny-grpo", ClusterConfig(2))
    assert values["actor_rollout_ref.rollout.name"] == "undertow_hf" and values["trainer.device"] == "cpu"
    assert values["ray_kwargs.ray_init.num_gpus"] == 2
    assert values["data.max_response_length"] == 2048  # one growing conversation


def test_ray_is_joined_where_an_address_is_given() -> None:
    values = made(cluster=ClusterConfig(8, 2, ray="10.0.0.1:6379"))
    assert values["ray_kwargs.ray_init.address"] == "10.0.0.1:6379"
    assert not {"ray_kwargs.ray_init.num_gpus", "ray_kwargs.ray_init.include_dashboard"} & values.keys()


def test_the_model_s_own_limit_bounds_the_context() -> None:
    key = "actor_rollout_ref.rollout.max_model_len"
    assert made()[key] == 4608 and made(positions=4096)[key] == 4096


def test_the_command_is_one_that_hydra_reads() -> None:
    words = command(made())
    assert words[:3] == ["python", "-m", "training.cluster.main"]
    assert "+undertow.run=/runs/paper" in words and "trainer.logger=[console]" in words
    assert "data.shuffle=false" in words and "trainer.v1.trainer_mode=undertow" in words
    assert shlex.split(shlex.join(words)) == words
    assert [word for word in words if word.startswith("+")] == [
        f"+{key}={spell(value)}" for key, value in made().items() if key in NEW
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-06, "1e-06"),
        ("a/b-c.d", "a/b-c.d"),
        ("with space", "'with space'"),
        ("it's", r"'it\'s'"),
        ("true", "'true'"),
        ("10.0.0.1:6379", "'10.0.0.1:6379'"),
        (["a", 1], "[a,1]"),
        ({"param_dtype": "bf16"}, "{param_dtype:bf16}"),
    ],
)
def test_values_in_hydra_s_grammar(value: Any, text: str) -> None:
    assert spell(value) == text


@pytest.mark.skipif(
    importlib.util.find_spec("hydra") is None, reason="Hydra comes with verl; `make test-cluster` runs this"
)
def test_hydra_reads_back_what_was_meant() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = overrides(
        RECIPES["paper-alfworld-3b-pr-opd"],
        Path("/a run/it's=one"),
        ClusterConfig(ray="10.0.0.1:6379"),
        LAYOUT,
        model="M/x-1.5",
        reference=True,
    )
    read = OverridesParser.create().parse_overrides(command(given)[3:])
    assert {word.key_or_group: word.value() for word in read} == given


def verl_files() -> Path | None:
    found = importlib.util.find_spec("verl")  # finds it, imports nothing
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "trainer" / "config" / "_generated_ppo_trainer.yaml"


@pytest.mark.skipif(verl_files() is None, reason="verl is not installed here; `make test-cluster` runs this")
def test_every_key_is_one_of_verl_s_own() -> None:
    path = verl_files()
    assert path is not None
    theirs = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, cluster in (("paper-alfworld-3b-pr-opd", ClusterConfig()), ("tiny-grpo", ClusterConfig(2))):
        for key in made(name, cluster):
            node: Any = theirs
            there = True
            for part in key.split("."):
                there = isinstance(node, dict) and part in node
                if not there:
                    break
                node = node[part]
            assert there != (key in NEW), key
