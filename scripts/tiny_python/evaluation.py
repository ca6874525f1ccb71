"""Evaluation of the saved model.

It measures the loss on held-out files, whether generated code parses, and whether chats stop.
"""

import ast
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from tiny_python.training import POSITIONS, Tokens, rows_in_order, validation_loss
from tiny_python.vocabulary import TURN_END

PROMPT = "def get_name("
SAMPLES = 64
TEMPERATURE = 0.3
NEW_TOKENS = 128
LEADING_LINES = 4
SAMPLE_SEED = 0
CHAT_TOKENS = 160
QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What does the module json do?",
    "What does the module os do?",
    "What is the random module for?",
    "what does module socket do?",
    "Tell me about the Python module threading.",
    "What is collections?",
    "What does the function textwrap.dedent do?",
    "What does shutil.copytree do?",
    "What is the class queue.Queue?",
    "Explain glob.",
    "Write a Python function named get_name.",
    "Write a function called add.",
    "How do I sort a list in Python?",
    "Why is the sky blue?",
)


@dataclass
class Scores:
    """Scores of the saved model."""

    validation_loss: float
    bits_per_byte: float
    parsed: int
    chat_stopped: int
    samples: list[str]
    answers: list[tuple[str, str]]


def leading_lines_parse(text: str) -> bool:
    """Return whether a prefix of whole lines is valid Python as it stands.

    At least LEADING_LINES of its lines are not blank.
    """
    lines = text.split("\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for count in range(LEADING_LINES, len(lines) + 1):
            head = lines[:count]
            if sum(bool(line.strip()) for line in head) >= LEADING_LINES and is_python(
                "\n".join(head)
            ):
                return True
    return False


def is_python(text: str) -> bool:
    """Return whether a text parses as Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


@torch.inference_mode()
def sample_code(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return SAMPLES completions of PROMPT, with the prompt."""
    torch.manual_seed(SAMPLE_SEED)
    inputs = tokenizer([PROMPT] * SAMPLES, return_tensors="pt").to(model.device)
    outputs = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        max_new_tokens=NEW_TOKENS,
    )
    return tokenizer.batch_decode(outputs, skip_special_tokens=True)


@torch.inference_mode()
def answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, question: str
) -> tuple[str, bool]:
    """Return the greedy answer to one user message, and whether the model ended its turn."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=CHAT_TOKENS,
    )
    new = output[0, inputs["input_ids"].shape[1] :]
    stopped = int(new[-1]) == tokenizer.convert_tokens_to_ids(TURN_END)
    return tokenizer.decode(new, skip_special_tokens=True), stopped


def evaluate(folder: Path, tokens: Tokens, validation_bytes: int, device: torch.device) -> Scores:
    """Score the files on disk.

    So the figures are those of the shipped files, which are rounded to bfloat16.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    rows = rows_in_order(tokens.validation)
    loss = validation_loss(model, rows, device, None if device.type == "cuda" else 32)
    model.eval()
    per_byte = sum(len(document) for document in tokens.validation) / validation_bytes
    samples = sample_code(model, tokenizer)
    answers = [(question, *answer(model, tokenizer, question)) for question in QUESTIONS]
    return Scores(
        validation_loss=loss,
        bits_per_byte=loss * per_byte / math.log(2),
        parsed=sum(leading_lines_parse(sample) for sample in samples),
        chat_stopped=sum(stopped for _, _, stopped in answers),
        samples=samples,
        answers=[(question, reply) for question, reply, _ in answers],
    )


def describe(scores: Scores) -> str:
    """Return the scores as lines to print, with a few samples to judge by eye."""
    lines = [f"--- sample\n{sample}" for sample in scores.samples[:3]]
    lines += [f"--- {question}\n{reply}" for question, reply in scores.answers]
    lines += [
        f"validation loss {scores.validation_loss:.4f} nats/token, "
        f"{scores.bits_per_byte:.4f} bits/byte (rows of {POSITIONS})",
        f"{scores.parsed} of {SAMPLES} samples of {PROMPT!r} have {LEADING_LINES} leading lines "
        "that parse",
        f"{scores.chat_stopped} of {len(QUESTIONS)} chat answers end their turn",
    ]
    return "\n".join(lines)
