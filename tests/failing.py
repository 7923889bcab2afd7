"""A script of which one call fails: python tests/failing.py SCRIPT ARGS.

FAULT="KIND RANK K" names the call number K, from 1, of a kind on one process: "collective" (of
utils/distributed.py), "read" or "write" (of a file in the folder FOLDER). With K = 0 nothing fails,
and the file FOLDER_counts gets the number of calls of each kind.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
from collections import Counter

import torch.distributed as dist

KIND, RANK, K = os.environ["FAULT"].split()
FOLDER = os.environ["FOLDER"]
counts: Counter[str] = Counter()
counting = threading.Lock()


def count(kind: str) -> None:
    """Count a call, and let it fail if it is the one."""
    with counting:
        counts[kind] += 1
        number = counts[kind]
    if int(K) == 0:
        with open(f"{FOLDER}_counts", "w") as file:  # not in FOLDER, so it does not count
            json.dump(counts, file)
    if kind == KIND and number == int(K):
        raise OSError(5, "an injected fault")


def count_first(kind, function):
    """Return the function, which counts its calls."""

    def counted(*args, **kwargs):
        count(kind)
        return function(*args, **kwargs)

    return counted


def audit(event: str, args: tuple) -> None:
    """Count what Python does with the files of FOLDER."""
    if event not in ("open", "os.rename", "os.remove", "os.link") or not isinstance(args[0], str):
        return
    if not args[0].startswith(FOLDER + "/") or args[0].endswith(".lock"):
        return
    is_write = event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)
    count("write" if is_write else "read")


def end_before_joining() -> None:
    """End this process if the failing one has ended before they have met, as torchrun would."""
    while not dist.is_initialized():
        time.sleep(1)
        if os.path.exists(f"{FOLDER}_ended"):
            os.kill(os.getpid(), signal.SIGTERM)


def exit_and_say(code: int) -> None:
    """Exit, so that the others see it."""
    open(f"{FOLDER}_ended", "w").close()
    leave(code)


leave = os._exit
if os.environ.get("RANK", "0") == RANK:
    os._exit = exit_and_say
    for name in ("all_reduce", "all_gather_object"):
        setattr(dist, name, count_first("collective", getattr(dist, name)))
    os.fsync = count_first("write", os.fsync)
    sys.addaudithook(audit)
else:
    threading.Thread(target=end_before_joining, daemon=True).start()
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
