"""Remat policies: what is read, and what is refused."""

from __future__ import annotations

import pytest

from schedules.remat import Remat

NAMES = ("context", "mlpwi_0", "mlpwo")


@pytest.mark.parametrize(
    ("text", "kind", "names"),
    [
        ("none", "none", ()),
        ("full", "full", ()),
        ("dots", "dots", ()),
        ("names:context", "names", ("context",)),
        ("names: context , mlpwo,", "names", ("context", "mlpwo")),
        ("names:mlpwo,context,mlpwo", "names", ("mlpwo", "context")),
        ("offload:mlpwi_0", "offload", ("mlpwi_0",)),
    ],
)
def test_read(text, kind, names):
    remat = Remat.parse(text, NAMES)
    assert (remat.kind, remat.names) == (kind, names)
    assert Remat.parse(str(remat), NAMES) == remat


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("some", "none, full, dots, names:a,b or offload:a,b"),
        ("", "is not a policy"),
        ("None", "is not a policy"),
        ("full:", "is not a policy"),
        ("dots:context", "is not a policy"),
        ("names", "names nothing; use one or more of context, mlpwi_0, mlpwo"),
        ("names:", "names nothing; use"),
        ("offload: , ", "names nothing; use"),
        ("names:context,contxt", "'contxt'; use one or more of context, mlpwi_0, mlpwo"),
        ("offload:attention", "'attention'; use one or more of"),
    ],
)
def test_refused(text, words):
    with pytest.raises(ValueError, match=words) as error:
        Remat.parse(text, NAMES)
    assert "\n" not in str(error.value)


def test_policies():
    assert Remat.parse("none", NAMES).policy == "none"
    assert Remat.parse("full", NAMES).policy is None
    for text in ("dots", "names:context", "offload:context"):
        assert callable(Remat.parse(text, NAMES).policy)
