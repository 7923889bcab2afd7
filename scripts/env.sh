# train.sh, chat_demo.sh and tests/run.sh source this file: `. scripts/env.sh requirements.txt`. It
# uses the active environment, or makes .venv, and installs the requirements if they have changed
# since the last time. Afterwards $activate is the command that activates .venv, "" if nothing has to be.
is_prefix() {  # FOLDER: is it the environment that `python` runs in?
  [ "$(python -c 'import sys; print(sys.prefix)' 2>/dev/null)" -ef "$1" ]
}
has_torch() {  # does `python` have a PyTorch to keep, and may packages be installed beside it?
  python -c '
import pathlib, sys, sysconfig
from importlib.metadata import version
is_managed = pathlib.Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
is_old = tuple(map(int, version("torch").split(".")[:2])) < (2, 11) or sys.version_info < (3, 11)
sys.exit(is_old or (is_managed and sys.prefix == sys.base_prefix))' 2>/dev/null
}
activate=""
is_active=""
# A variable may be left over where `python` is another one: in a new shell, or after `conda activate`.
for folder in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
  if [ "$folder" ] && is_prefix "$folder"; then is_active=yes; fi
done
# Colab, and the modules of a cluster, have PyTorch without an environment.
if [ ! -e .venv ] && [ -z "${PYTHON:-}" ] && has_torch; then is_active=yes; fi
if [ "$is_active" ]; then
  python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: the Python of the active environment is older than 3.11; deactivate it" >&2
    exit 2
  }
else
  activate=". \"$PWD/.venv/bin/activate\""
  # The .venv of a clone that was moved, or whose Python was replaced, activates another Python.
  # Without Debian's python3-venv, a failed attempt leaves a .venv that activates nothing.
  if (. .venv/bin/activate && is_prefix .venv) 2>/dev/null; then
    [ -z "${PYTHON:-}" ] ||
      echo "note: PYTHON=$PYTHON is not used because .venv exists; remove .venv to make a new one"
  else
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
      echo "error: ${PYTHON:-python3} is missing or older than 3.11; name another one:" \
        "PYTHON=python3.12 bash $0" >&2
      exit 2
    }
    "${PYTHON:-python3}" -m venv --clear .venv
  fi
  . .venv/bin/activate
fi
stamp="$(python -c 'import sys; print(sys.prefix)')/.installed-$(cat requirements*.txt | cksum | tr ' ' -)-$1"
if [ ! -e "$stamp" ]; then
  install=(python -m pip install --disable-pip-version-check)
  # environments of uv have no pip; without --python, uv may choose an environment that is not active
  if command -v uv >/dev/null; then install=(uv pip install --python "$(command -v python)"); fi
  packages=$(cat requirements.txt "$1" | sed -n 's/ *#.*//; /^[A-Za-z]/p' | sort -u)
  download="2.9 GB, 5.6 GB on the disk"
  index=""
  if has_torch; then
    # it fits the driver of this machine, or the modules of a cluster
    packages=$(grep -v '^torch==' <<<"$packages")
    download="0.1 GB, 0.6 GB on the disk, and keeps its PyTorch"
  # a container may have the NVIDIA driver without nvidia-smi
  elif [ ! -e /proc/driver/nvidia ] && ! command -v nvidia-smi >/dev/null; then
    download="0.3 GB, 1.6 GB on the disk"
    [ "$(uname)" != Linux ] || index=https://download.pytorch.org/whl/cpu
  fi
  echo "installing $1 into $(dirname "$stamp"): downloads $download"
  if [ "$index" ]; then
    # On Linux, PyTorch's usual wheel brings 2.6 GB of CUDA, so take the wheel for CPUs. --no-deps:
    # only the wheel itself comes from this index.
    "${install[@]}" --no-deps --index-url "$index" "$(grep '^torch==' <<<"$packages")" ||
      echo "note: PyTorch's index of wheels for CPUs is out of reach; the usual wheel, which brings" \
        "CUDA, is installed instead: downloads 2.9 GB"
  fi
  "${install[@]}" $packages
  # the folder of a cluster's modules cannot be written: then pip looks again at each start
  touch "$stamp" 2>/dev/null || true
fi
