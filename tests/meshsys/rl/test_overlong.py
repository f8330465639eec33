"""The punishment of length, in tokens."""

from __future__ import annotations

import numpy as np

from meshsys.rl.overlong import overlong_penalty


def test_it_grows_over_the_buffer() -> None:
    """Twenty tokens at most, the last five of them the buffer."""
    penalty_N = overlong_penalty([0, 15, 16, 18, 20, 21, 90], 20, 5)
    np.testing.assert_allclose(penalty_N, [0, 0, -0.2, -0.6, -1, -1, -1], atol=1e-15)


def test_without_a_buffer_only_what_is_too_long_loses() -> None:
    np.testing.assert_array_equal(overlong_penalty([19, 20, 21], 20, 0), [0, 0, -1])
