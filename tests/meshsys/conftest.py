"""The folder in which commands are typed."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from tests.meshsys.user_files import GOOD, TEXT, TOKENIZER, TWO_RANKS


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """A working directory with a configuration that would run, and a text; JAX has its 8 devices."""
    assert jax.device_count() == 8
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "two.csv").write_text(TWO_RANKS)
    (tmp_path / "recompute.csv").write_text("0F0,0R0,0B0\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad_config").mkdir()
    (tmp_path / "bad_config" / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "bad_config" / "tokenizer_config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    return tmp_path
