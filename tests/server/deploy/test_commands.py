"""The other programs' commands on the page about operations name files and options that exist."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from tests import pages
from tests.processes import ROOT, run
from tests.server.deploy.files import containerfile, manifests, parsed, unit
from tests.server.live import LiveServer

COMMANDS = list(pages.commands("operations.md"))


def only(begin: str) -> list[list[str]]:
    """Return the words of the commands that begin so."""
    found = [shlex.split(command) for command in COMMANDS if command.startswith(begin)]
    assert found
    return found


def test_the_image_is_built_from_the_recipe_with_arguments_that_it_has() -> None:
    known = {text.split("=")[0] for name, text in containerfile() if name == "ARG"}
    for words in only("docker build"):
        assert (ROOT / words[words.index("-f") + 1]).is_file()
        given = [words[i + 1] for i, word in enumerate(words) if word == "--build-arg"]
        assert {argument.split("=")[0] for argument in given} <= known


def test_the_image_is_run_with_the_options_that_its_kernels_were_compiled_for() -> None:
    ((*_, build),) = [[words] for words in only("docker build") if "--build-arg" in words]
    options = next(word for word in build if word.startswith("ENGINE_OPTIONS=")).partition("=")[2]
    (words,) = only("docker run")
    command = words[words.index("serve") :]
    assert f"MODEL={parsed(command).model_argument}" in build
    assert options in shlex.join(command)
    volume = words[words.index("-v") + 1].partition(":")[2]
    assert volume == next(text for name, text in containerfile() if name == "VOLUME")


def test_the_unit_is_installed_as_the_page_shows(tmp_path: Path) -> None:
    lines = [line for line in COMMANDS if line.startswith("install ")]
    assert len(lines) == 2
    for line in lines:
        subprocess.run(
            ["bash", "-c", line.replace(" /etc/", f" {tmp_path}/etc/")], cwd=ROOT, check=True
        )
    installed = tmp_path / "etc" / "systemd" / "system" / "sidestep.service"
    assert installed.read_text() == (ROOT / "deploy/systemd/sidestep.service").read_text()
    variables = tmp_path / "etc" / "sidestep" / "environment"
    assert str(variables).endswith(unit()["Service"]["EnvironmentFile"].removeprefix("-"))
    assert variables.stat().st_mode & 0o777 == 0o600
    name, _, model = variables.read_text().strip().partition("=")
    assert (name, model) == ("SIDESTEP_MODEL", "/srv/models/qwen3")


def test_the_client_of_the_page_streams(tiny: LiveServer) -> None:
    (words,) = only("python examples/")
    done = run(sys.executable, *(word.replace(pages.URL, tiny.url) for word in words[1:]), cwd=ROOT)
    assert done.returncode == 0 and len(done.stdout) > 20, done.stderr


def test_the_secret_is_the_one_that_the_pod_reads() -> None:
    (words,) = only("kubectl create secret")
    (container,) = manifests()["Deployment"]["spec"]["template"]["spec"]["containers"]
    wanted = container["env"][0]["valueFrom"]["secretKeyRef"]
    assert wanted["name"] in words
    assert f"--from-literal={wanted['key']}=KEY" in words
    (words,) = only("kubectl apply")
    assert (ROOT / words[-1]).is_dir()
