# Sourced by train.sh and tests/run.sh: `. scripts/env.sh requirements.txt`. Uses the environment that
# is active, or makes .venv; installs the requirements where they have changed since the last time.
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
  . .venv/bin/activate
fi
stamp="$(python -c 'import sys; print(sys.prefix)')/.installed-$(cat requirements*.txt | cksum | tr ' ' -)-$1"
if [ ! -e "$stamp" ]; then
  echo "installing $1 into $(dirname "$stamp")"
  python -m pip install --quiet --disable-pip-version-check -r "$1"
  touch "$stamp"
fi
