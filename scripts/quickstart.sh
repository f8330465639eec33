#!/usr/bin/env bash
# Sets up .venv and trains configs/quickstart.yaml: scripts/quickstart.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/meshsys train configs/quickstart.yaml "$@"
