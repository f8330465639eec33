#!/usr/bin/env bash
# Sets up .venv, then lints, checks types and runs the tests: scripts/test.sh [--all] [pytest options]
# --all runs the slow tests too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1:-} == --all ]]; then shift; else set -- -m "not slow" "$@"; fi
scripts/setup.sh test
python=.venv/bin/python
"$python" -m ruff check .
"$python" -m mypy
# XLA compiles on one core, and compiling is most of the work.
exec "$python" -m pytest -n auto --dist worksteal "$@"
