# Sourced by train.sh and tests/run.sh: `. scripts/env.sh requirements.txt`. Uses the environment that
# is active, or makes .venv; installs the requirements where they have changed since the last time.
# $activate is then the command that a shell without an active environment needs.
activate=""
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  activate=". \"$PWD/.venv/bin/activate\""
  # not .venv/bin/python, which is there, too, where Debian's python3-venv was missing
  if [ ! -e .venv/bin/activate ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "error: ${PYTHON:-python3} is missing or older than 3.11; name another one:" \
        "PYTHON=python3.12 bash $0" >&2
      exit 2
    }
    "${PYTHON:-python3}" -m venv .venv
  elif [ "${PYTHON:-}" ]; then
    echo "note: PYTHON=$PYTHON is not used, as .venv is there already; remove .venv to make it anew"
  fi
  . .venv/bin/activate
fi
stamp="$(python -c 'import sys; print(sys.prefix)')/.installed-$(cat requirements*.txt | cksum | tr ' ' -)-$1"
if [ ! -e "$stamp" ]; then
  install=(python -m pip install --disable-pip-version-check)
  # environments of uv have no pip; without --python it may take another one than the active one
  if command -v uv >/dev/null; then install=(uv pip install --python "$(command -v python)"); fi
  download="2.9 GB, 5.6 GB on the disk"
  has_nvidia=yes
  # a container may have the driver without nvidia-smi
  if [ ! -e /proc/driver/nvidia ] && ! command -v nvidia-smi >/dev/null; then
    download="0.3 GB, 1.6 GB on the disk"
    has_nvidia=""
  fi
  echo "installing $1 into $(dirname "$stamp"): downloads $download"
  if [ "$(uname)" = Linux ] && [ -z "$has_nvidia" ]; then
    # On Linux the usual wheel brings 2.6 GB of CUDA. Only the wheel itself comes from this index.
    "${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu \
      "$(grep -o '^torch==[0-9.]*' requirements.txt)" ||
      echo "note: PyTorch's index of wheels for CPUs is out of reach; going on with the usual wheel," \
        "which brings CUDA: downloads 2.9 GB"
  fi
  "${install[@]}" -r "$1"
  touch "$stamp"
fi
