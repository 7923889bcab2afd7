#!/usr/bin/env bash
# The Shakespeare race: nats per character on the last tenth of a text, all of it, after training on
# the rest on a laptop's CPU. nanoGPT's documented run for a CPU (its README says 1.88) ended at 1.886 on
# tinyshakespeare.txt where this was made.
#
#   bash scripts/shakespeare.sh tinyshakespeare.txt [FLAGS of train.py]
#
# The last line of output is the figure as JSON: nats per character, seconds from the start of the
# command, and when a loss of 1.886 was passed.
set -euo pipefail
began=$(date +%s.%N)
[ -f "${1:-}" ] || { echo "error: give a text file: bash scripts/shakespeare.sh FILE" >&2; exit 2; }
text=$(realpath "$1")
cd "$(dirname "$0")/.."
. scripts/env.sh requirements.txt
exec python scripts/shakespeare.py "$began" "$text" "${@:2}"
