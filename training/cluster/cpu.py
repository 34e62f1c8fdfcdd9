"""verl on a machine without a GPU: a platform, and rollout servers that answer with our own sampler.

For tests and for looking; one import, through VERL_USE_EXTERNAL_MODULES, makes verl know both. verl 0.9.1 has platforms
for accelerators only, and vLLM's CPU build cannot take new weights. Workers ask Ray for logical GPUs, which `ray.init`
is told to have; FSDP and gloo work on CPU tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

NAME = "undertow_hf"
BATCH = 64  # replies at once
GATHER = 0.005  # seconds in which requests join a batch


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _zero(*args: Any, **options: Any) -> int:
    return 0


class _Device(types.ModuleType):
    """What verl asks of torch.cuda, for a CPU; the rest is torch.cpu's."""

    empty_cache = set_device = ipc_collect = reset_peak_memory_stats = synchronize = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(_nothing)
    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = staticmethod(_zero)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def mem_get_info(*args: Any) -> tuple[int, int]:
        return 0, 0

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> str:
        return "cpu"

    @staticmethod
    def get_device_name(*args: Any) -> str:
        return "cpu"

    @staticmethod
    def get_rng_state(*args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: Any) -> None:
        torch.set_rng_state(state)


_DEVICE = _Device("undertow_cpu_device")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _DEVICE)

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    set_device = synchronize = set_allocator_settings = empty_cache = profiler_start = profiler_stop = _nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


class HFServer:
    """Answers requests for tokens with the weights it was sent last, in batches of those that wait."""

    def __init__(self, folder: str) -> None:
        from training.models.load import load_policy

        torch.set_num_threads(1)
        self.model, self.tokenizer = load_policy(folder)
        self.waiting: list[tuple[list[int], dict[str, Any], asyncio.Future[TokenOutput]]] = []
        self.busy: asyncio.Task[None] | None = None

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), sampling_params, answer))
        if self.busy is None:
            self.busy = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        try:
            await asyncio.sleep(GATHER)
            while self.waiting:
                kind = _kind(self.waiting[0][1])
                batch = [request for request in self.waiting if _kind(request[1]) == kind][:BATCH]
                self.waiting = [request for request in self.waiting if request not in batch]
                try:
                    outputs = await asyncio.to_thread(self._answer, batch, *kind)
                except Exception as error:  # told to those who asked
                    for _, _, answer in batch:
                        answer.set_exception(error)
                    continue
                for (_, _, answer), output in zip(batch, outputs, strict=True):
                    answer.set_result(output)
        finally:
            self.busy = None

    def _answer(self, batch: list[Any], temperature: float, limit: int) -> list[TokenOutput]:
        from training.samplers.hf import HFSampler

        sampler = HFSampler(self.model, self.tokenizer, temperature=temperature, max_new_tokens=limit, batch_size=BATCH)
        keys = [tuple(params["extra_args"]["key"]) for _, params, _ in batch]
        replies = sampler.generate([prompt for prompt, _, _ in batch], keys)
        return [
            TokenOutput(token_ids=r.ids.tolist(), log_probs=r.logprobs.tolist(), stop_reason="completed")
            for r in replies
        ]

    async def load(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights, strict=False)
        self.model.tie_weights()

    async def nothing(self, *args: Any, **options: Any) -> None:
        """What a server with a GPU does to its memory."""

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


def _kind(params: dict[str, Any]) -> tuple[float, int]:
    """What all replies of a batch have in common."""
    return float(params["temperature"]), int(params["max_tokens"])


class HFReplica(RolloutReplica):
    async def launch_servers(self) -> None:
        options = {"name": _server(self.replica_rank), "max_concurrency": 1000, "num_cpus": 0}
        server = ray.remote(HFServer).options(**options).remote(self.model_config.path)
        await server.nothing.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"hf-{self.replica_rank}"


class ServerAdapter(BaseRollout):
    """The worker's end of a server: sends it the weights of this rank's replica."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._name = _server(int(os.environ["RANK"]))

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(self, weights: Any, wire_format: str = "named_tensors", **_: Any) -> None:
        sent = {name: tensor.detach().float().clone() async for name, tensor in _each(weights)}
        await ray.get_actor(self._name).load.remote(sent)


async def _each(weights: Any) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item


def _server(rank: int) -> str:
    return f"undertow_hf_server_{rank}"


def _replica() -> type[RolloutReplica]:
    return HFReplica


def _init_process_group(backend: str | None = None, *args: Any, **options: Any) -> Any:
    # verl says "cpu:gloo,<device>:<backend>", which names the CPU twice here
    return _INIT("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **options)


_INIT = dist.init_process_group
dist.init_process_group = _init_process_group
RolloutReplicaRegistry.register(NAME, _replica)
base._ROLLOUT_REGISTRY[NAME, "async"] = "training.cluster.cpu.ServerAdapter"
