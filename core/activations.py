"""Activations whose bits do not depend on where in a tensor an element stands.

torch's silu and gelu go through a tensor in vectors, and compute what is left at the end of each thread's share by
another routine with other last bits: a token's would change with the number of tokens beside it and of threads.
Here they are made of steps that do not have this (exponential and tanh; the rest is exact by IEEE 754). In float32,
rounded once. Knows nothing of models but their modules; called by model.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Silu(nn.Module):
    """x / (1 + exp(-x))"""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        below = torch.exp(-wide).add_(1)
        return torch.div(wide, below, out=below).to(x.dtype)


class GeluTanh(nn.Module):
    """x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))"""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        inner = (wide * wide).mul_(wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2 / math.pi))
        return inner.tanh_().add_(1).mul_(wide).mul_(0.5).to(x.dtype)


def replace_activations(module: nn.Module) -> None:
    """Put them in the place of torch's own everywhere in a model."""
    from transformers.activations import ACT2FN

    steady = {type(ACT2FN["silu"]): Silu, type(ACT2FN["gelu_pytorch_tanh"]): GeluTanh}
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) in steady:
                setattr(parent, name, steady[type(child)]())
