"""Our configuration in verl's words: the one place where the two meet.

verl builds workers, shards the model, runs vLLM and moves weights. What is learned is ours: loss, advantage, KL,
entropy, mini-batches, optimiser, schedule, panels and checkpoints are read from the run's own config.json, so that
verl's settings of these stay as they are. Key names are those of verl 0.9.1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from training.cluster.layout import ClusterConfig, Layout
from training.config import Config

NAME = "undertow"  # of our trainer, agent loop and section in verl's registries
LOOP = Path(__file__).with_name("agent_loop.yaml")
WRITING = 4096 + 512  # tokens of a finished episode's record and of the skills that are written from it, at most
WORKERS = 8  # agent loops of a node
# keys that verl's own files do not have; a command line must say them with a plus
NEW = (
    "undertow.config",
    "undertow.run",
    "actor_rollout_ref.model.override_config.attn_implementation",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision",
    "ray_kwargs.ray_init.address",
    "ray_kwargs.ray_init.num_gpus",
    "ray_kwargs.ray_init.include_dashboard",
)


def overrides(
    config: Config,
    run: Path,
    cluster: ClusterConfig,
    layout: Layout,
    *,
    model: str,
    reference: bool,
    positions: int | None = None,
) -> dict[str, Any]:
    """verl's settings that differ from its own, by dotted key; values as JSON has them.

    Args: run, the run folder, whose config.json our trainer reads; model, a folder or hub name with the weights of the
    KL anchor; reference, whether any step reads the weights the run started from; positions, tokens of the model's
    longest context, where they are known.
    """
    cpu = config.model.device == "cpu"
    sampler = config.sampler
    values: dict[str, Any] = {
        "undertow.config": str(run / "config.json"),
        "undertow.run": str(run),
        "algorithm.adv_estimator": "grpo",
        "trainer.device": "cpu" if cpu else "cuda",
        "trainer.nnodes": cluster.nodes,
        "trainer.n_gpus_per_node": cluster.gpus,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": NAME,
        "trainer.total_training_steps": config.steps,
        "trainer.logger": ["console"],
        "trainer.project_name": NAME,
        "trainer.experiment_name": run.name,
        "trainer.default_local_dir": str(run / "verl"),
        "trainer.resume_mode": "disable",  # the checkpoints are ours
        "trainer.save_freq": config.save_every,
        "trainer.test_freq": config.eval.every or -1,
        "trainer.val_before_train": bool(config.eval.every),
        "data.train_batch_size": config.tasks_per_step,
        "data.max_prompt_length": sampler.max_context - sampler.max_new_tokens,
        "data.max_response_length": sampler.max_new_tokens if sampler.protocol == "windowed" else sampler.max_context,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "reward.num_workers": 0,  # an episode brings its own
        **_engine("actor", config, layout),
        **_engine("ref", config, layout),
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",  # rows are padded on the right: no mask
        "actor_rollout_ref.model.enable_gradient_checkpointing": not cpu,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": layout.micro_tokens,
        "actor_rollout_ref.actor.ppo_mini_batch_size": config.tasks_per_step,
        "actor_rollout_ref.actor.use_kl_loss": reference,  # builds the workers that hold the reference
        **_rollout(config, cluster, layout, positions),
        "ray_kwargs.ray_init.include_dashboard": False,
    }
    if cluster.ray is not None:
        values["ray_kwargs.ray_init.address"] = cluster.ray
        del values["ray_kwargs.ray_init.include_dashboard"]  # Ray refuses it where a cluster runs already
    elif cpu:
        values["ray_kwargs.ray_init.num_gpus"] = cluster.gpus  # logical ones
        values["transfer_queue.backend.SimpleStorage.num_data_storage_units"] = 1
        values["ray_kwargs.ray_init.num_cpus"] = 16  # logical, too: actors that wait for each other must all have one
    return values


def _engine(role: str, config: Config, layout: Layout) -> dict[str, Any]:
    """FSDP of the policy ("actor") or of the reference ("ref"), which verl keeps in host memory by itself."""
    narrow = "bf16" if config.model.dtype == "bfloat16" else "fp32"
    start = f"actor_rollout_ref.{role}"
    values = {
        f"{start}.strategy": "fsdp2",
        f"{start}.use_torch_compile": False,
        f"{start}.fsdp_config.strategy": "fsdp2",
        f"{start}.fsdp_config.use_torch_compile": False,
        f"{start}.fsdp_config.model_dtype": "fp32",
        f"{start}.fsdp_config.mixed_precision": {"param_dtype": narrow, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    }
    if role == "actor":
        values[f"{start}.fsdp_config.param_offload"] = layout.offload == "idle"
        values[f"{start}.fsdp_config.optimizer_offload"] = layout.offload == "idle"
        values[f"{start}.fsdp_config.offload_policy"] = layout.offload == "cpu"
    return values


def _rollout(config: Config, cluster: ClusterConfig, layout: Layout, positions: int | None) -> dict[str, Any]:
    """vLLM; on a CPU our own replica, because vLLM's CPU build cannot take new weights."""
    start = "actor_rollout_ref.rollout"
    cpu = config.model.device == "cpu"
    longest = max(config.sampler.max_context, WRITING)
    replicas = max(1, cluster.world // layout.tensor_parallel)
    values = {
        "name": "undertow_hf" if cpu else "vllm",
        "mode": "async",
        "n": config.group_size,
        "temperature": config.sampler.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "calculate_log_probs": True,
        "dtype": config.model.dtype,
        "tensor_model_parallel_size": layout.tensor_parallel,
        "gpu_memory_utilization": layout.share,
        "free_cache_engine": True,  # sleeps while the policy is trained
        "max_model_len": longest if positions is None else min(longest, positions),
        "max_num_seqs": max(1, -(-config.tasks_per_step * config.group_size // replicas)),
        "val_kwargs.n": 1,
        "val_kwargs.do_sample": config.eval.temperature > 0,
        "val_kwargs.temperature": config.eval.temperature,
        "agent.num_workers": 1 if cpu else WORKERS * cluster.nodes,
        "agent.default_agent_loop": NAME,
        "agent.agent_loop_config_path": str(LOOP),
    }
    return {f"{start}.{name}": value for name, value in values.items()}


def command(values: dict[str, Any]) -> list[str]:
    """The words of the command that starts this run without `undertow train`."""
    return [
        "python",
        "-m",
        "training.cluster.main",
        *(f"{'+' if key in NEW else ''}{key}={spell(value)}" for key, value in values.items()),
    ]


def spell(value: Any) -> str:
    """A value in the grammar of Hydra's command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{','.join(spell(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{spell(item)}' for key, item in value.items())}}}"
    text = str(value)
    if isinstance(value, str) and not (re.fullmatch(r"[A-Za-z_/][\w/.\-]*", text) and text.lower() not in _SPECIAL):
        escaped = text.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return text


_SPECIAL = ("null", "true", "false", "nan", "inf")  # words that Hydra does not read as text
