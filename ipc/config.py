"""Configuration: the sections together, checked against each other, and the environment.

The sections are in ipc/config_sections.py; users give their options in one flat form, EngineArgs.
Nothing here starts a process: an impossible combination fails before there is one. No other module
reads environment variables.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sidestep.ipc.common.logs import LogConfig
from sidestep.ipc.common.options import require
from sidestep.ipc.config_sections import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from sidestep.ipc.frontend_config import FrontendConfig
from sidestep.ipc.model.layer_spec import ExpertsSpec
from sidestep.ipc.model.layer_split import why_one_stage
from sidestep.ipc.model.model_spec import ModelSpec
from sidestep.ipc.placement_config import PlacementConfig
from sidestep.ipc.ray_config import RayConfig
from sidestep.ipc.scaling_config import ScalingConfig
from sidestep.ipc.step_limits import StepLimits


def check_tensor_parallel(spec: ModelSpec, size: int) -> None:
    """Raise ValidationError if a model cannot be divided among `size` ranks."""
    for one in spec.divided:
        states = "neither divides nor is divided by" if one.may_repeat else "does not divide"
        require(
            one.fits(size),
            "tensor_parallel_size",
            f"{size} {states} the model's {one.count} {one.name}",
        )


def with_whole_experts(spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model whose ranks have whole experts, not a part of each.

    Raises ValidationError for a model without experts.
    """
    replace = msgspec.structs.replace
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, whole=True))
        if isinstance(layer.mlp, ExpertsSpec)
        else layer
        for layer in spec.layers
    )
    require(layers != spec.layers, "enable_expert_parallel", "the model has no experts")
    return replace(spec, layers=layers)


@dataclass(frozen=True)
class EngineConfig:
    """All sections, checked against each other and against the model."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    frontend: FrontendConfig
    spec: ModelSpec
    """Contents of the model's config.json; its `path` is a local folder."""
    placement: PlacementConfig = PlacementConfig()
    scaling: ScalingConfig = ScalingConfig()
    ray: RayConfig = RayConfig()
    logs: LogConfig = LogConfig()
    tokenizer_path: str | None = None
    """The tokenizer's local folder; None without a tokenizer (skip_tokenizer_init)."""
    chat_template: str | None = None
    """Source of the chat template in place of the model's own."""
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    """Sampling parameters for requests that leave them out."""

    def __post_init__(self) -> None:
        spec, tp = self.spec, self.parallel.tensor_parallel_size
        limit, wanted = spec.max_position_embeddings, self.model.max_model_len
        if isinstance(wanted, int):
            require(
                wanted <= limit,
                "max_model_len",
                f"{wanted} is more than the model's {limit} positions",
            )
        check_tensor_parallel(spec, tp)
        self.scaling.check(
            self.parallel.data_parallel_size, scales=self.parallel.max_replicas is not None
        )
        if spec.pooling is not None:
            for name, value in (
                ("speculative_config", self.scheduler.speculative_config),
                ("logits_processors", self.model.logits_processors),
            ):
                require(not value, name, "has no meaning with runner 'pooling': no text is made")
        pp, layers = self.parallel.pipeline_parallel_size, self.parallel.pipeline_layers
        require(
            pp <= spec.num_layers,
            "pipeline_parallel_size",
            f"{pp} is more than the model's {spec.num_layers} layers",
        )
        reason = why_one_stage(spec)
        require(
            pp == 1 or reason is None,
            "pipeline_parallel_size",
            f"{pp} is not supported for this model, since {reason}; supported is 1",
        )
        require(
            layers is None or sum(layers) == spec.num_layers,
            "pipeline_layers",
            f"{layers} have {sum(layers or ())} layers, the model has {spec.num_layers}",
        )
        if self.placement.placer != "ray":
            for name in self.ray.given():
                require(False, name, f"has no meaning with placer {self.placement.placer!r}")

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output before the size of the KV cache is known."""
        wanted = self.model.max_model_len
        return wanted if isinstance(wanted, int) else self.spec.max_position_embeddings

    def limits(self, device: str) -> StepLimits:
        """Return the limits of steps on a device; see SchedulerConfig.limits."""
        stages = self.parallel.pipeline_parallel_size
        return self.scheduler.limits(device, stages, self.spec.layers)

    @property
    def may_shrink_max_model_len(self) -> bool:
        """Whether a length that does not fit in the KV cache is lowered, rather than refused."""
        return not isinstance(self.model.max_model_len, int)


ENVIRONMENT_PREFIX = "SIDESTEP_"
"""Beginning of the environment variables that are options of the command line."""
API_KEYS, OPERATOR_KEYS = f"{ENVIRONMENT_PREFIX}API_KEYS", f"{ENVIRONMENT_PREFIX}OPERATOR_KEYS"
"""Environment variables with the server's keys."""
_KEYS_VARIABLES = (API_KEYS, OPERATOR_KEYS)
_SERVICE_LINK = re.compile(
    r"SIDESTEP_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
"""Variables that Kubernetes sets in each pod if a service's name begins with 'sidestep'."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface."""


def environment_options() -> dict[str, str]:
    """Return the environment variables that set options. An empty one sets nothing."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
        and value
        and name not in _KEYS_VARIABLES
        and not _SERVICE_LINK.fullmatch(name)
        and not re.match("(tcp|udp|sctp)://", value)
    }


def keys_of_environment(variable: str) -> list[str]:
    """Return the server's keys in API_KEYS or OPERATOR_KEYS, separated by commas or white space.

    Raises ValidationError for a variable that is set and holds no key: a server without keys would
    be open.
    """
    if (text := os.environ.get(variable)) is None:
        return []
    keys = text.replace(",", " ").split()
    require(bool(keys), variable, "is set and holds no key; unset it to go without")
    return keys


def state_folder_of_environment() -> Path | None:
    """Return the folder for this user's own files, such as the history of `sidestep chat`.

    None without a home folder.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):  # the XDG specification ignores relative ones
        return Path(base) / "sidestep"
    home = os.path.expanduser("~")
    return Path(home, ".local", "state", "sidestep") if os.path.isabs(home) else None


def cache_folder_of_environment() -> Path | None:
    """Return the folder for files that can be made again. None without a home folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification ignores relative ones
        return Path(base) / "sidestep"
    home = os.path.expanduser("~")
    return Path(home, ".cache", "sidestep") if os.path.isabs(home) else None


def colours_of_environment() -> bool:
    """Return whether a terminal may have colours.

    It has none with NO_COLOR, and none if the terminal is dumb.
    """
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def service_manager_of_environment() -> tuple[str | None, float | None]:
    """Return the address for messages to a service manager, and its watchdog's time in seconds.

    Either is None where there is none. A watchdog of another process does not count.
    """
    told, of = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    is_ours = told.isdecimal() and int(told) > 0 and of in ("", str(os.getpid()))
    return os.environ.get("NOTIFY_SOCKET") or None, int(told) / 1e6 if is_ours else None


def triton_environment() -> dict[str, str]:
    """Return the environment variables with which a user configures Triton."""
    return {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}


def visible_gpus_of_environment() -> list[str] | None:
    """Return the GPUs that CUDA programs may see, by number or UUID; None for all."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def ray_address_of_environment() -> str | None:
    """Return the address by which Ray tells its programs of their cluster; None without one."""
    return os.environ.get("RAY_ADDRESS") or None


def tell_ray_to_send_no_statistics() -> None:
    """Let a Ray cluster that this process starts send no statistics, unless the user wants it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def exact_products_environment() -> dict[str, str]:
    """Return the variables that make MKL add in an order that does not depend on a product's sizes.

    MKL reads them when it is loaded. They select its strict mode of conditional numerical
    reproducibility, which it has for AVX2 and AVX-512. A mode that the user has chosen stays.
    """
    if chosen := os.environ.get("MKL_CBWR"):
        return {"MKL_CBWR": chosen}
    try:
        with open("/proc/cpuinfo") as file:
            wide = "avx512f" in file.read()
    except OSError:
        wide = False
    return {"MKL_CBWR": "AVX512,STRICT" if wide else "AVX2,STRICT"}


def interface_environment(address: str | None) -> dict[str, str]:
    """Return the variables that make torch's messages between hosts use an address's interface.

    An interface that the user has chosen stays. Without an address there is nothing to choose.
    """
    interface = None if address is None else _interface_of(address)
    if interface is None:
        return {}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name) or interface for name in names}


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface with an IPv4 address; None if it is not found."""
    if address.startswith("127."):  # the loopback interface has all of these
        address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                told = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(told[20:24]) == address:
                return name
    return None


def available_cores() -> int:
    """Return the number of cores this process may run on.

    In a container it is often smaller than the machine's.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
