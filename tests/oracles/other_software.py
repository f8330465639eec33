"""Schedule files as other software writes them: V-shaped placement, bubbles, overlapped pairs, full backwards.

Every rank holds two stages, r and 2P-1-r, so that the last stage is on the first rank (Qi et al. 2024, ZBV;
DeepSeek-AI 2024, DualPipe). The writer works greedily, tick by tick, on strings; it knows nothing of `schedules`.
"""

from __future__ import annotations


def zbv(ranks: int, microbatches: int) -> str:
    """I and W apart, W wherever nothing else can run, an empty cell for each bubble."""
    return _write(ranks, microbatches, pairs=False)


def dualpipev(ranks: int, microbatches: int) -> str:
    """Full backwards in pairs with forwards, `(0F3;3B1)OVERLAP_F_B`; I and W apart for the last two microbatches."""
    return _write(ranks, microbatches, pairs=True)


def _write(ranks: int, microbatches: int, *, pairs: bool) -> str:
    stages = 2 * ranks
    done: set[str] = set()

    def forward(stage: int) -> str | None:
        for m in range(microbatches):
            if f"{stage}F{m}" not in done:
                return f"{stage}F{m}" if stage == 0 or f"{stage - 1}F{m}" in done else None
        return None

    def backward(stage: int) -> str | None:
        for m in range(microbatches):
            if f"{stage}I{m}" not in done:
                ready = f"{stage}F{m}" in done and (stage == stages - 1 or f"{stage + 1}I{m}" in done)
                return f"{stage}{'B' if pairs and m < microbatches - 2 else 'I'}{m}" if ready else None
        return None

    def weight(stage: int) -> str | None:
        for m in range(microbatches):
            if f"{stage}I{m}" in done and f"{stage}W{m}" not in done:
                return f"{stage}W{m}"
        return None

    rows: list[list[str]] = [[] for _ in range(ranks)]
    while len(done) < stages * microbatches * 3:
        ran: list[str] = []
        for early in range(ranks):
            late = stages - 1 - early
            in_flight = sum(f"{early}F{m}" in done and f"{early}I{m}" not in done for m in range(microbatches))
            f = forward(late) or (forward(early) if in_flight < stages - early else None)
            b = backward(early) or backward(late)
            w = weight(late) or weight(early)
            if pairs and f and b and "B" in b:
                rows[early].append(f"({f};{b})OVERLAP_F_B")
                ran += [f, b]
            else:
                first = (b or w or f) if len(rows[early]) % 2 else (f or b or w)
                rows[early].append(first or "")
                ran += [first] if first else []
        for word in ran:
            done |= {word.replace("B", "I"), word.replace("B", "W")}
    return "\n".join(",".join(row) for row in rows) + "\n"
