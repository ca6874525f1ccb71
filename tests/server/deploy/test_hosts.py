"""A server whose replicas run on other hosts, started by the commands of the documentation."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx2
import psutil
import pytest
import yaml

from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.node_options import NodeOptions
from sidestep.frontend.options.option_flags import option_values
from tests.pages import commands, text_of
from tests.processes import PYTHON_PATH, ROOT, run
from tests.server.deploy.files import DEPLOY, parsed
from tests.server.live import LiveServer, raw_request, read_all, until
from tests.server.nodes import END_S, Nodes


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_host_s_end_breaks_no_answer_and_operators_are_told(
    tmp_path: Path, fake_model: str, count: str
) -> None:
    invitation = tmp_path / "invitation"
    words = ("--placer", "join", "--data-parallel-size", "2", "--invitation-file", str(invitation))
    fake = ("--device", "fake", "--fake-step-ms", "3", "--api-server-count", count)
    with ExitStack() as stack:
        nodes = stack.enter_context(closing(Nodes(invitation)))
        victim = nodes.start(2)
        nodes.start(3)
        server = stack.enter_context(
            LiveServer(fake_model, *words, "--head-address", "127.0.0.1:0", *fake)
        )
        health = server.http.get("/health").json()
        assert sorted(health["hosts"]) == ["h2", "h3"]
        (lost,) = health["hosts"]["h2"]
        head = invitation.read_text()
        with socket.create_connection(address_in(head)) as stranger, suppress(ConnectionError):
            stranger.sendall(b"\x00" * 100_000)
        until(lambda: server.metrics()["sidestep:refused_peers_total"] == 1)
        body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
        streams = [stack.enter_context(server.connect()) for _ in range(16)]
        for i, stream in enumerate(streams):
            content = json.dumps({**body, "prompt": f"{i}" * 20}).encode()
            stream.sendall(raw_request("/v1/completions", content, Connection="close"))
        server.until(lambda load: load["num_running"] == 16)
        victim.kill()
        for answer in map(read_all, streams):
            assert b'"finish_reason":"length"' in answer and b"error" not in answer
        health = server.http.get("/health").json()
        assert health["status"] == "restarting" and sorted(health["hosts"]) == ["h3"]
        cause = health["restarting_replicas"][str(lost)]
        assert "host h2 has gone" in cause or "the engine core has ended" in cause
        assert server.metrics()['sidestep:replica_restarts_total{cause="host"}'] == 1
        nodes.start(2)
        until(lambda: server.http.get("/health").json()["status"] == "ok")
        assert server.http.get("/health").json()["hosts"]["h2"] == [lost]


def test_the_commands_of_the_page_work_by_hand(tmp_path: Path) -> None:
    server, *nodes = (
        command.replace("invitation.json", str(tmp_path / "invitation")).replace(":7000", ":0")
        for command in commands("cluster.md")
        if command.startswith("sidestep") and "invitation.json" in command
    )
    with ExitStack() as stack:
        for command in nodes:
            words = [sys.executable, "-m", *command.split()]
            node = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": PYTHON_PATH})
            stack.callback(node.wait, END_S)
            stack.callback(node.kill)
        fake = {"SIDESTEP_DEVICE": "fake"}
        started = stack.enter_context(LiveServer(*server.split()[2:], environment=fake))
        hosts = started.http.get("/health").json()["hosts"]
        assert sorted(hosts) == ["h2", "h3"] and sorted(hosts.values()) == [[0], [1]]


def test_the_program_of_the_page_sees_its_hosts(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", text_of("cluster.md"), re.DOTALL)
    code = code.replace("127.0.0.1:7000", "127.0.0.1:0").replace(
        'placer="join"', f'placer="join", device="fake", invitation_file={str(tmp_path / "i")!r}'
    )
    with closing(Nodes(tmp_path / "i")) as nodes:
        nodes.start(2)
        nodes.start(3)
        done = run(sys.executable, "-c", code + "llm.shutdown()\n", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "name='h2'" in done.stdout and "name='h3'" in done.stdout


def test_the_job_of_slurm_serves_on_all_its_nodes(tmp_path: Path, fake_model: str) -> None:
    """Run the job with a stand-in for srun, which starts two tasks on this machine."""
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/bash\nshift\n"$@" --name h2 --address 127.0.0.2 &\n'
        '"$@" --name h3 --address 127.0.0.3 &\nwait\n'
    )
    sidestep = tmp_path / "sidestep"
    sidestep.write_text(f'#!/bin/bash\nexec {sys.executable} -m sidestep "$@"\n')
    for program in (srun, sidestep):
        program.chmod(0o755)
    job = (ROOT / "deploy" / "slurm" / "sidestep.sbatch").read_text()
    job = job.replace("--port 8000", "--port 0").replace(":7000", ":0")
    environment = {
        **os.environ,
        "PYTHONPATH": PYTHON_PATH,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "HEAD_ADDRESS": "127.0.0.1",
        "MODEL": fake_model,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SIDESTEP_DEVICE": "fake",
    }
    process = subprocess.Popen(
        ["bash", "-c", job], env=environment, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        served = next(line for line in process.stderr if "serving " in line)
        (url,) = re.findall(r"serving \S+ at (\S+)", served)
        hosts = httpx2.get(f"{url}/health").json()["hosts"]
        assert sorted(hosts) == ["h2", "h3"]
        for child in psutil.Process(process.pid).children():
            if "serve" in child.cmdline():
                child.terminate()
        process.stderr.read()
    assert process.returncode == 0


def test_the_manifest_starts_a_head_and_nodes() -> None:
    made = yaml.safe_load((DEPLOY / "leaderworkerset" / "sidestep.yaml").read_text())
    template = made["spec"]["leaderWorkerTemplate"]
    (head,) = template["leaderTemplate"]["spec"]["containers"]
    (node,) = template["workerTemplate"]["spec"]["containers"]
    words = [word.replace("$(POD_IP)", "10.0.0.1") for word in head["args"]]
    server = EngineArgs.from_cli_args(parsed(words))
    assert server.placer == "join" and server.data_parallel_size == template["size"] - 1
    words = [word.replace("$(LWS_LEADER_ADDRESS)", "llm-0") for word in node["args"]]
    options = NodeOptions(**option_values(parsed(words), NodeOptions))
    assert options.head == "llm-0:7000" and options.head_key_file == server.head_key_file
    (mount,) = (each for each in node["volumeMounts"] if each["name"] == "key")
    assert str(server.head_key_file).startswith(mount["mountPath"])
    assert template["restartPolicy"] == "None"
    page = text_of("cluster.md")
    for name in ("llm-head-key", "llm-keys"):
        assert name in page


def address_in(invitation: str) -> tuple[str, int]:
    """Return the head's address in an invitation."""
    host, _, port = json.loads(invitation)["head"].rpartition(":")
    return host, int(port)
