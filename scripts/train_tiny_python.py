#!/usr/bin/env python3
"""Train the bundled tiny-python model on Python's own standard library, and evaluate the result.

python scripts/train_tiny_python.py                  # on a GPU: a few minutes
python scripts/train_tiny_python.py --seconds 3600   # on a CPU: a much rougher model
python scripts/train_tiny_python.py --evaluate       # score the files already there
"""

import argparse
import json
import sys
import sysconfig
from pathlib import Path

import torch
from tiny_python.card import write_card
from tiny_python.corpus import Corpus, load_corpus
from tiny_python.evaluation import describe, evaluate
from tiny_python.training import Budget, encode, model_config, train
from tiny_python.vocabulary import chat_text, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "examples" / "tiny-python"
GPU_BATCH_TOKENS = 32768
CPU_BATCH_TOKENS = 4096


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=2500, help="optimiser steps at most (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="end training after this long, if --steps is not reached first",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="the model's folder (default: %(default)s)"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--batch-tokens", type=int, help="tokens a step (default: 32768 on a GPU, 4096 on a CPU)"
    )
    parser.add_argument(
        "--stdlib",
        type=Path,
        default=Path(sysconfig.get_paths()["stdlib"]),
        help="the library to read (default: that of this Python)",
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="do not train; score the model in --out"
    )
    return parser.parse_args()


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the weights, the configurations and the tokenizer in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    # Readers older than transformers 5 look for the rotary base at the top level.
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = 10000.0
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def python_name(stdlib: Path) -> str:
    """Return the name of the Python whose library was read, from its folder's usual name."""
    name = stdlib.name.removeprefix("python")
    return (
        f"Python {name}"
        if name[:1].isdigit()
        else f"Python {sys.version_info.major}.{sys.version_info.minor}"
    )


def command_line(arguments: argparse.Namespace, steps_done: int) -> str:
    """Return the command that repeats this run, without a time limit that was not reached."""
    command = (
        f"python scripts/train_tiny_python.py --steps {arguments.steps} --seed {arguments.seed}"
    )
    if arguments.seconds and steps_done < arguments.steps:
        command += f" --seconds {arguments.seconds:g}"
    return command + (f" --batch-tokens {arguments.batch_tokens}" if arguments.batch_tokens else "")


def device_name(device: torch.device) -> str:
    """Return the device's name and the arithmetic used on it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, bfloat16 autocast"
    return f"CPU, {torch.get_num_threads()} threads, float32"


def train_and_save(arguments: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
    """Train the model, save it, and write its card."""
    texts = corpus.train + [chat_text(messages) for messages in corpus.conversations]
    tokenizer = train_tokenizer(texts)
    tokens = encode(tokenizer, corpus)
    held_out = sum(len(document) for document in tokens.validation)
    print(f"tokens: {tokens.train_count:,} to train on, {held_out:,} held out", flush=True)
    torch.manual_seed(arguments.seed)
    config = model_config(tokenizer)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"model: {parameters:,} parameters, on {device_name(device)}", flush=True)
    default_batch = GPU_BATCH_TOKENS if device.type == "cuda" else CPU_BATCH_TOKENS
    budget = Budget(arguments.steps, arguments.seconds, arguments.batch_tokens or default_batch)
    outcome = train(model, tokenizer, tokens, budget, arguments.seed, device)
    save_model(model, tokenizer, arguments.out)
    scores = evaluate(arguments.out, tokens, validation_bytes(corpus), device)
    write_card(
        arguments.out,
        config=config,
        parameters=parameters,
        corpus=corpus,
        tokens=tokens,
        python=python_name(arguments.stdlib),
        outcome=outcome,
        scores=scores,
        command=command_line(arguments, outcome.steps),
        seed=arguments.seed,
        device=device_name(device),
        torch=torch.__version__,
    )
    print(describe(scores))
    print(f"{outcome}\nsaved in {arguments.out}")


def validation_bytes(corpus: Corpus) -> int:
    """Return the size of the held-out text in bytes."""
    return sum(len(text.encode()) for text in corpus.validation)


def evaluate_saved(arguments: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
    """Evaluate the saved model and print the scores."""
    tokenizer = Tokenizer.from_file(str(arguments.out / "tokenizer.json"))
    tokens = encode(tokenizer, Corpus(validation=corpus.validation))
    print(describe(evaluate(arguments.out, tokens, validation_bytes(corpus), device)))


def main() -> None:
    """Train or evaluate, as the options say."""
    arguments = parse_arguments()
    device = torch.device(arguments.device)
    corpus = load_corpus(arguments.stdlib, arguments.seed)
    print(
        f"corpus: {corpus.files:,} files, {corpus.bytes / 1e6:.1f} MB, "
        f"{corpus.validation_files} held out, {len(corpus.conversations):,} conversations, "
        f"sha256 {corpus.digest[:16]}",
        flush=True,
    )
    if arguments.evaluate:
        evaluate_saved(arguments, corpus, device)
    else:
        train_and_save(arguments, corpus, device)


if __name__ == "__main__":
    main()
