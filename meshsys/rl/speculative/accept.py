"""How much of a draft stays.

Shapes: N drafts, T tokens of a draft, padded. Arrays are NumPy's or JAX's.
"""

from __future__ import annotations

import math
from typing import Any

__all__ = ["accepted", "is_lenient", "is_redrawn"]


def is_redrawn(token_NT: Any, redrawn_NT: Any) -> Any:
    """Which tokens the new policy draws too, after the tokens before them and with the noise that they came from.

    A response is a function of policy and noise. So up to and with the first token that is drawn otherwise, `redrawn`
    is the new policy's own response to that noise.
    """
    return token_NT == redrawn_NT


def is_lenient(log_uniform_NT: Any, logp_NT: Any, old_logp_NT: Any, lenience: float) -> Any:
    """Which tokens stay by the rule of SPEC-RL (arXiv 2509.23232): u <= min(1, lenience p_new / p_old).

    The token in place of the first that does not is drawn from the new policy, where a sample of it would need the
    remainder of the new policy over the old one: no lenience makes the response one of the new policy.

    Args:
        log_uniform_NT: logarithms of uniform random numbers, which nothing else has seen.
        logp_NT, old_logp_NT: of the tokens, under the new policy and under that which they came from.
    """
    return log_uniform_NT <= math.log(lenience) + logp_NT - old_logp_NT


def accepted(stays_NT: Any, length_N: Any) -> Any:
    """Tokens of each draft before the first that does not stay, [N].

    Args:
        stays_NT: which do; anything behind a draft's end.
        length_N: tokens of each.
    """
    count_N = stays_NT.astype(length_N.dtype).cumprod(-1).sum(-1, dtype=length_N.dtype)
    return count_N.clip(max=length_N)
