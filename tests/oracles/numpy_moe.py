"""A mixture of experts in float64 numpy, one sequence, one token, one expert at a time."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from models.config import MoeConfig


class Found(NamedTuple):
    """What one mixture gives for a batch.

    Attributes:
        y: [B, S, D].
        loss: of the router.
        load: of each expert beyond the mean, [E].
        rows: how many tokens each expert was run on, [E].
    """

    y: np.ndarray
    loss: float
    load: np.ndarray
    rows: np.ndarray


def moe(params: Any, x: np.ndarray, weights: np.ndarray, segments: np.ndarray, config: MoeConfig) -> Found:
    """Takes the parameters of `models.moe.Moe`."""
    p = {name: _float64(leaf) for name, leaf in params.items()}
    x, y, loss = np.asarray(x, np.float64), np.zeros(x.shape), 0.0
    load, rows = np.zeros(config.experts), np.zeros(config.experts, int)
    for b in range(len(x)):
        tokens = [s for s in range(x.shape[1]) if segments[b, s]]
        capacity = math.inf
        if config.capacity_factor:
            even = Fraction(config.experts_per_token * len(tokens), config.experts)
            capacity = math.ceil(Fraction(str(config.capacity_factor)) * even)
        taken, chosen, shares, squares = np.zeros(config.experts), np.zeros(config.experts), 0.0, 0.0
        for s in tokens:
            logits = x[b, s] @ p["router"]
            scores = _scores(logits, config)
            experts = _best(scores + p.get("router_bias", 0.0), config)
            total = sum(scores[e] for e in experts) if config.normalize else 1.0
            for e in experts:
                if taken[e] < capacity:
                    taken[e] += 1
                    gate = {name: p[name][e] for name in ("gate", "up", "down")}
                    y[b, s] += config.scale * scores[e] / total * gated(gate, x[b, s])
                chosen[e] += 1
            shares = shares + scores / scores.sum()
            squares += np.log(np.exp(logits).sum()) ** 2
        if tokens:
            # DeepSeek-V3, equations 17 to 20: the frequencies f and the mean shares P of one sequence.
            f = chosen * config.experts / (config.experts_per_token * len(tokens))
            balance = f @ (shares / len(tokens))
            of_row = config.aux_loss * balance + config.z_loss * squares / len(tokens)
            loss += weights[b].sum() * of_row
        load, rows = load + chosen, rows + taken.astype(int)
    if "shared" in p:
        y += gated(p["shared"], x)
    return Found(y, loss, load - load.mean(), rows)


def gated(p: Any, x: np.ndarray) -> np.ndarray:
    gate = x @ p["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ p["up"])) @ p["down"]


def _scores(logits: np.ndarray, config: MoeConfig) -> np.ndarray:
    if config.router == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    return np.exp(logits) / np.exp(logits).sum()


def _best(scores: np.ndarray, config: MoeConfig) -> list[int]:
    """The best experts of the best groups; a group is as good as its two best experts together."""
    size = config.experts // config.groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.groups)]
    groups.sort(key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:2]))
    experts = [e for group in groups[: config.top_groups] for e in group]
    return sorted(experts, key=lambda e: -scores[e])[: config.experts_per_token]


def _float64(leaf: Any) -> Any:
    return {k: _float64(v) for k, v in leaf.items()} if isinstance(leaf, dict) else np.asarray(leaf, np.float64)
