"""Options of vLLM's engine and server that sidestep lacks, or has under another name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from sidestep.ipc.common.errors import UnknownNameError
from sidestep.ipc.common.options import did_you_mean
from sidestep.ipc.vllm.foreign import NO_IMAGES, NO_LORA, Foreign, translate

T = TypeVar("T")

_SPECULATION = (
    "is a key of speculative_config, such as speculative_config={'method': 'ngram', "
    "'num_speculative_tokens': 4}"
)
_NO_EXPERTS = (
    "ranks have a part of every expert or, with enable_expert_parallel, the same number of whole "
    "ones, and there is one way to compute them; leave it out"
)
_ONE_HOST = "other hosts join by the option placer (join or ray); leave it out"
_NO_TRANSFER = "KV blocks are not moved between engines or to other memory yet; leave it out"
_GRAPHS = (
    "graphs are captured for batch sizes that the engine chooses; enforce_eager=True runs without "
    "graphs"
)
_COMPILER = (
    "models are written with fused kernels, no compiler runs; enforce_eager=True runs without CUDA "
    "graphs"
)
_CHUNKS = "chunks of prompts follow max_num_batched_tokens and target_itl_ms; leave it out"
_LOADER = "files of weights are mapped and read in one way; leave it out"
_BLOCKS = "the engine chooses the groups of layers in its cache, and has one hash; leave it out"
_SERVER = "is an option of `sidestep serve`, not of an engine in Python"
_LOGS = (
    "`sidestep serve --access-log` logs each request, and --log-level says how much else; leave it "
    "out"
)

ENGINE_OPTIONS: dict[str, Foreign] = {
    # Loading.
    "trust_remote_code": Foreign(
        "code that comes with a model is never run here; use one of the model families that "
        "sidestep has, or leave it out",
        (False,),
        form="switch",
    ),
    "convert": Foreign(
        "runner='pooling' alone makes embeddings with a model that generates text; leave it out",
        ("auto", "none"),
    ),
    "task": Foreign("is runner='pooling' here, for all tasks but 'generate'", ("auto", "generate")),
    "hf_config_path": Foreign(
        "the model's own config.json is read; hf_overrides takes the place of its fields"
    ),
    "config_format": Foreign(
        "only the Hugging Face layout is read: a folder with config.json", ("auto", "hf")
    ),
    "tokenizer_revision": Foreign(
        "give a local folder as tokenizer, or leave it out; `revision` is the model's"
    ),
    "code_revision": Foreign("code that comes with a model is never run here; leave it out"),
    "download_dir": Foreign("models of the hub go to its own cache; set HF_HOME to move it"),
    "hf_token": Foreign("the library huggingface_hub logs in by itself; set HF_TOKEN"),
    "model_impl": Foreign(
        "each model family has one implementation here; leave it out", ("auto", "vllm")
    ),
    "model_loader_extra_config": Foreign(_LOADER, ({},)),
    "ignore_patterns": Foreign(_LOADER),
    "safetensors_load_strategy": Foreign(_LOADER, ("lazy",)),
    "pt_load_map_location": Foreign(_LOADER, ("cpu",)),
    "use_tqdm_on_load": Foreign("loading shows no bar; leave it out", (False,), form="switch"),
    "max_parallel_loading_workers": Foreign(_LOADER),
    "rope_scaling": Foreign("is a field of config.json here: hf_overrides={'rope_scaling': {...}}"),
    "rope_theta": Foreign("is a field of config.json here: hf_overrides={'rope_theta': ...}"),
    "calculate_kv_scales": Foreign(
        "scales that a checkpoint lacks are computed for each token and head; leave it out",
        (False,),
        form="switch",
    ),
    "override_attention_dtype": Foreign("attention is computed in the model's dtype; leave it out"),
    "enable_lora": Foreign(NO_LORA, (False,), form="switch"),
    "max_loras": Foreign(NO_LORA, (1,)),
    "max_lora_rank": Foreign(NO_LORA, (16,)),
    "max_cpu_loras": Foreign(NO_LORA),
    "lora_dtype": Foreign(NO_LORA, ("auto",)),
    "lora_extra_vocab_size": Foreign(NO_LORA),
    "fully_sharded_loras": Foreign(NO_LORA, (False,), form="switch"),
    "default_mm_loras": Foreign(NO_LORA),
    "enable_prompt_embeds": Foreign(
        "prompts are text or token ids, not embeddings; leave it out", (False,), form="switch"
    ),
    # Images, audio, video.
    "limit_mm_per_prompt": Foreign(NO_IMAGES, ({},)),
    "mm_processor_kwargs": Foreign(NO_IMAGES, ({},)),
    "mm_processor_cache_gb": Foreign(NO_IMAGES, (0, 0.0)),
    "disable_mm_preprocessor_cache": Foreign(NO_IMAGES, (False, True), form="switch"),
    "mm_encoder_tp_mode": Foreign(NO_IMAGES),
    "media_io_kwargs": Foreign(NO_IMAGES, ({},)),
    "skip_mm_profiling": Foreign(NO_IMAGES, (False, True), form="switch"),
    "interleave_mm_strings": Foreign(NO_IMAGES, (False,), form="switch"),
    "enable_mm_embeds": Foreign(NO_IMAGES, (False,), form="switch"),
    "language_model_only": Foreign(NO_IMAGES, (False, True), form="switch"),
    "video_pruning_rate": Foreign(NO_IMAGES),
    "allowed_local_media_path": Foreign(NO_IMAGES, ("",)),
    "allowed_media_domains": Foreign(NO_IMAGES, form="list"),
    "disable_chunked_mm_input": Foreign(NO_IMAGES, (False,), form="switch"),
    # Memory and cache.
    "swap_space": Foreign(
        "preempted requests are computed again, not swapped to host memory; leave it out", (0, 0.0)
    ),
    "cpu_offload_gb": Foreign(
        "all weights are kept on the device; leave it out, or use more ranks "
        "(tensor_parallel_size)",
        (0, 0.0),
    ),
    "num_gpu_blocks_override": Foreign("is num_kv_blocks here", same_as="num_kv_blocks"),
    "prefix_caching_hash_algo": Foreign(_BLOCKS),
    "disable_sliding_window": Foreign(
        "windows of attention are as the model's config.json has them; leave it out",
        (False,),
        form="switch",
    ),
    "disable_hybrid_kv_cache_manager": Foreign(_BLOCKS, (False, True), form="switch"),
    "kv_sharing_fast_prefill": Foreign(_BLOCKS, (False,), form="switch"),
    "mamba_cache_dtype": Foreign("only transformer models are served; leave it out", ("auto",)),
    "mamba_ssm_cache_dtype": Foreign("only transformer models are served; leave it out", ("auto",)),
    "mamba_block_size": Foreign("only transformer models are served; leave it out"),
    "kv_transfer_config": Foreign(_NO_TRANSFER),
    "kv_events_config": Foreign(_NO_TRANSFER),
    "kv_offloading_size": Foreign(_NO_TRANSFER),
    "kv_offloading_backend": Foreign(_NO_TRANSFER),
    "offload_backend": Foreign("all weights are kept on the device; leave it out", ("auto",)),
    "weight_transfer_config": Foreign(
        "update_weights(folder) reads new weights from a folder without options; leave it out"
    ),
    "ec_transfer_config": Foreign(_NO_TRANSFER),
    "enable_sleep_mode": Foreign(
        "sleep() and wake_up() need no option; leave it out",
        (False, True),
        form="switch",
    ),
    # Steps.
    "enable_chunked_prefill": Foreign(
        "long prompts are always computed in chunks; leave it out, or raise max_num_batched_tokens",
        (True,),
        form="switch",
    ),
    "max_num_partial_prefills": Foreign(_CHUNKS),
    "max_long_partial_prefills": Foreign(_CHUNKS),
    "long_prefill_token_threshold": Foreign(_CHUNKS, (0,)),
    "num_scheduler_steps": Foreign(
        "steps overlap by async_scheduling, which is the default; leave it out", (1,)
    ),
    "multi_step_stream_outputs": Foreign(
        "outputs come after each step; leave it out", (True,), form="switch"
    ),
    "disable_async_output_proc": Foreign(
        "is the opposite of async_scheduling here; leave it out", (False,), form="switch"
    ),
    "scheduler_cls": Foreign("there is one scheduler; its order is chosen by scheduling_policy"),
    "scheduler_delay_factor": Foreign("requests are scheduled at once; leave it out", (0, 0.0)),
    "preemption_mode": Foreign(
        "preempted requests are computed again; leave it out", ("recompute",)
    ),
    "use_v2_block_manager": Foreign(_BLOCKS, (True,), form="switch"),
    "num_lookahead_slots": Foreign(
        "room for drafts is reserved as speculative_config asks; leave it out", (0,)
    ),
    "speculative_model": Foreign(
        "drafts are looked up and no second model is loaded yet; give speculative_config="
        "{'method': 'ngram'} instead"
    ),
    "num_speculative_tokens": Foreign(_SPECULATION),
    "ngram_prompt_lookup_max": Foreign(
        "is prompt_lookup_max in speculative_config, with {'method': 'ngram'}"
    ),
    "ngram_prompt_lookup_min": Foreign(
        "is prompt_lookup_min in speculative_config, with {'method': 'ngram'}"
    ),
    "compilation_config": Foreign(_COMPILER, ({},)),
    "optimization_level": Foreign(_COMPILER),
    "max_seq_len_to_capture": Foreign("graphs here hold for sequences of any length; leave it out"),
    "max_context_len_to_capture": Foreign(
        "graphs here hold for sequences of any length; leave it out"
    ),
    "cuda_graph_sizes": Foreign(_GRAPHS, form="list"),
    "cudagraph_capture_sizes": Foreign(_GRAPHS, form="list"),
    "max_cudagraph_capture_size": Foreign(_GRAPHS),
    "max_num_scheduled_tokens": Foreign(
        "is max_num_batched_tokens here", same_as="max_num_batched_tokens"
    ),
    "performance_mode": Foreign(
        "target_itl_ms says how long a step may last while others decode; leave it out",
        ("balanced",),
    ),
    "attention_config": Foreign("attention is chosen by attention_backend; leave it out", ({},)),
    "kernel_config": Foreign("kernels are chosen by what was measured; leave it out", ({},)),
    "moe_backend": Foreign(_NO_EXPERTS, ("auto",)),
    "ubatch_size": Foreign(
        "steps are not divided into micro-batches on one stage; leave it out", (0,)
    ),
    "scheduler_reserve_full_isl": Foreign(_CHUNKS),
    "disable_cascade_attn": Foreign(
        "attention is chosen by attention_backend; leave it out", (False, True), form="switch"
    ),
    "enable_dbo": Foreign(
        "steps are not divided into micro-batches on one stage; leave it out",
        (False,),
        form="switch",
    ),
    "logprobs_mode": Foreign(
        "log-probabilities are those of the model itself, before penalties and filters",
        ("raw_logprobs",),
    ),
    "max_logprobs": Foreign(
        "20 log-probabilities of each token are the most, and a request may ask for them all", (20,)
    ),
    "logits_processor_pattern": Foreign(
        "processors are named at the start, by logits_processors=['module:Class']"
    ),
    "structured_outputs_config": Foreign(
        "one library (llguidance) holds outputs to a form; leave it out", ({},)
    ),
    "guided_decoding_backend": Foreign(
        "one library (llguidance) holds outputs to a form; leave it out", ("auto", "guidance")
    ),
    "override_generation_config": Foreign(
        "give the values in SamplingParams, or a folder with a "
        "generation_config.json as generation_config",
        ({},),
    ),
    "override_pooler_config": Foreign("is pooler_config here", same_as="pooler_config"),
    "io_processor_plugin": Foreign("results are those of the model; no plugin changes them"),
    # Several devices and hosts.
    "distributed_executor_backend": Foreign(
        "each rank is a process of its own on this host, as by 'mp'; leave it out", ("mp",)
    ),
    "worker_use_ray": Foreign(
        "each rank is a process of its own on this host; leave it out", (False,), form="switch"
    ),
    "engine_use_ray": Foreign(
        "the engine is a process of its own on this host; leave it out", (False,), form="switch"
    ),
    "ray_workers_use_nsight": Foreign(
        "each rank is a process of its own on this host; leave it out", (False,), form="switch"
    ),
    "worker_cls": Foreign(
        "there is one kind of worker; a device or model is added by a line in "
        "ipc/common/registry.py",
        ("auto",),
    ),
    "worker_extension_cls": Foreign("workers take no code of users; leave it out", ("",)),
    "all2all_backend": Foreign(_NO_EXPERTS),
    "enable_eplb": Foreign(_NO_EXPERTS, (False,), form="switch"),
    "eplb_config": Foreign(_NO_EXPERTS, ({},)),
    "expert_placement_strategy": Foreign(_NO_EXPERTS, ("linear",)),
    "prefill_context_parallel_size": Foreign(
        "ranks share layers, not the context; use tensor_parallel_size", (1,)
    ),
    "decode_context_parallel_size": Foreign(
        "ranks share layers, not the context; use tensor_parallel_size", (1,)
    ),
    "data_parallel_rank": Foreign(
        "one engine starts and feeds all its replicas; give data_parallel_size alone"
    ),
    "data_parallel_start_rank": Foreign(
        "one engine starts and feeds all its replicas; give data_parallel_size alone"
    ),
    "data_parallel_size_local": Foreign(
        "one engine starts and feeds all its replicas; give data_parallel_size alone"
    ),
    "data_parallel_address": Foreign(_ONE_HOST),
    "data_parallel_rpc_port": Foreign(_ONE_HOST),
    "data_parallel_backend": Foreign(
        "replicas are processes on this host, as by 'mp'; leave it out", ("mp",)
    ),
    "data_parallel_hybrid_lb": Foreign(_ONE_HOST, (False,), form="switch"),
    "data_parallel_external_lb": Foreign(_ONE_HOST, (False,), form="switch"),
    "numa_bind": Foreign(
        "processes run on the cores that the system gives them; use numactl",
        (False,),
        form="switch",
    ),
    "nnodes": Foreign(_ONE_HOST, (1,)),
    "node_rank": Foreign(_ONE_HOST, (0,)),
    "master_addr": Foreign(_ONE_HOST),
    "master_port": Foreign(_ONE_HOST),
    # Logs and figures.
    "disable_log_stats": Foreign(
        "statistics are always kept and none are printed", (False, True), form="switch"
    ),
    "enable_log_requests": Foreign(_LOGS, (False,), form="switch"),
    "disable_log_requests": Foreign("requests are not logged", (True,), form="switch"),
    "aggregate_engine_logging": Foreign(
        "get_stats gives the sums of all replicas; leave it out", (False,), form="switch"
    ),
    "collect_detailed_traces": Foreign(
        "`sidestep trace` and get_step_records tell of each step; leave it out"
    ),
    "show_hidden_metrics_for_version": Foreign("no metric is hidden; leave it out"),
    "kv_cache_metrics": Foreign(
        "the cache's figures are always kept; leave it out", (False, True), form="switch"
    ),
    "profiler_config": Foreign(
        "profiler_dir names the folder that start_profile writes to; it takes the place of "
        "torch_profiler_dir"
    ),
    "additional_config": Foreign(
        "there is no platform with options of its own; leave it out", ({},)
    ),
}
"""Options by vLLM's names. None of them is a name of ours."""

SERVER_OPTIONS: dict[str, Foreign] = {
    "api_key": Foreign(
        "a key on the command line could be read by every user of this machine; put it into "
        "SIDESTEP_API_KEYS or into a file for --api-key-file",
        form="list",
    ),
    "enable_auto_tool_choice": Foreign(
        "tools are taken wherever --tool-call-parser is given; leave it out",
        (False, True),
        form="switch",
    ),
    "tool_parser_plugin": Foreign(
        "a parser is a file and a line in ipc/common/registry.py; leave it out", ("",)
    ),
    "exclude_tools_when_tool_choice_none": Foreign(
        "with tool_choice 'none' the prompt lists no tools; leave it out",
        (False, True),
        form="switch",
    ),
    "tool_server": Foreign("tools are called by the client; leave it out"),
    "chat_template_content_format": Foreign(
        "templates get each message's content as text; leave it out", ("auto", "string")
    ),
    "default_chat_template_kwargs": Foreign(
        "clients send chat_template_kwargs; write other defaults into the template", ({},)
    ),
    "trust_request_chat_template": Foreign(
        "templates of clients are never run by the server; leave it out", (False,), form="switch"
    ),
    "uds": Foreign("the server listens at --host and --port"),
    "h11_max_incomplete_event_size": Foreign(
        "--max-body-bytes and --read-timeout bound what a client may send"
    ),
    "h11_max_header_count": Foreign(
        "--max-body-bytes and --read-timeout bound what a client may send"
    ),
    "response_role": Foreign("answers have the role 'assistant'; leave it out", ("assistant",)),
    "lora_modules": Foreign(NO_LORA, form="list"),
    "root_path": Foreign(
        "the server answers at the root; let the proxy take the prefix off", ("",)
    ),
    "middleware": Foreign("the server takes no code of users; put a proxy before it", form="list"),
    "allow_credentials": Foreign(
        "requests carry a key, not cookies; leave it out", (False,), form="switch"
    ),
    "allowed_methods": Foreign(
        "all methods of the API are allowed to the origins of --allowed-origins"
    ),
    "allowed_headers": Foreign(
        "all headers of the API are allowed to the origins of --allowed-origins"
    ),
    "uvicorn_log_level": Foreign(_LOGS),
    "disable_uvicorn_access_log": Foreign(
        "is the default; --access-log logs each request", (True,), form="switch"
    ),
    "disable_fastapi_docs": Foreign(
        "the server's description is at /openapi.json and has no page; leave it out",
        (False,),
        form="switch",
    ),
    "disable_frontend_multiprocessing": Foreign(
        "the engine is always a process of its own; leave it out", (False,), form="switch"
    ),
    "enable_request_id_headers": Foreign(
        "answers carry x-request-id in any case; leave it out", (False, True), form="switch"
    ),
    "enable_prompt_tokens_details": Foreign(
        "usage tells cached prompt tokens in any case; leave it out", (False, True), form="switch"
    ),
    "enable_force_include_usage": Foreign(
        "a client asks for it by stream_options.include_usage", (False,), form="switch"
    ),
    "enable_server_load_tracking": Foreign(
        "/metrics has the load in any case; leave it out", (False, True), form="switch"
    ),
    "enable_tokenizer_info_endpoint": Foreign(
        "/tokenize and /detokenize are there in any case; leave it out", (False,), form="switch"
    ),
    "enable_log_outputs": Foreign(_LOGS, (False,), form="switch"),
    "return_tokens_as_token_ids": Foreign(
        "log-probabilities carry each token's bytes; leave it out", (False,), form="switch"
    ),
    "log_config_file": Foreign(_LOGS),
    "max_log_len": Foreign(_LOGS),
    "ssl_cert_reqs": Foreign(
        "a certificate is required of clients where --ssl-ca-certs is given; leave it out"
    ),
    "enable_ssl_refresh": Foreign(
        "certificates are read at the start; restart the server for new ones",
        (False,),
        form="switch",
    ),
    "headless": Foreign(_ONE_HOST, (False,), form="switch"),
    "tokens_only": Foreign(
        "clients may send token ids to /v1/completions; leave it out", (False,), form="switch"
    ),
}
"""Options of `vllm serve`."""

SERVED_ONLY: dict[str, Foreign] = {
    name: Foreign(_SERVER)
    for name in (
        "served_model_name",
        "reasoning_parser",
        "tool_call_parser",
        "otlp_traces_endpoint",
        "allowed_origins",
        "host",
        "port",
    )
}
"""Options of the server that vLLM takes for the engine too."""

VALUES: dict[str, dict[object, object]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "max_model_len": {-1: "auto", "-1": "auto"},
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch",
    },
}
"""Values of options that vLLM and sidestep share, by vLLM's words for them."""


def translate_value(name: str, value: Any) -> Any:
    """Return our word for the value of an option."""
    words = VALUES.get(name, {})
    return words.get(value, value) if isinstance(value, str | int) else value


def translate_engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the engine's options by our names.

    Raises ValidationError for an option without a meaning here.
    """
    ours = translate(given, SERVED_ONLY | ENGINE_OPTIONS)
    return {name: translate_value(name, value) for name, value in ours.items()}


def takes_vllm_options(cls: type[T]) -> type[T]:
    """Let a dataclass of engine options accept vLLM's names too, and name unknown ones.

    It decorates the class.
    """
    original: Callable[..., None] = cls.__init__
    known = inspect.signature(original).parameters

    @functools.wraps(original)
    def init(self: T, /, *args: Any, **options: Any) -> None:
        ours = translate_engine_options(options)
        for name in ours:
            if name not in known:
                raise UnknownNameError(
                    name, f"is not an option of the engine{did_you_mean(name, known)}"
                )
        original(self, *args, **ours)

    cls.__init__ = init  # type: ignore[assignment]
    return cls
