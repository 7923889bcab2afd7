# train.sh and tests/run.sh source this file: `. scripts/env.sh requirements.txt`. It uses the active
# environment, or makes .venv, and installs the requirements if they have changed since the last time.
# Afterwards $activate is the command that activates .venv, "" if an environment was active before.
activate=""
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
  activate=". \"$PWD/.venv/bin/activate\""
  # test for `activate`: without Debian's python3-venv, a failed attempt leaves .venv/bin/python
  if [ ! -e .venv/bin/activate ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "error: ${PYTHON:-python3} is missing or older than 3.11; name another one:" \
        "PYTHON=python3.12 bash $0" >&2
      exit 2
    }
    "${PYTHON:-python3}" -m venv .venv
  elif [ "${PYTHON:-}" ]; then
    echo "note: PYTHON=$PYTHON is not used because .venv exists; remove .venv to make a new one"
  fi
  . .venv/bin/activate
fi
stamp="$(python -c 'import sys; print(sys.prefix)')/.installed-$(cat requirements*.txt | cksum | tr ' ' -)-$1"
if [ ! -e "$stamp" ]; then
  install=(python -m pip install --disable-pip-version-check)
  # environments of uv have no pip; without --python, uv may choose an environment that is not active
  if command -v uv >/dev/null; then install=(uv pip install --python "$(command -v python)"); fi
  download="2.9 GB, 5.6 GB on the disk"
  has_nvidia=yes
  # a container may have the NVIDIA driver without nvidia-smi
  if [ ! -e /proc/driver/nvidia ] && ! command -v nvidia-smi >/dev/null; then
    download="0.3 GB, 1.6 GB on the disk"
    has_nvidia=""
  fi
  echo "installing $1 into $(dirname "$stamp"): downloads $download"
  if [ "$(uname)" = Linux ] && [ -z "$has_nvidia" ]; then
    # On Linux, PyTorch's usual wheel brings 2.6 GB of CUDA, so take the wheel for CPUs. --no-deps:
    # only the wheel itself comes from this index.
    "${install[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu \
      "$(grep -o '^torch==[0-9.]*' requirements.txt)" ||
      echo "note: PyTorch's index of wheels for CPUs is out of reach; the usual wheel, which brings" \
        "CUDA, is installed instead: downloads 2.9 GB"
  fi
  "${install[@]}" -r "$1"
  touch "$stamp"
fi
