"""Trainable maps from the student's states into the teacher's space; part of a checkpoint, never of an export."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class Projector(nn.Module):
    """One MLP a layer, d -> hidden -> d, GELU between; not residual, default torch initialisation, float32.

    `lr` is its own learning rate; `extra_updates` its additional updates a step on cached states (see train.py).
    """

    def __init__(self, layers: int, d_model: int, hidden: int, lr: float, extra_updates: int = 0) -> None:
        super().__init__()
        self.lr, self.extra_updates = lr, extra_updates
        self.maps = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model)) for _ in range(layers)
        )

    def forward(self, states: Float[Tensor, "L M D"]) -> Float[Tensor, "L M D"]:
        return torch.stack([project(layer.float()) for project, layer in zip(self.maps, states, strict=True)])
