"""The table of token weights gives what the methods themselves use."""

from __future__ import annotations

import pytest
import torch

from training.weights import method_weights

GAP = torch.tensor([0.4, -0.2, 0.0, 1.5, -3.0, 0.1])
TURN = torch.tensor([0, 0, 0, 1, 1, 0])
ROW = torch.tensor([0, 0, 0, 0, 0, 1])


def weights(name: str) -> torch.Tensor:
    return method_weights()[name](GAP, TURN, ROW)


def test_sdar_is_a_sigmoid_of_five_gaps() -> None:
    assert weights("sdar") == pytest.approx(1 / (1 + torch.exp(-5 * GAP)))
    assert weights("sdar_hard").tolist() == [1, 0, 0, 1, 0, 1]


def test_the_normalised_gate_has_mean_one_in_every_response() -> None:
    found = weights("sdar_normalised")
    for response in ([0, 1, 2], [3, 4], [5]):
        assert found[response].mean() == pytest.approx(1)
        share = weights("sdar")[response]
        assert found[response] == pytest.approx(share / share.mean())


def test_pcsd_reads_on_inside_its_turn_and_no_further() -> None:
    found, changed = weights("pcsd"), GAP.clone()
    changed[3:] = 0.7
    again = method_weights()["pcsd"](changed, TURN, ROW)
    assert torch.equal(found[:3], again[:3]) and not torch.equal(found[3:], again[3:])
    assert found[5] == pytest.approx(float(torch.sigmoid(torch.tensor(0.5))))  # alone in its turn: no window, no trend


def test_sod_weighs_turns_and_constant_weighs_nothing() -> None:
    found = weights("sod")
    for turn in ([0, 1, 2], [3, 4], [5]):
        assert len(set(found[turn].tolist())) == 1
    assert weights("constant").tolist() == [1] * 6
    assert not any(weight(GAP.requires_grad_(), TURN, ROW).requires_grad for weight in method_weights().values())
