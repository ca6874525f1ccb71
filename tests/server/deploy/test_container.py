"""The image of a container: its command, its user, its files and its start."""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

import httpx2

from tests.processes import ROOT, run
from tests.server.deploy.files import (
    DEPLOY,
    containerfile,
    metrics_url,
    on_this_machine,
    parsed,
    server_of,
)
from tests.server.live import LiveServer

START = DEPLOY / "container" / "start.sh"


def last(instruction: str) -> str:
    return [arguments for name, arguments in containerfile() if name == instruction][-1]


def variables() -> dict[str, str]:
    """Return the variables of the image's processes."""
    return dict(word.split("=", 1) for word in shlex.split(last("ENV")))


def test_the_command_of_the_image_serves(make_server: Callable[..., LiveServer]) -> None:
    words = json.loads(last("CMD"))
    args = server_of(words)
    assert last("EXPOSE").split() == [str(args.port), str(args.metrics_port)]
    server = make_server(*on_this_machine(words))
    assert httpx2.get(f"{metrics_url(server)}/ready").status_code == 200
    assert server.close() == 0


def test_the_image_compiles_kernels_for_the_model_and_the_options_that_it_is_built_with() -> None:
    (command,) = [text for name, text in containerfile() if "compile-kernels" in text]
    command = command.partition("&& sidestep")[2].partition("&&")[0]
    defaults = dict(
        shlex.split(text)[0].split("=", 1) for name, text in containerfile() if name == "ARG"
    )

    def built_with(**given: str) -> list[str]:
        text = command
        for name, value in (defaults | given).items():
            text = text.replace(f"${{{name}}}", value)
        assert "$" not in text
        return shlex.split(text)

    plain = parsed(built_with())
    assert plain.capability == 90 and getattr(plain, "model_argument", None) is None
    other = parsed(built_with(MODEL="Qwen/Qwen3-0.6B", ENGINE_OPTIONS="-tp 2 --max-num-seqs 64"))
    assert other.model_argument == "Qwen/Qwen3-0.6B" and other.tensor_parallel_size == 2


def test_the_server_is_no_root_and_writes_to_the_cache_alone() -> None:
    names = [name for name, _ in containerfile()]
    user = last("USER")
    assert user == "10001:10001"
    assert names.index("USER") < names.index("ENTRYPOINT")
    folders = {"XDG_CACHE_HOME", "TRITON_CACHE_DIR", "HF_HOME", "HOME", "TMPDIR"}
    assert folders == variables().keys()
    assert all(Path(folder).is_relative_to(last("VOLUME")) for folder in variables().values())


def test_what_the_image_copies_is_there() -> None:
    for name, arguments in containerfile():
        if name == "COPY" and "--from" not in arguments:
            source = [word for word in arguments.split() if not word.startswith("--")][0]
            assert (ROOT / source).exists(), source


def start(tmp_path: Path, *words: str) -> str:
    """Run the start of the image with a program that prints its arguments."""
    program = tmp_path / "bin" / "sidestep"
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\necho "$$" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = run(
        START,
        *words,
        env={
            **os.environ,
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "TMPDIR": str(tmp_path / "cache" / "tmp"),
            "TRITON_CACHE_DIR": str(tmp_path / "cache" / "triton"),
            "KERNELS_OF_IMAGE": str(tmp_path / "kernels"),
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_new_cache_volume_gets_the_kernels_of_the_image(tmp_path: Path) -> None:
    kernels, cache = tmp_path / "kernels", tmp_path / "cache" / "triton"
    (kernels / "one").mkdir(parents=True)
    (kernels / "one" / "kernel.json").write_text("of the image")
    (kernels / "sidestep-note.json").write_text("[]")
    said = start(tmp_path, "serve", "--host", "two words")
    assert said.split(maxsplit=1)[1] == "serve --host two words\n"
    assert (cache / "one" / "kernel.json").read_text() == "of the image"
    assert (cache / "sidestep-note.json").read_text() == "[]"
    # A cache that has them, and others, is left as it is, and gets those of a newer image.
    (cache / "one" / "kernel.json").write_text("of the volume")
    (cache / "own").mkdir()
    (kernels / "two").mkdir()
    start(tmp_path, "serve")
    assert (cache / "one" / "kernel.json").read_text() == "of the volume"
    assert sorted(path.name for path in cache.iterdir()) == [
        "one",
        "own",
        "sidestep-note.json",
        "two",
    ]
    assert (tmp_path / "cache" / "tmp").is_dir()


def test_an_image_without_kernels_starts(tmp_path: Path) -> None:
    assert start(tmp_path, "generate").endswith("generate\n")
