"""Calls of the network, all of which go through `ask`: with a time limit, and never in silence.

Libraries wait for minutes, or forever, for a proxy or server that accepts a connection and then
says nothing.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import cache
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

Answer = TypeVar("Answer")

HUB = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"  # or a mirror of the hub
QUIET_SECONDS = 10  # what takes longer is announced
LIMIT_SECONDS = 60  # for a small answer, such as a list of files
DOWNLOAD_SECONDS = 180  # for some megabytes, such as a benchmark or a batch of rows


@contextlib.contextmanager
def announce_wait(message: str, seconds: float = QUIET_SECONDS) -> Iterator[None]:
    """Return a context that prints `message` if its body takes longer than `seconds`."""
    # a thread, because the body may wait outside of Python
    timer = threading.Timer(seconds, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@cache
def go_offline_without_hub() -> None:
    """Let the libraries of Hugging Face read their caches only if nothing answers at the address of
    the hub, and print a line. Else each call tries for half a minute, and reports each attempt."""
    from huggingface_hub import constants  # here, because training needs no hub

    if constants.HF_HUB_OFFLINE:  # the user has said so
        return
    address = urlsplit(HUB)  # where to connect: to the hub, unless a proxy stands in between
    proxies = getproxies()  # {"https": "http://proxy:3128", ...}
    proxy = proxies.get(address.scheme) or proxies.get("all")
    if proxy is not None and not proxy_bypass(address.netloc):  # NO_PROXY names exceptions
        address = urlsplit(proxy)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:  # a connection shows that something answers; nothing is sent over it
        socket.create_connection((address.hostname, port), timeout=QUIET_SECONDS).close()
    except OSError as error:
        message = f"{urlsplit(HUB).netloc} cannot be reached ({error.strerror or error})"
        print(f"{message}: only what is downloaded already can be read", file=sys.stderr)
        constants.HF_HUB_OFFLINE = True


def ask(url: str, request: Callable[[], Answer], limit: float | None = LIMIT_SECONDS) -> Answer:
    """Return what `request` returns: a call of a library that asks the host of `url`. After ten
    seconds, print the name of the host. Raises the errors of the call, and TimeoutError after
    `limit` seconds. None is for downloads of any size, by libraries that limit the time without a
    byte."""
    # "huggingface.co"; `url` itself if it is a name, "Weights & Biases" of weights_and_biases.py
    host = urlsplit(url).netloc or url
    outcome: Future[Answer] = Future()

    def run() -> None:
        try:
            if url == HUB:
                go_offline_without_hub()
            outcome.set_result(request())
        except BaseException as error:  # raised again in the caller's thread
            outcome.set_exception(error)

    # urllib gives up after this time without a byte. Other libraries set their own limit, or none.
    socket.setdefaulttimeout(LIMIT_SECONDS)
    # A thread, because no library can be told to give up. If it still waits, it ends with the
    # process.
    threading.Thread(target=run, daemon=True).start()
    try:
        with announce_wait(f"waiting for {host}"):
            return outcome.result(limit)
    except TimeoutError as error:
        raise TimeoutError(
            f"{host} has not answered: check the network, and the proxy if HTTPS_PROXY names one"
        ) from error
    finally:
        socket.setdefaulttimeout(None)
