from __future__ import annotations

import json

import pytest
import torch

from training.advantages import dead_group_share, group_advantages

DOUBLE = torch.float64


def advantages(*groups: list[float]) -> list[list[float]]:
    returns = torch.tensor([value for group in groups for value in group], dtype=DOUBLE)
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    return [group_advantages(returns, index)[index == i].tolist() for i in range(len(groups))]


def test_golden(golden: dict) -> None:
    [ours] = advantages(golden["inputs"]["rewards"])
    assert ours == pytest.approx(golden["answers"]["advantage_ddof1"], rel=1e-12)
    assert ours != pytest.approx(golden["answers"]["advantage_ddof0"], rel=1e-2)


def test_b18_close_rewards_keep_their_size() -> None:
    first, second = advantages([1.00000, 1.00001], [2.00000, 2.00001])
    assert first == pytest.approx([-0.6195, 0.6195], abs=5e-5)
    assert second == pytest.approx([-0.6195, 0.6195], abs=5e-5)
    assert advantages([10, 0])[0] == pytest.approx([0.7071, -0.7071], abs=5e-5)
    assert advantages([10] + [0] * 7)[0] == pytest.approx([2.4749] + [-0.3536] * 7, abs=5e-5)


def test_b19_dead_groups() -> None:
    groups = [[10.0] * 8, [0.0] * 8, [10.0] + [0.0] * 7, [10.0]]
    won, lost, mixed, alone = advantages(*groups)
    assert won == [0] * 8 and lost == [0] * 8 and alone == [0]
    assert mixed[0] > 0
    returns = torch.tensor([value for group in groups for value in group])
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    assert dead_group_share(returns, index) == pytest.approx(2 / 3)


def test_equal_returns_give_zero_although_their_mean_is_rounded() -> None:
    assert advantages([0.1] * 3)[0] == [0, 0, 0]


def test_order_of_rows_and_names_of_groups_do_not_matter() -> None:
    returns = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    groups = torch.arange(12) % 3
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(group_advantages(returns, groups)[order], group_advantages(returns[order], 7 - groups[order]))


def test_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="row 1 is nan"):
        group_advantages(torch.tensor([0.0, float("nan")]), torch.tensor([0, 0]))


def test_golden_file_is_the_shared_one(shared, golden: dict) -> None:
    assert json.loads((shared / "golden" / "losses.json").read_text()) == golden
