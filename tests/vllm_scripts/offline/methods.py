# Expected: UnsupportedError: LLM.start_weight_update: update_weights(folder) reads new weights
import sys

from vllm import LLM, SamplingParams

model, device = sys.argv[1:]
llm = LLM(model=model, device=device)
for name, arguments in [
    ("collective_rpc", ["reload"]),
    ("apply_model", [print]),
    ("pause_generation", []),
    ("get_metrics", []),
]:
    assert not hasattr(llm, name)
    try:
        getattr(llm, name)(*arguments)
    except NotImplementedError as error:
        assert str(error).startswith(f"LLM.{name}: "), error
        print(error)
    else:
        raise AssertionError(name)
llm.generate("warm up", SamplingParams(max_tokens=1))
llm.sleep(level=1)
assert llm.is_sleeping()
llm.wake_up()
llm.start_weight_update()
