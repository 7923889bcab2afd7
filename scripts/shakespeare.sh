#!/usr/bin/env bash
# The Shakespeare race: train on the first nine tenths of a text on a laptop's CPU and report nats per
# character on the last tenth, all of it. The target is 1.886, the validation loss that nanoGPT's
# documented run for a CPU reaches on tinyshakespeare.txt (its README says 1.88).
#
#   bash scripts/shakespeare.sh tinyshakespeare.txt [FLAGS of train.py]
#
# Everything is written to runs/shakespeare; --overwrite replaces an earlier race there.
#
# The last line of output is JSON: nats per character, seconds since the start of this command, and
# seconds until the target was reached. Without a validation, as with --dry_run, there is no such line.
set -euo pipefail
began=$(date +%s.%N)
[ -f "${1:-}" ] || { echo "error: give a text file: bash scripts/shakespeare.sh FILE" >&2; exit 2; }
text=$(realpath "$1")
cd "$(dirname "$0")/.."
. scripts/env.sh requirements.txt
exec python scripts/shakespeare.py "$began" "$text" "${@:2}"
