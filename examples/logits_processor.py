"""A logits processor: one token becomes likelier with each token of the output.

Run it from the folder above this one:

    python -m examples.logits_processor

The bundled model then writes two comments, one of which is urged to come to its end. An engine gets
the class by LLM(logits_processors=["examples.logits_processor:TokenRamp"]), or by the flag
--logits-processors; a request names it:

    SamplingParams(extra_args={"TokenRamp": {"token": 2, "step": 0.5}})
"""

import torch
from torch import Tensor

from sidestep import LLM, SamplingParams
from sidestep.executor.sampling.logits_processor import (
    EnteringRequest,
    LogitsProcessor,
    ProcessorSetup,
    Slots,
)


class TokenRamp(LogitsProcessor):
    """Logits processor that adds `step` to the logit of `token` for each token of output so far."""

    def __init__(self, setup: ProcessorSetup) -> None:
        super().__init__(setup)
        # State that changes with each token is on the device, by slot. The host would have to wait
        # for the device to learn the output's length, so the device counts it.
        self._lengths = torch.zeros(setup.num_slots, device=setup.device)
        self._wishes: dict[int, tuple[int, float]] = {}

    def enter(self, request: EnteringRequest) -> bool:
        """Return whether a new request uses this processor, and record its arguments."""
        wish = request.controls.extra_args.get("TokenRamp")
        if wish is None:
            return False  # this request has no use for it, and no cost
        self._wishes[request.slot] = (int(wish["token"]), float(wish["step"]))
        # After a preemption a request enters again with its earlier output.
        self._lengths[request.slot] = len(request.output_token_ids)
        return True

    def leave(self, slot: int) -> None:
        """Forget the arguments of a request that ends."""
        del self._wishes[slot]

    def apply(self, logits: Tensor, slots: Slots) -> None:
        """Raise the logits of the rows' tokens, in place."""
        # All rows are computed at once: a handful of operations for any number of requests.
        tokens = self.setup.to_device([self._wishes[slot][0] for slot in slots])
        steps = self.setup.to_device([self._wishes[slot][1] for slot in slots])
        rows = torch.arange(len(slots), device=logits.device)
        logits.index_put_((rows, tokens), steps * self._lengths[slots.on_device], accumulate=True)

    def sampled(self, token_ids: Tensor, slots: Slots) -> None:
        """Count the new tokens."""
        self._lengths[slots.on_device] += 1


def main() -> None:
    """Print two texts from one prompt."""
    with LLM(logits_processors=["examples.logits_processor:TokenRamp"]) as llm:
        end = llm.get_tokenizer().encode("\n", add_special_tokens=False)[0]
        plain = SamplingParams(temperature=0, max_tokens=30, stop=["\n"])
        urged = SamplingParams(
            temperature=0,
            max_tokens=30,
            stop=["\n"],
            extra_args={"TokenRamp": {"token": end, "step": 0.5}},
        )
        for output in llm.generate(["# This function"] * 2, [plain, urged], use_tqdm=False):
            print(repr(output.outputs[0].text))


if __name__ == "__main__":
    main()
