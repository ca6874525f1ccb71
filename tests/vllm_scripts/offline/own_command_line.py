# Expected: runs
import sys
from dataclasses import asdict

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils import FlexibleArgumentParser


def main() -> None:
    model, device = sys.argv[1:]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="Completes a line."))
    parser.add_argument("--prompt", default="import ")
    args = parser.parse_args(
        [
            "--model",
            model,
            "--device",
            device,
            "--max_model_len",
            "256",
            "--dtype",
            "float",
            "--swap-space",
            "0",
            "--seed=3",
        ]
    )
    prompt = args.prompt
    engine_args = EngineArgs.from_cli_args(args)
    assert (
        engine_args.max_model_len == 256
        and engine_args.dtype == "float32"
        and engine_args.seed == 3
    )
    del args.prompt
    assert asdict(engine_args)["model"] == model
    llm = LLM(**vars(args))
    print(llm.generate(prompt, SamplingParams(max_tokens=4))[0].outputs[0].text)
    del llm
    llm = LLM(**(asdict(engine_args) | {"max_model_len": 64}))
    (output,) = llm.generate("x = ", SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 64


main()
