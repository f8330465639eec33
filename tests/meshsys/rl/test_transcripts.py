"""samples.jsonl: a resumed run drops what it is about to sample again, and nothing else."""

from __future__ import annotations

import json

import pytest

from meshsys.rl.transcripts import TranscriptWriter


@pytest.mark.parametrize("tail", ["", '{"step": 2, "respon'])
def test_lines_until_a_step_are_kept(tmp_path, tail):
    kept = [{"step": step, "response": text} for step, text in ((1, "a\u2028b"), (2, "\x85\x1c"))]
    lines = [*kept, {"step": 3, "response": "later"}]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines) + tail, encoding="utf-8")
    TranscriptWriter(tmp_path, 2, 4).close()
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] == kept
