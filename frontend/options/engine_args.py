"""EngineArgs, the flat form of the engine's options, and its flags.

EngineArgs inherits the fields of every section (ipc/config_sections.py), so an option is written
once. `EngineArgs.create_engine_config()` splits it into `EngineConfig` (ipc/config.py); each
component gets only its own section.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from sidestep.frontend.input.tokenizer_files import tokenizer_folder
from sidestep.frontend.options.head_tokens import with_head_tokens
from sidestep.frontend.options.option_flags import add_option_flags, option_values
from sidestep.frontend.vllm.vllm_flags import add_vllm_flags, vllm_values
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.common.logs import LogConfig
from sidestep.ipc.config import EngineConfig, with_whole_experts
from sidestep.ipc.config_sections import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from sidestep.ipc.frontend_config import FrontendConfig
from sidestep.ipc.model.generation_config import read_tokenizer_eos
from sidestep.ipc.model.kv.kv_cache_dtype import with_kv_cache_dtype
from sidestep.ipc.model.model_spec import (
    MODEL_FILES,
    TOKENIZER_FILES,
    load_model_spec,
    resolve_model_path,
)
from sidestep.ipc.placement_config import PlacementConfig
from sidestep.ipc.ray_config import RayConfig
from sidestep.ipc.scaling_config import ScalingConfig
from sidestep.ipc.vllm.options import ENGINE_OPTIONS, takes_vllm_options

_WITHOUT_WEIGHTS = ("config.json", *TOKENIZER_FILES)
"""Patterns of the files that say how a model computes."""
T = TypeVar("T")
CommandLine = TypeVar("CommandLine", bound=argparse.ArgumentParser)


@takes_vllm_options
@dataclass(frozen=True)
class EngineArgs(
    LogConfig,
    FrontendConfig,
    RayConfig,
    PlacementConfig,
    ScalingConfig,
    ParallelConfig,
    SchedulerConfig,
    CacheConfig,
    ModelConfig,
):
    """Every option of the engine as one flat set of keyword arguments.

    Each option is also a flag of a command line. vLLM's names of options are accepted too. Raises
    ValidationError, which names the option.
    """

    def _section(self, cls: type[T]) -> T:
        return cls(**{f.name: getattr(self, f.name) for f in fields(cls)})  # type: ignore[arg-type]

    def create_engine_config(self, *, with_weights: bool = True) -> EngineConfig:
        """Find and read the model's config.json, check everything, and return the sections.

        with_weights: fetch the weights too where the model is on a hub. Raises ValidationError or
        EngineStartError.
        """
        files = MODEL_FILES if with_weights else _WITHOUT_WEIGHTS
        path = resolve_model_path(self.model, self.revision, files)
        tokenizer_path = self._tokenizer_path(path)
        generation = self.read_generation_config(path)
        eos = read_tokenizer_eos(tokenizer_path) if tokenizer_path is not None else ()
        spec = load_model_spec(
            path,
            self.hf_overrides,
            generation,
            eos,
            runner=self.runner,
            pooler=self.pooler_config,
            quantization=self.quantization,
            head_quantization=self.head_quantization,
        )
        if self.enable_expert_parallel:
            spec = with_whole_experts(spec)
        spec = with_kv_cache_dtype(spec, self.kv_cache_dtype, self.kv_cache_dtype_skip_layers)
        return EngineConfig(
            model=self._section(ModelConfig),
            cache=self._section(CacheConfig),
            scheduler=self._section(SchedulerConfig),
            parallel=self._section(ParallelConfig),
            frontend=self._section(FrontendConfig),
            placement=self._section(PlacementConfig),
            scaling=self._section(ScalingConfig),
            ray=self._section(RayConfig),
            spec=with_head_tokens(spec, tokenizer_path),
            tokenizer_path=tokenizer_path,
            chat_template=self._chat_template_source(),
            sampling_defaults=generation.sampling,
            logs=self._section(LogConfig),
        )

    def _tokenizer_path(self, path: str) -> str | None:
        """Return the folder of the tokenizer's tokenizer.json; None without a tokenizer.

        path: the model's folder.
        """
        if self.skip_tokenizer_init:
            return None
        return tokenizer_folder(self._tokenizer_source(path), self.tokenizer_mode)

    def _chat_template_source(self) -> str | None:
        if self.chat_template is None:
            return None
        from sidestep.frontend.input.chat_template import read_chat_template  # imports jinja2

        return read_chat_template(self.chat_template)

    def _tokenizer_source(self, path: str) -> str:
        if self.tokenizer is None:
            return path
        try:
            return resolve_model_path(self.tokenizer, files=TOKENIZER_FILES)
        except EngineStartError as error:
            # The message begins with the option's name, and the option is not the model here.
            raise EngineStartError(f"tokenizer: {str(error).partition(': ')[2]}") from None

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some options changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def add_cli_args(cls, parser: CommandLine) -> CommandLine:
        """Add a flag for each option to a parser, and return the parser.

        A flag that is not given sets no attribute, so `LLM(**vars(parser.parse_args()))` has the
        defaults of LLM.
        """
        add_option_flags(parser.add_argument_group("engine options"), cls)
        add_vllm_flags(parser, ENGINE_OPTIONS)
        return parser

    @classmethod
    def from_cli_args(cls, parsed: argparse.Namespace) -> Self:
        """Return the options of a parser with these flags.

        The parser may have other flags too. Raises ValidationError.
        """
        return cls(**engine_options(parsed))


def engine_options(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options that were given, by name."""
    model = getattr(parsed, "model_argument", None)
    given = option_values(parsed, EngineArgs) | vllm_values(parsed, ENGINE_OPTIONS)
    if model is not None:
        given["model"] = model
    return given
