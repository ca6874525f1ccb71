"""Arguments of calls, methods and attributes that vLLM has and sidestep has not."""

from __future__ import annotations

from sidestep.ipc.vllm.foreign import NO_IMAGES, NO_LORA, Foreign

_NO_RPC = (
    "workers take no calls from users; what changes logits is named by the option logits_processors"
)
_ONE_UPDATE = "update_weights(folder) reads new weights from a folder, in one call"
_NO_CHECKPOINT = "sleep() gives the memory back, and wake_up() takes it again"
_NO_PAUSE = "an engine is not paused; stop sending requests, and `abort` those that run"
_GIVEN = (
    "options are those given to EngineArgs; max_model_len, block_size and device tell what they "
    "came to"
)
_RUNNING = "max_model_len, block_size, num_kv_blocks and device tell of a running engine"
_ONE_SIZE = "the number of replicas follows the load by itself, with max_replicas"

PROMPT_KEYS: dict[str, Foreign] = {
    "multi_modal_data": Foreign(NO_IMAGES, ({},)),
    "multi_modal_uuids": Foreign(NO_IMAGES, ({},)),
    "mm_processor_kwargs": Foreign(NO_IMAGES, ({},)),
    "prompt_embeds": Foreign("prompts are text or token ids, not embeddings"),
    "token_type_ids": Foreign("models that generate text have no token types"),
    "encoder_prompt": Foreign("only decoder models are served; give the whole text as the prompt"),
    "decoder_prompt": Foreign("only decoder models are served; give the whole text as the prompt"),
}
"""Keys of a dict that is a prompt."""

ARGUMENTS: dict[str, Foreign] = {
    "lora_request": Foreign(NO_LORA, ([],)),
    "prompt_token_ids": Foreign(
        "are given within the prompt: prompts=[{'prompt_token_ids': [1, 2, 3]}]"
    ),
    "prompt_text": Foreign(
        "is given within the prompt: {'prompt_token_ids': [1, 2, 3], 'prompt': 'the text'}"
    ),
    "guided_options_request": Foreign("is structured_outputs of SamplingParams here"),
    "tokenization_kwargs": Foreign(
        "prompts are never cut or padded; give token ids for other settings", ({},)
    ),
    "mm_processor_kwargs": Foreign(NO_IMAGES, ({},)),
    "chat_template_content_format": Foreign(
        "templates get each message's content as text", ("auto", "string")
    ),
    "trace_headers": Foreign("spans are made by `sidestep serve --otlp-traces-endpoint`", ({},)),
    "data_parallel_rank": Foreign("the engine chooses a request's replica, by its option routing"),
    "session_id": Foreign("equal prefixes share cached blocks without it"),
    "kv_hints": Foreign("blocks are cached and given up by their last use"),
    "reasoning_ended": Foreign(
        "reasoning_begin and reasoning_end of StructuredOutputsParams say where a form holds"
    ),
    "reasoning_parser_kwargs": Foreign(
        "`sidestep serve --reasoning-parser` separates reasoning from the answer"
    ),
    "concurrency_limit": Foreign("the engine runs as many searches at once as fit"),
    "start_engine_loop": Foreign("the engine runs as soon as it is made", (True,)),
    "usage_context": Foreign("no usage is reported to anyone"),
    "stat_loggers": Foreign("get_stats gives the figures, `sidestep serve` has /metrics", ([],)),
    "reset_running_requests": Foreign("requests that run keep their blocks", (False,)),
    "reset_connector": Foreign("there is no cache outside the engine", (False,)),
    "profile_prefix": Foreign("files are named by rank and time; path is their folder"),
    "delay_iterations": Foreign("a profile begins with the next step and ends at stop_profile()"),
    "max_iterations": Foreign("a profile begins with the next step and ends at stop_profile()"),
    "profiler_kwargs": Foreign("profiles record operators and kernels, and nothing more", ({},)),
    "mode": Foreign(
        "sleep() waits until all requests have ended; abort them before it to begin at once",
        ("wait",),
    ),
    "tags": Foreign("wake_up() restores the weights and the cache together"),
    "internal": Foreign("requests have the ids that callers give them", (False,)),
    "truncation": Foreign("texts are never cut; slice the token ids", (False,)),
    "max_length": Foreign("texts are never cut; slice the token ids"),
    "padding": Foreign("texts are not padded, requests of any length run together", (False,)),
    "return_tensors": Foreign("token ids are lists; make a tensor of them with torch.tensor"),
    "return_token_type_ids": Foreign("models that generate text have no token types", (False,)),
}
"""Arguments of the methods of LLM and AsyncLLM, and of those of transformers' tokenizers."""

METHODS: dict[str, str] = {
    "release_kv_cache_memory": "sleep() frees the cache together with the weights",
    "pause_generation": _NO_PAUSE,
    "resume_generation": _NO_PAUSE,
    "is_paused": _NO_PAUSE,
    "collective_rpc": _NO_RPC,
    "apply_model": _NO_RPC,
    "add_lora": NO_LORA,
    "remove_lora": NO_LORA,
    "list_loras": NO_LORA,
    "pin_lora": NO_LORA,
    "init_weight_transfer_engine": _ONE_UPDATE,
    "start_weight_update": _ONE_UPDATE,
    "finish_weight_update": _ONE_UPDATE,
    "checkpoint_prepare": _NO_CHECKPOINT,
    "checkpoint_restore": _NO_CHECKPOINT,
    "scale_elastic_ep": _ONE_SIZE,
    "reset_mm_cache": NO_IMAGES,
    "reset_encoder_cache": NO_IMAGES,
    "preprocess_chat": "get_tokenizer().apply_chat_template(messages, tokenize=False) gives a "
    "conversation's prompt",
    "set_tokenizer": "the tokenizer is chosen at the start, by the option tokenizer",
    "get_metrics": "get_stats() gives the engine's figures by name",
    "do_log_stats": "get_stats() gives the engine's figures by name",
    "add_request": "generate(...) sends a request and gives its outputs",
    "step": "the engine takes its steps by itself, in a process of its own; use generate(...)",
    "enqueue": "generate(...) sends requests and gives their outputs; AsyncLLM sends them one by "
    "one",
    "wait_for_completion": "generate(...) returns when its requests have ended",
    "has_unfinished_requests": "get_stats() has num_running and num_waiting",
    "get_num_unfinished_requests": "get_stats() has num_running and num_waiting",
    "get_num_queued_tokens": "AsyncLLM.num_waiting_tokens counts those of the prompts that wait",
    "check_admission": "generate(...) raises QueueFullError at the limits max_num_queued_reqs and "
    "max_num_queued_tokens",
    "wait_for_requests_to_drain": "await the requests themselves; `sidestep serve` drains at "
    "SIGTERM",
    "get_supported_tasks": "`pooling` of AsyncLLM says what an engine makes of prompts",
    "is_tracing_enabled": "spans are made by `sidestep serve --otlp-traces-endpoint`",
    "is_stopped": "`is_running` is its opposite",
    "from_vllm_config": "from_engine_args(EngineArgs(...)) makes an engine",
    "get_vllm_config": _GIVEN,
    "get_model_config": _RUNNING,
    "vllm_config": _GIVEN,
    "model_config": _RUNNING,
    "tokenizer": "get_tokenizer() gives the model's tokenizer",
    "llm_engine": "the engine is a process of its own; get_tokenizer(), get_stats() and "
    "max_model_len tell of it",
    "engine_core": "the engine is a process of its own; get_stats() and get_step_records() tell "
    "of it",
    "input_processor": "get_tokenizer() gives what makes token ids of text",
    "engine": "AsyncLLM is the engine itself",
}
"""Methods and attributes of LLM, AsyncLLM and LLMEngine."""

TOKENIZER_METHODS: dict[str, str] = dict.fromkeys(
    (
        "pad",
        "add_tokens",
        "add_special_tokens",
        "save_pretrained",
        "from_pretrained",
        "train_new_from_iterator",
        "encode_plus",
        "batch_encode_plus",
        "prepare_for_model",
        "push_to_hub",
    ),
    "a model's tokenizer encodes and decodes here; for all else load it with "
    "transformers.AutoTokenizer",
)
"""Methods and attributes of transformers' tokenizers."""
