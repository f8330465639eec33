"""Attention and its gradients as loops over queries, in numpy and float64."""

from __future__ import annotations

import jax
import numpy as np


def sees(mask, b, s, t):
    """Whether query s of row b may look at key t; the mask's arrays are numpy's."""
    query_place, key_place = mask.query_place_BS[b, s], mask.key_place_BT[b, t]
    key_segment, trunk = mask.key_segment_BT[b, t], 0 if mask.query_trunk_BS is None else mask.query_trunk_BS[b, s]
    if mask.query_segment_BS[b, s] != key_segment and (trunk == 0 or trunk != key_segment):
        return False
    if mask.prefix_B is not None and key_place < mask.prefix_B[b]:
        return True
    if key_place > query_place:
        return False
    return not mask.window or query_place - key_place < mask.window


def attention(q, k, v, mask, scale, softcap, d_out):
    """Output [B, S, N, V], and the gradients of q, k and v where the output's is `d_out`."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    mask = jax.tree.map(np.asarray, mask)
    (B, S, N, _), (T, K) = q.shape, k.shape[1:3]
    out, dq, dk, dv = np.zeros_like(d_out), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(B):
        for s in range(S):
            keys = [t for t in range(T) if sees(mask, b, s, t)]
            if not keys:
                continue
            for n in range(N):
                h = n // (N // K)
                score, slope = k[b, keys, h] @ q[b, s, n] * scale, scale
                if softcap:
                    score, slope = softcap * np.tanh(score / softcap), scale / np.cosh(score / softcap) ** 2
                weight = np.exp(score - score.max())
                weight /= weight.sum()
                out[b, s, n] = weight @ v[b, keys, h]
                d_score = weight * ((v[b, keys, h] - out[b, s, n]) @ d_out[b, s, n]) * slope
                dq[b, s, n] = d_score @ k[b, keys, h]
                np.add.at(dk, (b, keys, h), np.outer(d_score, q[b, s, n]))
                np.add.at(dv, (b, keys, h), np.outer(weight, d_out[b, s, n]))
    return out, (dq, dk, dv)
