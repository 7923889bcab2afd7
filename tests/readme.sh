#!/usr/bin/env bash
# Used by tests/test_readme.py: `bash readme.sh ROOT PYTHON LINES EVERY`. Makes a clone of ROOT in the
# working folder and runs LINES in it, by a shell that has no environment and no variables.
# `python3 -m venv` makes an environment whose python is PYTHON, in which a run has three steps, and
# the demo reads every EVERY-th file of the library.
set -euo pipefail
here=$PWD
mkdir bin clone
cp -r "$1"/*.py "$1"/*.sh "$1"/*.txt "$1"/{configs,docs,evaluation,finetuning,model,scripts,training,utils} clone
mkdir clone/data && cp "$1"/data/*.py clone/data
cp "$1/docs/TOUR.md" clone/input.txt  # in the place of Shakespeare

cat >bin/python3 <<END
#!/usr/bin/env bash
mkdir -p .venv/bin
cp $here/environment .venv/bin/python
echo 'PATH="\$PWD/.venv/bin:\$PATH"' >.venv/bin/activate
END
cat >environment <<END
#!/usr/bin/env bash
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
case "\$*" in
  -c*sys.prefix*) echo .venv; exit ;;
  -c*stdlib*) $2 "\$@" | awk 'NR % $4 == 0'; exit ;;
  "-m pip"*) exit ;;
  *--dry_run*) ;;
  train.py*--minutes*) set -- "\$@" --minutes 0.2 --max_steps 3 ;;  # measures for a second
  train.py*) set -- "\$@" --max_steps 3 --warmup_steps 1 --eval_every 3 --val_tokens 2048 ;;
  finetune.py*) set -- "\$@" --max_steps 2 ;;
  scripts/sweep.py*) set -- "\$@" "max_steps 3" "warmup_steps 1" "eval_every 3" ;;  # of --fixed
  sample.py*) set -- "\$@" --max_new_tokens 20 ;;
esac
exec $2 "\$@"
END
chmod +x bin/python3 environment
cd clone
exec env -i HOME="$here" PATH="$here/bin:/usr/bin:/bin" bash -exc "$3"
