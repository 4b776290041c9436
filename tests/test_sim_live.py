"""The simulator against a vLLM on this machine's CPU: served now, fitted on the first half, replayed for the second.

TAILSCOPE_VLLM names the Python of a virtual environment that the captures' tools/install.sh made. Takes some minutes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from real import CAPTURES, needs_captures
from sim_replay import asked, replay, traced

from tailscope.sim.fit import fit_cost
from tailscope.sim.scenario import Engine

PYTHON = os.environ.get("TAILSCOPE_VLLM", "")
MODEL = CAPTURES / "vllm-cpu" / "models" / "tiny-qwen3"
PLUGIN = CAPTURES / "vllm-cpu" / "tools" / "tailcap_plugin" / "tailcap_plugin.py"

#: On CPUs vLLM never schedules asynchronously.
ENGINE = Engine(
    max_num_batched_tokens=2048,
    max_num_seqs=48,
    block_size=32,
    kv_blocks=256,
    max_model_len=6144,
    async_scheduling=False,
)
VOCABULARY = (10, 8000)
#: A server imports for a minute on two cores.
UP_WITHIN_S = 400.0
ANSWER_WITHIN_S = 300.0

#: The first half: short requests, long prompts, and more at once than are usual, so that each coefficient has its steps.
FIRST_S, RATE = 30.0, 3.0
LONGS_AT_S, LONG_PROMPT = (6.0, 12.0), 5000
GROUP, GROUP_AT_S = 24, 20.0
#: The second: a burst that does not fit into the KV cache, and short ones that wait behind it.
BURST, BURST_OUTPUT = 40, 384
BEHIND_RATE, BEHIND_S = 2.0, 6.0

#: A machine of two cores is not the same from one half to the next: its steps alone differ by 10 to 20 %.
TTFT_WITHIN = 0.35
STEPS_WITHIN = 0.10
PREEMPTED_WITHIN = 6
#: With the noise of such a machine one seed says little of a quantile of fifty requests.
SEEDS = range(7)


@dataclass(frozen=True)
class Sent:
    """A request to send `at_s` seconds into its half."""

    at_s: float
    prompt: int
    output: int


def first_half(rng: random.Random) -> list[Sent]:
    longs = [Sent(at, LONG_PROMPT, 16) for at in LONGS_AT_S]
    group = [Sent(GROUP_AT_S, 128, 160)] * GROUP
    return sorted([*longs, *group, *_shorts(rng, RATE, FIRST_S)], key=lambda one: one.at_s)


def second_half(rng: random.Random) -> list[Sent]:
    return [*[Sent(0.0, 128, BURST_OUTPUT)] * BURST, *_shorts(rng, BEHIND_RATE, BEHIND_S)]


def _shorts(rng: random.Random, rate: float, until_s: float) -> Iterator[Sent]:
    at = rng.expovariate(rate)
    while at < until_s:
        yield Sent(at, max(8, min(300, int(rng.lognormvariate(4.3, 0.7)))), rng.randint(12, 48))
        at += rng.expovariate(rate)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """A vLLM server with a stat logger that writes into `folder`; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(Path(PYTHON).with_name("vllm")), "serve", str(MODEL), "--served-model-name", "tiny"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy", "--dtype", "float32"]
    command += ["--max-model-len", str(ENGINE.max_model_len), "--enforce-eager"]
    command += ["--block-size", str(ENGINE.block_size), "--num-gpu-blocks-override", str(ENGINE.kv_blocks)]
    command += ["--max-num-seqs", str(ENGINE.max_num_seqs)]
    command += ["--max-num-batched-tokens", str(ENGINE.max_num_batched_tokens)]
    command += ["--enable-logging-iteration-details"]
    log = folder / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env=_environment(folder))
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_up(server, address, log)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _environment(folder: Path) -> dict[str, str]:
    """The plug-in is found as an installed distribution would be: by the metadata beside it."""
    plugins = folder / "plugins"
    metadata = plugins / "tailcap-1.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(PLUGIN, plugins)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tailcap\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.stat_logger_plugins]\ntailcap = tailcap_plugin:TailCap\n"
    )
    bin_folder = str(Path(PYTHON).parent)
    return {
        **os.environ,
        **dict.fromkeys(
            ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"
        ),
        "PATH": os.pathsep.join([bin_folder, os.environ.get("PATH", "")]),
        "PYTHONPATH": str(plugins),
        "TAILCAP_DIR": str(folder),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CONFIG_ROOT": str(folder / "config"),
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }


def _wait_until_up(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until = time.monotonic() + UP_WITHIN_S
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    lines = log.read_text(errors="replace").splitlines()
    pytest.fail("\n".join(["vLLM did not start:", *[line for line in lines if "Error" in line][-10:]]))


def play(address: str, requests: list[Sent], rng: random.Random) -> tuple[int, int]:
    """Send the requests at their instants and wait for the answers: from when to when it took, Unix ns."""
    bodies = [
        json.dumps(
            {
                "model": "tiny",
                "prompt": [rng.randrange(*VOCABULARY) for _ in range(one.prompt)],
                "max_tokens": one.output,
                "ignore_eos": True,
            }
        ).encode()
        for one in requests
    ]
    start_ns, start = time.time_ns(), time.monotonic()
    with ThreadPoolExecutor(len(requests)) as pool:
        answers: list[Future[int]] = []
        for one, body in zip(requests, bodies, strict=True):
            time.sleep(max(0.0, start + one.at_s - time.monotonic()))
            answers.append(pool.submit(_post, address, body))
        given = [answer.result() for answer in answers]
    assert given == [one.output for one in requests]
    return start_ns, time.time_ns()


def _post(address: str, body: bytes) -> int:
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON, reason="TAILSCOPE_VLLM does not name the Python of a CPU vLLM")
@needs_captures
def test_live(tmp_path: Path) -> None:
    rng = random.Random(1)
    with served(tmp_path) as address:
        # The first steps of a server warm up.
        play(address, [Sent(0.0, 2048, 16), Sent(0.0, 30, 16)], rng)
        first_ns, _ = play(address, first_half(rng), rng)
        time.sleep(2)
        second_ns, end_ns = play(address, second_half(rng), rng)
        time.sleep(1)
    (told,) = tmp_path.glob("statlogger_engine0_*.jsonl")
    with traced(told, tmp_path) as trace:
        cost = fit_cost(trace, from_ns=first_ns, to_ns=second_ns)
        asked_second = asked(trace, second_ns, end_ns)
    print(f"\n{cost}\nvLLM:   {asked_second.served}")
    real = asked_second.served
    ours = [replay(asked_second, cost, ENGINE, seed) for seed in SEEDS]
    print(*ours, sep="\n")
    assert abs(median(one.preempted for one in ours) - real.preempted) <= PREEMPTED_WITHIN
    assert median(one.steps for one in ours) == pytest.approx(real.steps, rel=STEPS_WITHIN)
    for q in (0.5, 0.95):
        assert median(one.ttft(q) for one in ours) == pytest.approx(real.ttft(q), rel=TTFT_WITHIN)
