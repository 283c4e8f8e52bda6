"""The run in PyTorch: the decoder in plain tensor arithmetic, and torch.optim.AdamW.

Nothing here is shared with flax_models: attention is written out, and the rotation's angles are made here.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

from parity.train.problem import IGNORED, Problem, Setup, is_decayed, learning_rate
from parity.train.run import KERNELS, Run

Tensor: TypeAlias = Any  # torch.Tensor; torch is imported only inside functions


def train(problem: Problem, *, fused: bool) -> Run:
    """Trains, with `core_triton.linear_cross_entropy` or with the logits and PyTorch's own cross_entropy."""
    import torch

    import core_triton

    start = time.perf_counter()
    torch.set_float32_matmul_precision("highest")  # float32 matmuls, not TF32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: torch.tensor(array, device=device, requires_grad=True) for name, array in problem.weights.items()}
    tokens = torch.tensor(problem.tokens, dtype=torch.int64, device=device)
    targets = torch.tensor(problem.targets, dtype=torch.int64, device=device)
    setup = problem.setup
    head = weights["embedding" if setup.tie_embeddings else "head"]
    loss_of, ran = _unfused_cross_entropy, "cross_entropy"
    if fused:
        kernels = KERNELS.get(("torch", device))
        loss_of = partial(core_triton.linear_cross_entropy, implementation=kernels)
        like_hidden_states = weights["embedding"][tokens[0]]
        ran = core_triton.explain(like_hidden_states, head, implementation=kernels).name
    optimizer = _optimizer(weights, setup)
    losses = []
    for step in range(setup.steps):
        loss = loss_of(hidden_states(weights, tokens[step], setup), head, targets[step])
        optimizer.zero_grad()
        loss.backward()
        _clip(list(weights.values()), setup.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(setup, step)
        optimizer.step()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return Run(values, ran, device, name, time.perf_counter() - start)


def _unfused_cross_entropy(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    import torch

    logits = (hidden @ head.T).flatten(0, -2)  # (N, V)
    return torch.nn.functional.cross_entropy(logits, target.flatten(), ignore_index=IGNORED)


def _optimizer(weights: Mapping[str, Tensor], setup: Setup) -> Any:
    import torch

    groups = [
        {
            "params": [weight for name, weight in weights.items() if is_decayed(name) == decayed],
            "weight_decay": setup.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    return torch.optim.AdamW(groups, betas=(setup.beta1, setup.beta2), eps=setup.adam_eps)


def _clip(weights: list[Tensor], longest: float) -> None:
    """Shortens the gradient to `longest`; clip_grad_norm_ would add 1e-6 to its norm, which Optax does not."""
    import torch

    gradients = [weight.grad for weight in weights]
    factor = (longest / torch.nn.utils.get_total_norm(gradients)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def hidden_states(weights: Mapping[str, Tensor], tokens: Tensor, setup: Setup) -> Tensor:
    """Returns the decoder's hidden states (B, T, D) of tokens (B, T)."""
    x = weights["embedding"][tokens]
    for layer in range(setup.num_layers):
        block = {
            name.removeprefix("blocks."): weight[layer]
            for name, weight in weights.items()
            if name.startswith("blocks.")
        }
        x = x + _attention(block, _norm(x, block["attention_norm.scale"], setup.rms_norm_eps), setup)
        x = x + _feed_forward(block, _norm(x, block["feed_forward_norm.scale"], setup.rms_norm_eps))
    return _norm(x, weights["final_norm.scale"], setup.rms_norm_eps)


def _norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * scale


def _attention(block: Mapping[str, Tensor], x: Tensor, setup: Setup) -> Tensor:
    """Causal grouped-query attention: num_heads / num_kv_heads queries share a key and a value."""
    import torch

    batch, length, _ = x.shape

    def heads(name: str) -> Tensor:
        projected = x @ block[f"attention.{name}.kernel"]
        return projected.view(batch, length, -1, setup.head_dim).transpose(1, 2)  # (B, heads, T, H)

    group = setup.num_heads // setup.num_kv_heads
    query, key = _rotate(heads("query"), setup.rope_theta), _rotate(heads("key"), setup.rope_theta)
    key, value = key.repeat_interleave(group, dim=1), heads("value").repeat_interleave(group, dim=1)
    scores = query @ key.transpose(-1, -2) * setup.head_dim**-0.5  # (B, num_heads, T, T)
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ value
    return mixed.transpose(1, 2).flatten(2) @ block["attention.out.kernel"]


def _rotate(x: Tensor, theta: float) -> Tensor:
    """Turns features i and i + H/2 of x (B, heads, T, H) by position * theta**(-2i/H)."""
    import torch

    length, half = x.shape[-2], x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)  # (T, H/2)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _feed_forward(block: Mapping[str, Tensor], x: Tensor) -> Tensor:
    import torch

    gate, up = x @ block["feed_forward.gate.kernel"], x @ block["feed_forward.up.kernel"]
    return torch.nn.functional.silu(gate) * up @ block["feed_forward.down.kernel"]
