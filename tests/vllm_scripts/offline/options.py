# Expected: runs
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(
    model=model,
    device=device,
    tokenizer_mode="auto",
    trust_remote_code=False,
    dtype="half",
    quantization=None,
    seed=0,
    tensor_parallel_size=1,
    pipeline_parallel_size=1,
    distributed_executor_backend="mp",
    gpu_memory_utilization=0.9,
    swap_space=0,
    cpu_offload_gb=0,
    enforce_eager=True,
    kv_cache_dtype="fp8",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    num_gpu_blocks_override=100,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    enable_lora=False,
    limit_mm_per_prompt={},
    speculative_config=None,
    disable_log_stats=True,
    disable_custom_all_reduce=True,
    load_format="auto",
    runner="generate",
)
assert len(llm.generate("x" * 300, SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3
