"""Flags of the commands, and the options that a command line has given."""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import textwrap
import typing
from dataclasses import fields
from functools import cache
from typing import Any

import msgspec

from sidestep.frontend.options.engine_args import EngineArgs, engine_options
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.options.option_flags import (
    add_flag,
    add_option_flags,
    flag_type,
    option_values,
    telling,
)
from sidestep.frontend.options.option_parser import is_of_environment
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.frontend.vllm.vllm_flags import add_vllm_flags, vllm_values
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.options import parse_bytes, value_types
from sidestep.ipc.params.sampling_params import SamplingParams
from sidestep.ipc.processes.kernel_job import PROCESSORS
from sidestep.ipc.vllm.foreign import translate
from sidestep.ipc.vllm.options import ENGINE_OPTIONS, SERVER_OPTIONS

_SAMPLING_FLAGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "temperature_last",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "include_stop_str_in_output",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_TOPOLOGY_FLAGS = (
    "dtype",
    "revision",
    "max_model_len",
    "hf_overrides",
    "quantization",
    "head_quantization",
    "gpu_memory_utilization",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "enable_expert_parallel",
)
_BATCH_FLAGS = ("served_model_name", "max_body_bytes", "tool_call_parser", "reasoning_parser")


def add_engine_flags(
    parser: argparse.ArgumentParser, *, positional_model: bool, samples: bool = False
) -> None:
    """Add a flag for every field of EngineArgs.

    positional_model: the command takes the model as a positional argument too. samples: the command
    has flags for the sampling parameters, and `--seed` is one of them.
    """
    group = parser.add_argument_group("engine options")
    if positional_model:
        parser.add_argument(
            "model_argument",
            nargs="?",
            metavar="MODEL",
            help="folder or hub name of the model (default: the bundled one)",
        )
    add_option_flags(
        group, EngineArgs, {f.name for f in fields(EngineArgs)} - {"seed"} if samples else None
    )
    add_vllm_flags(parser, ENGINE_OPTIONS)


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of ServerArgs."""
    add_option_flags(parser.add_argument_group("server options"), ServerArgs)
    add_vllm_flags(parser, SERVER_OPTIONS)


def server_args(parsed: argparse.Namespace) -> ServerArgs:
    """Return ServerArgs from the command line. Raises ValidationError."""
    given = option_values(parsed, ServerArgs) | vllm_values(parsed, SERVER_OPTIONS)
    return ServerArgs(**translate(given, SERVER_OPTIONS))


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sidestep run-batch`.

    These are its files, and the server's options that have a meaning without a socket.
    """
    parser.add_argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help='requests, one a line: {"custom_id", "method": "POST", "url", "body"}',
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="where the answers go as they come; requests that it has already are skipped",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=1024,
        metavar="N",
        help="at most this many requests at a time (default: 1024)",
    )
    add_option_flags(parser.add_argument_group("server options"), ServerArgs, _BATCH_FLAGS)


def add_eval_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of EvalArgs."""
    add_option_flags(parser.add_argument_group("measurements and limits"), EvalArgs)
    add_json_flag(parser)


def add_topology_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sidestep topology`.

    They describe a machine other than this one. After them come the engine's options that decide
    which sizes fit.
    """
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="folder or hub name of the model, of which only config.json is read (default: the "
        "bundled one)",
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="GPUs; those of this machine if not given"
    )
    parser.add_argument(
        "--gpu-memory", type=telling(parse_bytes), metavar="SIZE", help="of each, such as 141GiB"
    )
    parser.add_argument(
        "--bandwidth",
        type=telling(parse_bandwidth),
        metavar="SPEED",
        help="of each one's memory, such as 4800GB/s; known for many GPUs by their names",
    )
    add_json_flag(parser)
    add_option_flags(parser.add_argument_group("engine options"), EngineArgs, _TOPOLOGY_FLAGS)


def add_kernel_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `sidestep compile-kernels` that describe the GPU."""
    parser.add_argument(
        "--capability",
        type=int,
        required=True,
        choices=tuple(PROCESSORS),
        help="compute capability of the GPU, times ten: 90 for H100 and H200",
    )
    parser.add_argument(
        "--processors",
        type=int,
        metavar="N",
        help="streaming multiprocessors of the GPU (default: those of A100, L40S, H100 and H200 in "
        "their form for servers, or B200)",
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which means the same for every command with a result."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as JSON on standard output, instead of a table",
    )


def parse_bandwidth(text: str) -> float:
    """Return the bytes a second of a text such as '4800GB/s' or '4.8TB/s'.

    The units are powers of 1000.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([GT])B/s\s*", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is not a speed, such as 4800GB/s")
    return float(found[1]) * {"g": 1e9, "t": 1e12}[found[2].lower()]


def add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add flags for the sampling parameters; `defaults` are the command's own."""
    group = parser.add_argument_group("sampling options")
    kinds = value_types(SamplingParams)
    docs = _field_docs(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in _SAMPLING_FLAGS:
            default = defaults.get(field.name, field.default)
            add_flag(
                group,
                field.name,
                flag_type(kinds[field.name]),
                f"{docs[field.name]} (default: {default})",
                dest=_sampling_dest(field.name),
            )


def sampling_params(parsed: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Return SamplingParams with the options that were given."""
    return SamplingParams(**{**defaults, **sampling_values(parsed)})


def sampling_values(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options that were given, by name."""
    return {
        name: getattr(parsed, _sampling_dest(name))
        for name in _SAMPLING_FLAGS
        if hasattr(parsed, _sampling_dest(name))
    }


def _sampling_dest(name: str) -> str:
    """Return the attribute of a sampling flag. Both the engine and a request have a seed."""
    return "sampling_seed" if name == "seed" else name


def add_url_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for a server to ask instead of an engine in this process."""
    parser.add_argument(
        "--url",
        help="ask this server of the OpenAI API, such as http://127.0.0.1:8000, and start no "
        "engine; the model is one of its own (default: its first), sampling options that are not "
        "given are as it has them",
    )
    add_key_flag(parser)


def add_key_flag(group: argparse._ActionsContainer) -> None:
    """Add the flag for the key of the server at --url."""
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="key for --url; SIDESTEP_API_KEY keeps it out of the list of processes",
    )


def check_url_flags(parsed: argparse.Namespace) -> None:
    """Raise ValidationError for options that have a meaning only with --url, or only without."""
    if parsed.url is None:
        if parsed.api_key is not None and not is_of_environment(parsed, "api_key"):
            raise ValidationError("api_key", "has a meaning only with --url")
        return
    for name in engine_options(parsed):
        if name != "model" and not is_of_environment(parsed, name):
            raise ValidationError(
                name, "is for an engine that is started here; --url asks one that runs"
            )


@cache
def _field_docs(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a class, on one line."""
    body = typing.cast(
        ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    ).body
    docs: dict[str, str] = {}
    for statement, after in zip(body, body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the load of `sidestep bench serve`."""
    parser.add_argument("--num-prompts", type=int, default=200, help="requests (default: 200)")
    parser.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests a second; all at once if not given",
    )
    parser.add_argument(
        "--arrival",
        choices=("poisson", "fixed"),
        default="poisson",
        help="gaps between requests: at random, or all alike (default: poisson)",
    )
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="N",
        help="at most this many requests at a time; the next waits for one to end",
    )
    parser.add_argument(
        "--input-len",
        metavar="N or LOW:HIGH",
        help="tokens in each random prompt (default: 64:512)",
    )
    parser.add_argument(
        "--output-len",
        metavar="N or LOW:HIGH",
        help="tokens in each output to one (default: 32:128)",
    )
    parser.add_argument(
        "--dataset",
        metavar="FILE",
        help='requests instead of random ones: lines of {"prompt": text or ids, "output_len": N}',
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="outputs are as long as planned; not asked for otherwise (default: yes)",
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="what a good request keeps to; names: ttft, tpot, itl, e2e",
    )
    parser.add_argument(
        "--load-seed", type=int, default=0, help="of lengths, prompts and arrivals (default: 0)"
    )
    add_json_flag(parser)
    _add_server_flags(parser)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load on a server that runs already."""
    group = parser.add_argument_group("a server in place of an engine in this process")
    group.add_argument("--url", help="any server of the OpenAI API, like http://127.0.0.1:8000")
    add_key_flag(group)
    group.add_argument(
        "--served-model", metavar="NAME", help="default: the first that the server names"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="token ids of random prompts are below this (default: 1000)",
    )
    group.add_argument(
        "--max-retries",
        type=int,
        metavar="N",
        help="times that a request is sent again if the server has no room and says when it will "
        "(default: 3)",
    )
