"""The `sidestep` command."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from sidestep.frontend.options.flags import (
    add_batch_flags,
    add_engine_flags,
    add_eval_flags,
    add_http_flags,
    add_json_flag,
    add_kernel_flags,
    add_sampling_flags,
    add_serve_flags,
    add_topology_flags,
    add_url_flags,
)
from sidestep.frontend.options.node_options import NodeOptions
from sidestep.frontend.options.option_flags import add_option_flags, option_values
from sidestep.frontend.options.option_parser import OptionParser, check_variables, source_of
from sidestep.ipc.common import logs
from sidestep.ipc.common.errors import SidestepError, ValidationError
from sidestep.ipc.common.logs import LogConfig

_COMPLETE = "complete"
"""Another name of the command `generate`, under which other programs know it."""


def make_parser(version: str) -> OptionParser:
    """Return the parser of all commands with their flags."""
    parser = OptionParser(
        prog="sidestep", takes_options=False, description="Serves large language models."
    )
    parser.add_argument("--version", action="version", version=f"sidestep {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_chat(commands)
    _add_serve(commands)
    _add_run_batch(commands)
    _add_bench(commands)
    _add_eval(commands)
    _add_topology(commands)
    _add_compile_kernels(commands)
    _add_trace(commands)
    _add_node(commands)
    return parser


def _add_generate(commands: argparse._SubParsersAction[OptionParser]) -> None:
    generate = commands.add_parser(
        "generate", aliases=[_COMPLETE], help="complete prompts, streaming"
    )
    generate.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompts; the lines of standard input if none"
    )
    add_url_flags(generate)
    add_engine_flags(generate, positional_model=False, samples=True)
    add_sampling_flags(generate, max_tokens=64)


def _add_chat(commands: argparse._SubParsersAction[OptionParser]) -> None:
    chat = commands.add_parser("chat", help="chat in the terminal, streaming")
    chat.add_argument("--system", help="system message")
    add_url_flags(chat)
    add_engine_flags(chat, positional_model=True, samples=True)
    add_sampling_flags(chat, max_tokens=256)


def _add_serve(commands: argparse._SubParsersAction[OptionParser]) -> None:
    server = commands.add_parser("serve", help="serve the OpenAI API over HTTP")
    add_http_flags(server)
    add_engine_flags(server, positional_model=True)


def _add_run_batch(commands: argparse._SubParsersAction[OptionParser]) -> None:
    batch = commands.add_parser("run-batch", help="answer a file of requests of the OpenAI API")
    add_batch_flags(batch)
    add_engine_flags(batch, positional_model=True)


def _add_bench(commands: argparse._SubParsersAction[OptionParser]) -> None:
    bench = commands.add_parser("bench", takes_options=False, help="measure")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND")
    for name, text in (
        ("throughput", "tokens/s of many requests at once"),
        ("latency", "seconds for one batch, from the call to its last token"),
    ):
        kind = kinds.add_parser(name, help=text)
        kind.add_argument(
            "--input-len", type=int, default=64, help="tokens in each prompt (default: 64)"
        )
        kind.add_argument(
            "--output-len", type=int, default=128, help="tokens in each output (default: 128)"
        )
        if name == "throughput":
            kind.add_argument("--num-prompts", type=int, default=64, help="requests (default: 64)")
        else:
            kind.add_argument(
                "--batch-size", type=int, default=8, help="requests at once (default: 8)"
            )
            kind.add_argument(
                "--num-iters", type=int, default=5, help="batches that count (default: 5)"
            )
        add_json_flag(kind)
        add_engine_flags(kind, positional_model=True)
    serve = kinds.add_parser("serve", help="latencies of a stream of requests")
    add_serve_flags(serve)
    add_engine_flags(serve, positional_model=True)


def _add_eval(commands: argparse._SubParsersAction[OptionParser]) -> None:
    evaluation = commands.add_parser(
        "eval", help="measure a model's quality, alone or against a reference"
    )
    add_eval_flags(evaluation)
    add_engine_flags(evaluation, positional_model=True)


def _add_topology(commands: argparse._SubParsersAction[OptionParser]) -> None:
    add_topology_flags(
        commands.add_parser(
            "topology", help="what this machine has, and which parallel sizes fit a model"
        )
    )


def _add_compile_kernels(commands: argparse._SubParsersAction[OptionParser]) -> None:
    kernels = commands.add_parser(
        "compile-kernels", help="compile an engine's kernels for a GPU that need not be here"
    )
    add_kernel_flags(kernels)
    add_engine_flags(kernels, positional_model=True)


def _add_trace(commands: argparse._SubParsersAction[OptionParser]) -> None:
    trace = commands.add_parser(
        "trace", help="run a load and write what the engine did, for Perfetto"
    )
    trace.add_argument(
        "--output", metavar="FILE", default="trace.json", help="the file (default: trace.json)"
    )
    trace.add_argument(
        "--crash",
        metavar="FILE",
        help="start no engine, and tell what this file of a replica's death has",
    )
    trace.add_argument("--num-prompts", type=int, default=16, help="requests (default: 16)")
    trace.add_argument(
        "--input-len", type=int, default=64, help="tokens in each prompt (default: 64)"
    )
    trace.add_argument(
        "--output-len", type=int, default=64, help="tokens in each output (default: 64)"
    )
    add_engine_flags(trace, positional_model=True)


def _add_node(commands: argparse._SubParsersAction[OptionParser]) -> None:
    node = commands.add_parser(
        "node", help="lend this host to an engine on another (--placer join)"
    )
    add_option_flags(node.add_argument_group("options of the host"), NodeOptions)
    add_option_flags(node.add_argument_group("log"), LogConfig)


def main(argv: Sequence[str] | None = None, version: str = "") -> int:
    """Run a command, and return its exit status.

    An error that the user can mend is one line on standard error.
    """
    try:
        parser = make_parser(version)
        parsed = parser.parse_args(argv)
        check_variables(parser)
        logs.begin(LogConfig(**option_values(parsed, LogConfig)), parsed.command)
        if parsed.command in ("generate", _COMPLETE):
            from sidestep.frontend.cli.generate import run_generate as run
        elif parsed.command == "chat":
            from sidestep.frontend.cli.chat import run_chat as run
        elif parsed.command == "serve":
            from sidestep.frontend.cli.serve import run_serve

            return run_serve(parsed, version)
        elif parsed.command == "run-batch":
            from sidestep.frontend.cli.run_batch import run_run_batch as run
        elif parsed.command == "eval":
            from sidestep.frontend.evaluation.command import run_eval as run
        elif parsed.command == "topology":
            from sidestep.frontend.cli.topology_command import run_topology as run
        elif parsed.command == "compile-kernels":
            from sidestep.frontend.cli.compile_kernels import run_compile_kernels as run
        elif parsed.command == "node":
            from sidestep.frontend.placement.node.command import run_node as run
        elif parsed.command == "trace" and parsed.crash is not None:
            from sidestep.frontend.bench.crash_report import run_crash_report as run
        elif parsed.command == "trace":
            from sidestep.frontend.bench.trace_command import run_trace as run
        elif parsed.bench == "serve":
            from sidestep.frontend.bench.bench_serve import run_bench_serve as run
        else:
            from sidestep.frontend.bench.bench import run_bench as run
        return run(parsed)
    except BrokenPipeError:
        # The reader of the output has closed the pipe (`sidestep generate | head`). Output that is
        # still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (SidestepError, OSError) as error:
        source = source_of(parsed, error.field) if isinstance(error, ValidationError) else None
        logs.tell(f"sidestep: {error}{f' ({source})' if source else ''}", logging.ERROR)
        return 1
    except KeyboardInterrupt:
        return 130
