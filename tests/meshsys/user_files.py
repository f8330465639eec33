"""Files of a user whose configuration would run, and what a test does with such files."""

from __future__ import annotations

import json
from pathlib import Path

GOOD = """\
run: {name: tiny}
model: {layers: 4, d_model: 16, heads: 2, d_ff: 32}
data: {source: text.txt, sequence_length: 16, batch_size: 8}
train: {steps: 2}
"""

TEXT = "All is well that ends well.\n" * 40

TWO_RANKS = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"

TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})


def write(name: str, held: str | bytes) -> None:
    """Writes a file of the working directory."""
    Path(name).write_bytes(held if isinstance(held, bytes) else held.encode())


def content(folder: Path) -> set[Path]:
    """All that lies in a folder, at any depth."""
    return set(folder.rglob("*"))
