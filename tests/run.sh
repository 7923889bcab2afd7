#!/usr/bin/env bash
# The tests: `bash tests/run.sh [--slow] [pytest arguments]`. Makes its own environment if none is
# active. --slow adds the tests that take minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *" --help "* | *" -h "*)
  sed -n '1d; /^set/q; s/^# \{0,1\}//p' tests/run.sh  # the comment above
  exit ;;
esac
. scripts/env.sh requirements-dev.txt
ruff check .
ruff format --check .
mypy . & mypy_pid=$!  # beside the tests: half a minute of one core
select="not slow"
if [ "${1:-}" = --slow ]; then select="" && shift; fi
# Hundreds of processes import this project: each would compile all of its files.
unset PYTHONDONTWRITEBYTECODE
python -m pytest -n 3 --dist worksteal -m "$select" "$@"
wait $mypy_pid  # exits with its status
