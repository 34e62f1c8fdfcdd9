"""PCSD: SDAR whose gate reads the gaps that follow a token, not the token alone.

    L = GRPO + coefficient * mean over tokens of  w (sg q - s),   w = sigmoid(beta_gate adaptive) eta

`adaptive` lies between the token's own gap and a decayed mean over the next `n_max` tokens of its turn: the more those
vary, the longer the mean. `eta` lowers tokens after which the gap falls. Differences from its nearest relative, SDAR:
1. the window; 2. the trend; 3. the teacher is the frozen policy the run started from. With n_min = n_max = 1 and
gamma 0 it is SDAR with that beta and teacher. The constants marked ours were not published: see docs/methods.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diagnostics.paired import PairedPass
from training.batch import Batch
from training.distillation import branches, sampled_gap
from training.method import LossTerm, Method, Needs, setting


@dataclass(frozen=True)
class PcsdConfig:
    coefficient: float = setting(0.01, "paper")  # 0: plain GRPO
    alpha: float = setting(0.8, "paper")  # decay of a window per token; 1: no decay
    n_min: int = setting(1, "paper")  # tokens of the short window
    n_max: int = setting(8, "paper")  # tokens of the long window
    adaptive: bool = setting(True, "paper")  # False: the short window alone
    tau_low: float = setting(0.01, "ours")  # variance (nats^2) up to which the short window decides
    tau_high: float = setting(0.1, "ours")  # variance from which the long window decides
    gamma: float = setting(1.0, "ours")  # strength of the trend; 0: no trend
    delta_scale: float = setting(0.1, "ours")  # fall of the gap (nats per token) that closes the gate at gamma 1
    beta_gate: float = setting(5.0, "ours")
    skill: Literal["retrieved", "hindsight"] = setting("retrieved", "paper")

    def __post_init__(self) -> None:
        if not 1 <= self.n_min <= self.n_max:
            raise ValueError(f"pcsd windows need 1 <= n_min <= n_max, got n_min {self.n_min} and n_max {self.n_max}")
        if not (self.tau_low < self.tau_high and self.delta_scale > 0 and self.alpha > 0):
            raise ValueError(
                "pcsd needs tau_low < tau_high, delta_scale > 0 and alpha > 0, got "
                f"{self.tau_low}, {self.tau_high}, {self.delta_scale} and {self.alpha}"
            )


class TokenWeights(NamedTuple):
    """The weight of each token and what it is made of; 0 outside the mask."""

    short: Float[Tensor, "M"]  # nats
    long: Float[Tensor, "M"]  # nats
    variance: Float[Tensor, "M"]  # nats^2
    r: Float[Tensor, "M"]  # in [0, 1], share of the long window
    slope: Float[Tensor, "M"]  # nats per token
    eta: Float[Tensor, "M"]  # in [0, 1]
    weight: Float[Tensor, "M"]  # in [0, 1]


def token_weights(
    gap: Float[Tensor, "M"],
    mask: Bool[Tensor, "M"],
    row: Int[Tensor, "M"],
    turn: Int[Tensor, "M"],
    config: PcsdConfig,
) -> TokenWeights:
    """How persistently the teacher prefers what was said from here on.

    bar_N = sum_j alpha^j m gap / sum_j alpha^j m over offsets j = 0..N-1 inside the turn; variance and slope (least
    squares) of the gap over the valid offsets of the long window; r = clip((variance - tau_low) / (tau_high - tau_low),
    0, 1); adaptive = (1 - r) bar_short + r bar_long; eta = clip(1 - gamma relu(-slope) / delta_scale, 0, 1);
    weight = sigmoid(beta_gate adaptive) eta, not normalised over tokens.
    Source: PCSD (arXiv 2608.01837).
    Args: gap [M] nats; row, turn [M]: a turn is a run of tokens that share both. Returns: see TokenWeights, detached.
    Departures: population variance without the decay; below two valid tokens variance and slope are 0.
    """
    gaps, valid = _windows(torch.where(mask, gap.detach(), 0.0), mask, row, turn, config.n_max)
    offset = torch.arange(config.n_max, device=gap.device, dtype=gap.dtype)
    inside = valid.to(gap.dtype)
    decay = config.alpha**offset * inside
    short = _mean(gaps[:, : config.n_min], decay[:, : config.n_min])
    long = _mean(gaps, decay)
    off_mean = (gaps - _mean(gaps, inside)[:, None]) * inside
    off_centre = (offset - _mean(offset.expand_as(gaps), inside)[:, None]) * inside
    variance = _mean(off_mean.square(), inside)
    spread = off_centre.square().sum(1)
    slope = (off_centre * off_mean).sum(1) / torch.where(spread == 0, 1.0, spread)
    r = ((variance - config.tau_low) / (config.tau_high - config.tau_low)).clamp(0, 1)
    if not config.adaptive:
        r = torch.zeros_like(r)
    eta = (1 - config.gamma * torch.relu(-slope) / config.delta_scale).clamp(0, 1)
    weight = torch.sigmoid(config.beta_gate * ((1 - r) * short + r * long)) * eta
    return TokenWeights(*(torch.where(mask, part, 0.0) for part in (short, long, variance, r, slope, eta, weight)))


def _windows(
    values: Tensor, mask: Tensor, row: Tensor, turn: Tensor, size: int
) -> tuple[Float[Tensor, "M N"], Bool[Tensor, "M N"]]:
    """The `size` values from each token on, and which of them are masked-in tokens of the same turn."""
    position = torch.arange(len(values), device=values.device)[:, None] + torch.arange(size, device=values.device)
    exists = position < len(values)
    position = position.clamp(max=len(values) - 1)
    same_turn = (row[position] == row[:, None]) & (turn[position] == turn[:, None])
    return values[position], exists & same_turn & mask[position]


def _mean(values: Tensor, weights: Tensor) -> Float[Tensor, "M"]:
    total = weights.sum(1)
    return (values * weights).sum(1) / torch.where(total == 0, 1.0, total)


def needs(config: PcsdConfig, step: int) -> Needs:
    if not config.coefficient:
        return Needs()
    return Needs(config.skill, teacher="initial", teacher_logprobs=True)


def loss(batch: Batch, pair: PairedPass, config: PcsdConfig, step: int, modules: Any) -> list[LossTerm]:
    """The weighted gap; logged beside it: eta, r, and the quartiles of the variance, from which to choose the taus."""
    mask = batch.distilled
    student, teacher = branches(pair, mask)
    parts = token_weights(teacher - student, mask, batch.row, batch.turn, config)
    logged = {"eta": parts.eta, "long_share": parts.r}
    if mask.any():
        low, high = parts.variance[mask].quantile(parts.variance.new_tensor([0.25, 0.75]))
        logged |= {"variance_q25": low.expand_as(parts.r), "variance_q75": high.expand_as(parts.r)}
    term = LossTerm("pcsd", sampled_gap(student, teacher), mask, config.coefficient, parts.weight)
    return [term, *(LossTerm(f"pcsd/{name}", value, mask, 0.0) for name, value in logged.items())]


METHOD = Method("pcsd", "PCSD (arXiv 2608.01837)", "sampled token", PcsdConfig, needs, loss=loss)
