"""Optimizer of the shipped pair: orthogonalised momentum for matrices, AdamW for everything else.

It is meant for small deep networks and few tokens. `torch.optim.Muon` orthogonalises one matrix at a time and updates
weights in their own precision. Here, matrices of one shape are stacked, and low-precision weights are rounded from an
fp32 copy, so that small updates are not lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Approximates the nearest (semi-)orthogonal matrices by a quintic Newton-Schulz iteration.

    Args:
        matrices: [n, rows, columns], fp32, or bf16 if the hardware multiplies bf16 fast.
        steps: Number of iterations; after five, singular values lie between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class MatrixMomentum(torch.optim.Optimizer):
    """Muon for the matrices inside the layers, AdamW for embeddings, norms and biases.

    Args:
        model: The model to train; embeddings and vectors are recognised by name and shape.
        matrix_lr: Learning rate of orthogonalised updates.
        lr: Learning rate of AdamW.
        momentum: Nesterov momentum of the matrices.
        betas: Betas of AdamW.
        weight_decay: Decoupled weight decay of the matrices.

    Weights of lower precision than fp32 have an fp32 copy in the optimizer state, which is updated and then rounded.
    Their updates are orthogonalised in the precision of the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        matrix_lr: float = 0.02,
        lr: float = 3e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
    ):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name and "lm_head" not in name]
        chosen = {id(p) for p in matrices}
        others = [p for _, p in named if id(p) not in chosen]
        groups = [
            {"params": matrices, "lr": matrix_lr, "weight_decay": weight_decay, "orthogonal": True},
            {"params": others, "lr": lr, "weight_decay": 0.0, "orthogonal": False},
        ]
        super().__init__(groups, {"momentum": momentum, "betas": betas})

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state as torch does, but keeps it in fp32; torch would cast it to the parameters' precision."""
        super().load_state_dict(state_dict)
        saved = iter(key for group in state_dict["param_groups"] for key in group["params"])
        for group in self.param_groups:
            for p in group["params"]:
                for name, value in state_dict["state"].get(next(saved), {}).items():
                    if torch.is_tensor(value):
                        self.state[p][name] = value.to(p.device, torch.float32).clone()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            update = self._orthogonal_step if group["orthogonal"] else self._adamw_step
            update(group, [(p, p.grad) for p in group["params"] if p.grad is not None])
        return loss

    def _master(self, p: nn.Parameter) -> torch.Tensor:
        """Returns the fp32 values to update: the parameter itself if it is fp32, else its fp32 copy."""
        if p.dtype == torch.float32:
            return p
        state = self.state[p]
        if "master" not in state:
            state["master"] = p.float()
        return state["master"]

    def _moment(self, p: nn.Parameter, name: str) -> torch.Tensor:
        """Returns a running mean of the optimizer state, fp32, initially zero."""
        return self.state[p].setdefault(name, torch.zeros_like(p, dtype=torch.float32))

    def _orthogonal_step(self, group: dict, params: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        by_shape = defaultdict(list)
        for p, grad in params:
            momentum = self._moment(p, "momentum")
            momentum.lerp_(grad.float(), 1 - group["momentum"])
            by_shape[p.shape].append((p, grad.float().lerp(momentum, group["momentum"]).to(p.dtype)))
        for (rows, columns), members in by_shape.items():
            updates = orthogonalise(torch.stack([update for _, update in members]))
            scale = group["lr"] * max(1.0, rows / columns) ** 0.5
            for (p, _), update in zip(members, updates, strict=True):
                master = self._master(p)
                master.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)
                _round(master, p)

    def _adamw_step(self, group: dict, params: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        beta1, beta2 = group["betas"]
        for p, low_precision_grad in params:
            grad, state, master = low_precision_grad.float(), self.state[p], self._master(p)
            mean, square = self._moment(p, "mean"), self._moment(p, "square")
            state["step"] = state.get("step", 0) + 1
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(1e-8)
            master.addcdiv_(mean / (1 - beta1 ** state["step"]), root, value=-group["lr"])
            _round(master, p)


def _round(master: torch.Tensor, p: nn.Parameter) -> None:
    if master is not p:
        p.copy_(master)
