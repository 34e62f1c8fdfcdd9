"""Forwards, frozen copies, clipping and files of FSDP2 shards, in one process on gloo; no verl."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from diagnostics.forward import Context, read_contexts
from diagnostics.paired import PairedSegment, run_pairs
from tests.diagnostics.tiny import random_pair, tiny_model
from training.batch import Row
from training.cluster.sharded import Sharded, empty_row, open_root
from training.cluster.weights import digest, gather, load_weights
from training.session import policy_digest
from training.update import Whole

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(seed: int = 0) -> Any:
    model = tiny_model(layers=2, seed=seed)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    open_root(model)
    return model


def context() -> Context:
    pair = random_pair(0)
    return Context(pair.student_ids, pair.student_positions, pair.response_ids)


def pairs() -> list[PairedSegment]:
    return [random_pair(seed) for seed in range(2)]


def test_a_forward_through_the_root_reads_what_whole_weights_read() -> None:
    model, whole = sharded(), tiny_model(layers=2)
    assert isinstance(next(model.parameters()), DTensor)
    here = Sharded(CPU).read(model, [context()], temperature=1.0, layers=("0", "1"), entropy=True)
    there = read_contexts(whole, [context()], temperature=1.0, layers=("0", "1"), entropy=True)
    assert torch.equal(here.logprobs, there.logprobs) and torch.equal(here.states["1"], there.states["1"])


def test_pairs_and_their_gradients_are_those_of_whole_weights() -> None:
    model, whole = sharded(), tiny_model(layers=2)
    options: dict[str, Any] = {"states": "before", "student_grad": True}
    for policy, lying in ((model, Sharded(CPU)), (whole, Whole())):
        passed = run_pairs(policy, pairs(), read_with=lying.read, **options)
        (passed.student_logprobs.sum() + passed.student_states.square().mean()).backward()
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)
    limit = 0.5
    here = Sharded(CPU).clip(list(model.parameters()), limit)
    there = Whole().clip(list(whole.parameters()), limit)
    assert here == pytest.approx(there, rel=1e-6) and here > limit
    name, ours = next(model.named_parameters())
    torch.testing.assert_close(ours.grad.full_tensor(), dict(whole.named_parameters())[name].grad)


def test_a_frozen_copy_reads_the_weights_of_its_time_and_leaves_those_of_now() -> None:
    model, lying = sharded(), Sharded(CPU)
    before = lying.read(model, [context()], temperature=1.0).logprobs.detach()
    frozen = lying.copy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.reshard()
    now = lying.read(model, [context()], temperature=1.0).logprobs.detach()
    assert not torch.allclose(now, before)
    assert torch.equal(lying.read(frozen, [context()], temperature=1.0).logprobs, before)
    assert torch.equal(lying.read(model, [context()], temperature=1.0).logprobs, now)


def test_weights_go_to_a_folder_and_into_other_shards(tmp_path: Path) -> None:
    source, target = tiny_model(layers=2, seed=1), sharded()
    source.save_pretrained(tmp_path)
    load_weights(target, tmp_path)
    whole = gather(target.named_parameters(), CPU)
    assert all(torch.equal(whole[name], value) for name, value in source.named_parameters())
    assert digest(target, CPU) == policy_digest(source)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tiny_model(layers=3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.2.*no place in this model"):
        load_weights(sharded(), tmp_path)
    tiny_model(layers=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model.layers.1.*is missing.*another model"):
        load_weights(sharded(), tmp_path)


def test_a_row_without_tokens_takes_part_and_says_nothing() -> None:
    pair = random_pair(0)
    zeros = torch.zeros(len(pair.response_ids))
    row = Row(pair, 3, zeros, zeros, zeros, old_logprobs=zeros)
    empty = empty_row(row)
    assert empty.n_tokens == 0 and not empty.distilled and empty.trajectory == 3 and len(empty.old_logprobs) == 0
    model = sharded()
    passed = run_pairs(
        model, [empty.pair], states="before", student_grad=True, entropy=True, read_with=Sharded(CPU).read
    )
    assert passed.student_logprobs.shape == (0,)
    passed.student_logprobs.sum().backward()
    assert all(not parameter.grad.full_tensor().any() for parameter in model.parameters())
    assert replace(row, trajectory=3).n_tokens > 0
