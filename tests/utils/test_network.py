"""A proxy that accepts connections and says nothing, before whatever asks the network."""

import re
import socket
import time

import pytest
from conftest import ROOT, environment, script
from huggingface_hub import constants

from utils import network
from utils.network import ask

# a script with short limits
IMPATIENT = """
import runpy, sys
from utils import network

network.ask.__defaults__ = (1.0,)
network.announce_wait.__wrapped__.__defaults__ = (0.2,)
del sys.argv[0]
sys.path.insert(0, "data")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def mute_proxy():
    """The address of a server whose queue takes connections that nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "host, command",
    [
        ("huggingface.co", "data/fineweb-edu.py --dataset me/corpus --tokenizer bytes"),
        ("huggingface.co", "sample.py --model me/gpt --device cpu"),
        ("openaipublic.blob.core.windows.net", "data/fineweb-edu.py --input README.md"),
    ],
)
def test_a_network_that_does_not_answer_is_named_and_given_up(tmp_path, mute_proxy, host, command):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    env = environment() | {"HF_HUB_OFFLINE": "0", "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    env |= {"HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env |= {"HTTPS_PROXY": mute_proxy, "https_proxy": mute_proxy}
    flags = ["--local_dir", tmp_path] if "data/" in command else []
    stderr = script(tmp_path / "impatient.py", *command.split(), *flags, env=env, code=2).stderr
    assert f"waiting for {host}\n" in stderr and "Traceback" not in stderr
    assert "error: " in stderr.splitlines()[-1] and "network" in stderr


def test_an_answer_or_an_error_is_passed_on_and_silence_is_not(capsys):
    assert ask("https://host/path", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        ask("https://host/path", lambda: 1 / 0)
    with pytest.raises(TimeoutError, match="^host:8 has not answered: check the network"):
        ask("http://host:8/path", lambda: time.sleep(9), limit=0.1)
    assert capsys.readouterr().err == ""
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    "hub, proxies",
    [
        ("http://127.0.0.1:1", {}),
        ("https://hub.invalid", {}),
        ("https://huggingface.co", {"https": "http://127.0.0.1:1"}),
    ],
)
def test_a_hub_out_of_reach_is_said_in_one_line_and_asked_no_more(
    monkeypatch, capsys, hub, proxies
):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(network, "HUB", hub)
    monkeypatch.setattr(network, "getproxies", lambda: proxies)
    network.go_offline_without_hub.__wrapped__()  # without the cache
    assert constants.HF_HUB_OFFLINE
    host = hub.partition("://")[2]
    assert re.fullmatch(f"{host} cannot be reached .*: only what .*\n", capsys.readouterr().err)
