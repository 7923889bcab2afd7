#!/usr/bin/env bash
# The tests: `bash tests/run.sh [pytest arguments]`. Makes its own environment if none is active.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh requirements-dev.txt
ruff check .
ruff format --check .
exec python -m pytest "$@"
