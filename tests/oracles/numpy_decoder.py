"""A decoder in float64 numpy, one sequence, one position, one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from models import ModelConfig


def rms_norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x) + epsilon) * scale


def rotate(x, position, theta):
    """Turns the pair (x[i], x[i + H/2]) by the angle position * theta^(-2i/H)."""
    half = len(x) // 2
    out = np.zeros_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def attention(p, x, positions, segments, config):
    """x is [S, D], normed; each position looks at those of its own segment up to itself."""
    queries_per_key = config.heads // config.num_kv_heads
    out = np.zeros_like(x)
    for head in range(config.heads):
        kv_head = head // queries_per_key
        query = [rotate(row, at, config.rope_theta) for row, at in zip(x @ p["query"][:, head], positions, strict=True)]
        key = [rotate(row, at, config.rope_theta) for row, at in zip(x @ p["key"][:, kv_head], positions, strict=True)]
        value = x @ p["value"][:, kv_head]
        for s in range(len(x)):
            seen = [t for t in range(s + 1) if segments[t] == segments[s]]
            scores = np.array([query[s] @ key[t] / np.sqrt(config.size_of_head) for t in seen])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed = sum(weight * value[t] for weight, t in zip(weights, seen, strict=True))
            out[s] += mixed @ p["out"][head]
    return out


def mlp(p, x):
    gate = x @ p["gate"]
    return (gate / (1 + np.exp(-gate)) * (x @ p["up"])) @ p["down"]


def logits(params: Any, tokens, positions, segments, config: ModelConfig) -> np.ndarray:
    """Of one sequence, [S, V]; takes the parameters of `models.Decoder`."""
    params = _float64(params)
    shared = params["shared"]
    x = shared["embed"]["embedding"][tokens]
    for number in range(config.layers):
        p = _layer(params["layers"], number)
        normed = np.stack([rms_norm(row, p["attention_norm"]["scale"], config.norm_epsilon) for row in x])
        x = x + attention(p["attention"], normed, positions, segments, config)
        normed = np.stack([rms_norm(row, p["mlp_norm"]["scale"], config.norm_epsilon) for row in x])
        x = x + np.stack([mlp(p["mlp"], row) for row in normed])
    x = np.stack([rms_norm(row, shared["head"]["norm"]["scale"], config.norm_epsilon) for row in x])
    return x @ (shared["embed"]["embedding"].T if config.tie_embeddings else shared["head"]["kernel"])


def loss_sum(params: Any, tokens, targets, positions, segments, weights, config: ModelConfig) -> float:
    """Of a batch [B, S]: the sum of weight times negative log-likelihood."""
    total = 0.0
    for row in range(len(tokens)):
        for s, scores in enumerate(logits(params, tokens[row], positions[row], segments[row], config)):
            log_sum = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            total += float(weights[row][s]) * (log_sum - scores[targets[row][s]])
    return total


def _float64(tree):
    return {k: _float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}


def _layer(tree, number):
    return {k: _layer(v, number) if isinstance(v, dict) else v[number] for k, v in tree.items()}
