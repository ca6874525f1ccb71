"""The options of `sidestep serve`, declared in one module like those of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.options import Options, option, parse_bytes
from sidestep.ipc.common.registry import REASONING_PARSERS, TOOL_PARSERS
from sidestep.ipc.config import API_KEYS, OPERATOR_KEYS, keys_of_environment
from sidestep.ipc.config_sections import DEFAULT_MODEL


@dataclass(frozen=True)
class ServerArgs(Options):
    """Options of the HTTP server.

    Raises ValidationError, which names the option.
    """

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 for all of IPv4.")
    port: int = option(8000, "Port to listen at; 0 takes a free one.")
    metrics_port: int | None = option(
        None,
        "Further port of the same address for /metrics, /health and /ready, which need neither a "
        "key nor HTTPS there; 0 takes a free one.",
    )
    metrics_compat: str | None = option(
        None,
        "Engine under whose prefix /metrics repeats the gauges that endpoint pickers read.",
        choices=("vllm",),
    )
    served_model_name: list[str] | None = option(
        None, "Name of the model in requests, instead of the name that it is loaded by."
    )
    api_key_file: str | None = option(
        None,
        "File with the keys that requests must bring, one a line; those of SIDESTEP_API_KEYS count "
        "too.",
    )
    operator_key_file: str | None = option(
        None,
        "File with keys, one a line, that open all routes and also show the figures and requests "
        "of all users; those of SIDESTEP_OPERATOR_KEYS count too.",
    )
    public_prefixes: str | None = option(
        None,
        "File with prompts' beginnings whose cached blocks users of different keys share; see "
        "docs/server.md.",
    )
    ssl_certfile: str | None = option(None, "Certificate chain: serve HTTPS.")
    ssl_keyfile: str | None = option(
        None, "Private key of --ssl-certfile, where it is a file of its own."
    )
    ssl_ca_certs: str | None = option(None, "Certificates of which a client must bring one.")
    allowed_origins: list[str] | None = option(
        None, "Origin, such as https://chat.example, whose pages may call this server; '*' for any."
    )
    allowed_hosts: list[str] | None = option(
        None,
        "Host name that a server without keys accepts, beside those of this machine; '*' for any.",
    )
    api_server_count: int = option(
        1,
        "Processes that take requests and make answers, on one engine and one socket; for loads "
        "that the Python of one cannot keep up with.",
    )
    max_body_bytes: int = option(16 << 20, "Largest request body, such as 16M.", parse=parse_bytes)
    read_timeout: float = option(
        30.0, "Seconds that a client may take to send a request's headers, and its body."
    )
    access_log: bool = option(
        False, "Log each request: client, route, status, duration and request id."
    )
    stream_comments: float = option(
        10.0,
        "Seconds between the comments that a stream gets while its request waits for its first "
        "token, so that no proxy takes the connection for dead; 0: none.",
    )
    drain_grace: float = option(
        0.0,
        "Seconds after SIGTERM in which new requests are still taken while /ready answers 503, so "
        "that load balancers notice before a request is refused.",
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get to end after SIGTERM and --drain-grace."
    )
    tool_call_parser: str | None = option(
        None,
        "How the model writes tool calls; without it requests with tools are refused.",
        choices=tuple(TOOL_PARSERS),
    )
    reasoning_parser: str | None = option(
        None,
        "How the model writes its reasoning, which is then separated from its answer.",
        choices=tuple(REASONING_PARSERS),
    )

    otlp_traces_endpoint: str | None = option(
        None,
        "URL that spans of requests are sent to by OTLP over HTTP, such as "
        "http://127.0.0.1:4318/v1/traces; needs the extra 'otel'.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(0 <= self.port < 1 << 16, "port", f"must be between 0 and 65535, not {self.port}")
        metrics = self.metrics_port
        _require(
            metrics is None or (0 <= metrics < 1 << 16 and metrics != (self.port or None)),
            "metrics_port",
            f"must be between 0 and 65535 and not the port of requests, not {metrics}",
        )
        _require(self.api_server_count >= 1, "api_server_count", "must be at least 1")
        _require(self.max_body_bytes >= 1, "max_body_bytes", "must be at least 1")
        _require(self.read_timeout > 0, "read_timeout", "must be above 0")
        _require(self.stream_comments >= 0, "stream_comments", "must not be negative")
        _require(self.drain_grace >= 0, "drain_grace", "must not be negative")
        _require(self.shutdown_timeout >= 0, "shutdown_timeout", "must not be negative")
        _require(
            self.ssl_certfile is not None
            or (self.ssl_keyfile is None and self.ssl_ca_certs is None),
            "ssl_certfile",
            "is needed to serve HTTPS",
        )
        endpoint = self.otlp_traces_endpoint
        _require(
            endpoint is None or endpoint.startswith(("http://", "https://")),
            "otlp_traces_endpoint",
            f"{endpoint!r} is no URL, such as http://127.0.0.1:4318/v1/traces",
        )
        for origin in self.allowed_origins or ():
            _require(
                origin == "*" or "://" in origin,
                "allowed_origins",
                f"{origin!r} is no origin, such as https://chat.example",
            )

    def model_names(self, model: str) -> tuple[str, ...]:
        """Return the names that requests may use for the model that is loaded as `model`.

        Answers use the first of them.
        """
        if self.served_model_name:
            return tuple(self.served_model_name)
        return (Path(DEFAULT_MODEL).name if model == DEFAULT_MODEL else model,)


@dataclass(frozen=True)
class Keys:
    """The keys that a server accepts; without any key every route is open."""

    all: tuple[str, ...] = ()
    """Keys of users and operators that open the routes, each once."""
    operators: tuple[str, ...] = ()
    """Keys that show the figures and requests of all users."""


def read_keys(args: ServerArgs) -> Keys:
    """Return the keys of the files and the environment.

    Raises ValidationError for a file or variable that holds none.
    """
    users = keys_of_environment(API_KEYS) + _keys_of_file("api_key_file", args.api_key_file)
    operators = keys_of_environment(OPERATOR_KEYS) + _keys_of_file(
        "operator_key_file", args.operator_key_file
    )
    if both := set(users) & set(operators):
        raise ValidationError(
            "operator_key_file", f"{len(both)} of the operators' keys are users' keys too"
        )
    return Keys(tuple(dict.fromkeys(users + operators)), tuple(dict.fromkeys(operators)))


def _keys_of_file(option: str, file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(option, f"{file} cannot be read: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    _require(bool(keys), option, f"{file} holds no key")
    return keys


def _require(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ValidationError(name, problem)
