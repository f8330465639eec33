"""RFold's folds without its switches."""

from __future__ import annotations

import numpy as np

from meshsys.cluster.folds import embed
from meshsys.cluster.grant import Grant
from meshsys.cluster.pod import Pod
from meshsys.cluster.policies.base import Cached, Shape, Wrap
from meshsys.cluster.policies.boxes import box_nodes, first_free, rotations
from meshsys.cluster.policies.shapes import rfold_folds
from meshsys.cluster.wiring import grant

__all__ = ["Folding"]


class Folding(Cached):
    """The shape is replaced by the fold whose longest dimension is shortest; then the first free box."""

    name = "folding"

    def place(self, pod: Pod, shape: Shape, wrap: Wrap = None) -> Grant | None:
        if sum(side > 1 for side in shape) > 3:
            return None
        asked = wrap or (False,) * len(shape)
        folded = min(rfold_folds(shape, min(pod.dims)), key=max)
        if pod.ndim != 3:
            folded = tuple(side for side in folded if side > 1)
            folded = (*(1,) * (pod.ndim - len(folded)), *folded)
        for box, _ in rotations(folded) if len(folded) == pod.ndim else ():
            corner = first_free(pod, box)
            if corner is None:
                continue
            closed = tuple(pod.wrap[dim] and side == pod.dims[dim] for dim, side in enumerate(box))
            fold = embed(shape, asked, box, closed, steps=500)
            if fold is not None:
                found = grant(pod, box_nodes(pod, corner, box)[tuple(np.moveaxis(fold.places, -1, 0))], wrap, fold.how)
                if pod.admits(found):
                    return found
        return None
