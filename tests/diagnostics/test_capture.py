"""Hidden states through hooks, held against the models' own outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diagnostics.capture import capture_states, layer_names
from diagnostics.capture.hf import decoder_blocks, output_head
from tests.diagnostics.tiny import tiny_model

KINDS = ["qwen2", "gpt2"]


def _batch(rows: int = 2, width: int = 9) -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, 300, (rows, width), generator=torch.Generator().manual_seed(1))
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_b01_layer_labels(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    ids, mask = _batch()
    last_block: list[Tensor] = []
    handle = decoder_blocks(model)[-1].register_forward_hook(
        lambda module, args, output: last_block.append(output if isinstance(output, Tensor) else output[0])
    )
    with torch.no_grad():
        capture = capture_states(model, ids, mask, "all")
        handle.remove()
        own = model(ids, attention_mask=mask, output_hidden_states=True)
        norm = model.model.norm if kind == "qwen2" else model.transformer.ln_f
        normed = norm(capture.states["3"])
        logits = output_head(model)(normed)
    assert list(capture.states) == ["embed", "0", "1", "2", "3"]
    for index, state in enumerate(list(capture.states.values())[:-1]):  # the last entry of their tuple is normed
        torch.testing.assert_close(state, own.hidden_states[index], rtol=0, atol=1e-5)
    torch.testing.assert_close(capture.states["3"], last_block[0], rtol=0, atol=0)
    torch.testing.assert_close(normed, own.hidden_states[-1], rtol=0, atol=1e-5)
    torch.testing.assert_close(capture.final, own.hidden_states[-1], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, own.logits, rtol=0, atol=1e-5)
    assert (capture.states["3"] - own.hidden_states[-1]).abs().max() > 0.1  # negative control: they do differ


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_b04_pads_change_nothing(kind: str, side: str) -> None:
    model = tiny_model(kind)
    ids, mask = _batch()
    layers = layer_names(model)
    with torch.no_grad():
        bare = capture_states(model, ids, mask, layers)
        for pads in (1, 3, 8):
            shape = (pads, 0) if side == "left" else (0, pads)
            padded = capture_states(
                model, nn.functional.pad(ids, shape, value=7), nn.functional.pad(mask, shape), layers
            )
            real = slice(pads, None) if side == "left" else slice(0, ids.shape[1])
            for name in layers:
                torch.testing.assert_close(padded.states[name][:, real], bare.states[name], rtol=0, atol=1e-4)


def test_b04_negative_control_positions_counted_from_the_pads_do_matter() -> None:
    model = tiny_model("gpt2")
    ids, mask = _batch()
    shape = (3, 0)
    wide, wide_mask = nn.functional.pad(ids, shape), nn.functional.pad(mask, shape)
    with torch.no_grad():
        naive = model.base_model(wide, attention_mask=wide_mask, position_ids=torch.arange(12)[None]).last_hidden_state
        assert (naive[:, 3:] - capture_states(model, wide, wide_mask, ()).final[:, 3:]).abs().max() > 0.1


def test_selected_places_equal_the_same_places_of_the_whole() -> None:
    model = tiny_model()
    ids, mask = _batch()
    select = (torch.tensor([1, 0, 1]), torch.tensor([2, 8, 0]))
    with torch.no_grad():
        whole = capture_states(model, ids, mask, layer_names(model))
        some = capture_states(model, ids, mask, layer_names(model), select)
    for name, state in some.states.items():
        assert torch.equal(state, whole.states[name][select])
    assert torch.equal(some.final, some.states["final_norm"])


class _Block(nn.Module):
    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.as_tuple = as_tuple

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor]:
        return (hidden_states + 1,) if self.as_tuple else hidden_states + 1


class _Decoder(nn.Module):
    def __init__(self, as_tuple: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(as_tuple), _Block(as_tuple)])

    def forward(self, ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        hidden = ids[..., None].float().expand(*ids.shape, 8)
        for layer in self.layers:
            hidden = layer(hidden_states=hidden)
            hidden = hidden if isinstance(hidden, Tensor) else hidden[0]
        return SimpleNamespace(last_hidden_state=hidden)


@pytest.mark.parametrize("as_tuple", [False, True])
def test_b14_blocks_that_return_a_tensor_or_a_tuple(as_tuple: bool) -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    model = SimpleNamespace(config=config, base_model=_Decoder(as_tuple))
    ids = torch.arange(10).reshape(2, 5)
    states = capture_states(model, ids, torch.ones_like(ids), "all").states
    for added, name in enumerate(["embed", "0", "1"]):
        assert states[name].shape == (2, 5, 8)
        assert torch.equal(states[name][..., 0], ids.float() + added)


class _NansAtPads(_Decoder):
    """Rows that see no key, as scaled dot product attention leaves them behind a left pad."""

    def forward(self, ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        ids = torch.where(kwargs["attention_mask"] == 1, ids, torch.nan)
        return super().forward(ids, **kwargs)


def test_b06_pooling_selects_and_never_multiplies() -> None:
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2))
    model = SimpleNamespace(config=config, base_model=_NansAtPads(False))
    ids, mask = torch.tensor([[9, 1, 3]]), torch.tensor([[0, 1, 1]])
    row, position = mask.nonzero(as_tuple=True)
    whole = capture_states(model, ids, mask, "all").states["embed"]
    some = capture_states(model, ids, mask, "all", (row, position))
    assert (whole * mask[..., None]).sum(1).isnan().all()  # negative control: 0 times NaN
    assert {name: state.mean(0).tolist() for name, state in some.states.items()} == {
        "embed": [2.0] * 8,
        "0": [3.0] * 8,
        "1": [4.0] * 8,
    }


def test_hooks_are_gone_afterwards_even_after_an_error() -> None:
    model = tiny_model()
    ids, mask = _batch()
    capture_states(model, ids, mask, "all")
    with pytest.raises(IndexError):
        capture_states(model, ids + 1000, mask, "all")
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in decoder_blocks(model))


def test_errors_name_what_is_wrong() -> None:
    model = tiny_model()
    ids, mask = _batch()
    with pytest.raises(ValueError, match="unknown layer 'last'; this model has embed, 0, 1, 2, final_norm"):
        capture_states(model, ids, mask, ["last"])
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        output_head(model)
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="no list of 5 decoder blocks"):
        layer_names(model)


def test_blocks_that_are_run_again_in_the_backward_pass_give_the_same_gradients() -> None:
    """Gradient checkpointing: a block must save the same tensors both times, with hooks and without."""
    model = tiny_model(layers=2)
    ids, mask = _batch()
    select = torch.tensor([0, 1, 1]), torch.tensor([3, 2, 5])

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        found = capture_states(model, ids, mask, "all", select)
        sum(states.tanh().sum() for states in found.states.values()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    again = gradients()
    assert plain.keys() == again.keys()
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=1e-4, atol=1e-4)
