# Sourced by train.sh and tests/run.sh: `. scripts/env.sh requirements.txt`. Uses the environment that
# is active, or makes .venv; installs the requirements where they have changed since the last time.
# $activate is then the command that a shell without an active environment needs.
activate=""
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  activate=". $PWD/.venv/bin/activate"
  # not .venv/bin/python, which is there, too, where Debian's python3-venv was missing
  if [ ! -e .venv/bin/activate ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "error: python3 is older than 3.11; name a newer one: PYTHON=python3.12 bash $0" >&2
      exit 2
    }
    "${PYTHON:-python3}" -m venv .venv
  fi
  . .venv/bin/activate
fi
stamp="$(python -c 'import sys; print(sys.prefix)')/.installed-$(cat requirements*.txt | cksum | tr ' ' -)-$1"
if [ ! -e "$stamp" ]; then
  echo "installing $1 into $(dirname "$stamp")"
  if python -c "import pip" 2>/dev/null; then
    python -m pip install --quiet --disable-pip-version-check -r "$1"
  else
    uv pip install --quiet -r "$1"  # environments of uv have no pip
  fi
  touch "$stamp"
fi
