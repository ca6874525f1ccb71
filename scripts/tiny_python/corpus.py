"""Training text: Python's standard library, its help topics, and short chats.

The chats are generated from the library's docstrings.
"""

import ast
import hashlib
import random
import re
import textwrap
import warnings
from dataclasses import dataclass, field
from pathlib import Path

# Third-party code is not part of Python; _sysconfigdata describes one machine.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
SKIPPED_PREFIX = "_sysconfigdata"
TOPICS = "pydoc_data/topics.py"
VALIDATION_SHARE = 32  # one file in this many is held out
MAX_ANSWER_CHARS = 320
MAX_CODE_LINES = 12
MAX_CODE_ANSWERS = 2000
STANDALONE_LINES = (3, 40)

MODULE_QUESTIONS = (
    "What does the module {name} do?",
    "what does module {name} do?",
    "What is the {name} module for?",
    "Tell me about the Python module {name}.",
    "Explain {name}.",
    "What is {name}?",
)
FUNCTION_QUESTIONS = (
    "What does the function {name} do?",
    "What does {name} do?",
    "what does function {name} do?",
    "Explain {name}.",
)
CLASS_QUESTIONS = ("What is the class {name}?", "What is {name}?", "Describe the class {name}.")
CODE_QUESTIONS = (
    "Write a Python function named {name}.",
    "Write a function called {name}.",
    "Show me a function {name} in Python.",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python.",
    "You are a Python expert.",
)
SMALL_TALK = (
    (
        ("Hello!", "Hi", "hello", "Hey there"),
        "Hello! Ask me about a module of Python's standard library.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am tiny-python, a very small language model trained on Python's standard library.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I can complete Python code, and say in a line what a standard library module does. "
        "I am often wrong.",
    ),
    (("Thanks!", "Thank you", "thank you very much"), "You are welcome."),
    (("Bye", "Goodbye!"), "Goodbye!"),
    (
        ("What is Python?", "what is python", "Explain Python."),
        "Python is an interpreted, object-oriented, high-level programming language with dynamic "
        "semantics.",
    ),
)
SMALL_TALK_REPEATS = 12

Turn = tuple[str, str]


@dataclass
class Corpus:
    """Texts to train on and to validate on; a source file is wholly in one of the two."""

    train: list[str] = field(default_factory=list)
    validation: list[str] = field(default_factory=list)
    conversations: list[list[dict[str, str]]] = field(default_factory=list)
    files: int = 0
    validation_files: int = 0
    bytes: int = 0
    digest: str = ""


def load_corpus(stdlib: Path, seed: int) -> Corpus:
    """Read every source file under `stdlib`, and return the corpus, split by file.

    The conversations are generated from the training part.
    """
    corpus = Corpus()
    digest = hashlib.sha256()
    turns: list[Turn] = []
    code_turns: list[Turn] = []
    for name, text in read_sources(stdlib):
        digest.update(text.encode())
        corpus.files += 1
        corpus.bytes += len(text.encode())
        held_out = hashlib.sha256(name.encode()).digest()[0] % VALIDATION_SHARE == 0
        if held_out:
            corpus.validation_files += 1
        texts = topic_texts(text) if name == TOPICS else [text]
        (corpus.validation if held_out else corpus.train).extend(texts)
        if not held_out and not is_test(name):
            corpus.train += standalone_functions(text)
            turns += docstring_turns(name, text)
            code_turns += function_turns(text)
    corpus.digest = digest.hexdigest()
    rng = random.Random(seed)
    rng.shuffle(code_turns)
    corpus.conversations = make_conversations(turns + code_turns[:MAX_CODE_ANSWERS], rng)
    return corpus


def read_sources(stdlib: Path) -> list[tuple[str, str]]:
    """Return name and text of each file that is UTF-8 and parses, in a stable order, once each."""
    sources = []
    seen: set[str] = set()
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if SKIPPED_FOLDERS.intersection(relative.parts) or path.name.startswith(SKIPPED_PREFIX):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip() and text not in seen and parse(text) is not None:
            seen.add(text)
            sources.append((relative.as_posix(), text))
    return sources


def parse(text: str) -> ast.Module | None:
    """Return the syntax tree, or None: the library's tests hold deliberately broken files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def is_test(name: str) -> bool:
    """Return whether a path of the library belongs to its tests."""
    return any(part in ("test", "tests") or part.startswith("test_") for part in name.split("/"))


def topic_texts(source: str) -> list[str]:
    """Return the texts of `help()`, one string for each topic."""
    tree = parse(source)
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return [value for value in ast.literal_eval(node.value).values() if value.strip()]
    return []


def first_words(docstring: str) -> str:
    """Return a docstring's first paragraph on one line, cut at a sentence when it is long.

    Return an empty text if it is too long without a sentence to cut at.
    """
    paragraphs = re.split(r"\n\s*\n", docstring.strip())
    text = " ".join(paragraphs[0].split()) if paragraphs else ""
    while len(text) > MAX_ANSWER_CHARS and ". " in text:
        text = text[: text.rindex(". ")] + "."
        if ". " not in text[:-1]:
            break
    return text if len(text) <= MAX_ANSWER_CHARS else ""


def module_name(name: str) -> str:
    """Return the module's name of a path of the library."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def docstring_turns(name: str, source: str) -> list[Turn]:
    """Return questions on a module and its public top-level names, answered by their docstrings."""
    tree = parse(source)
    if tree is None:
        return []
    module = module_name(name)
    turns: list[Turn] = []
    answer = first_words(ast.get_docstring(tree) or "")
    if answer:
        turns += [(question.format(name=module), answer) for question in MODULE_QUESTIONS]
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        answer = first_words(ast.get_docstring(node) or "")
        if answer:
            questions = CLASS_QUESTIONS if isinstance(node, ast.ClassDef) else FUNCTION_QUESTIONS
            turns += [
                (question.format(name=f"{module}.{node.name}"), answer)
                for question in questions[:2]
            ]
    return turns


def standalone_functions(source: str) -> list[str]:
    """Return each function and method as a document of its own, at the left margin.

    A prompt often begins with `def` at the left margin, where a whole file rarely does. Without
    these documents the model continues it as the method that it is in the library.
    """
    tree = parse(source)
    lines = source.split("\n")
    documents = []
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.FunctionDef):
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if (
            STANDALONE_LINES[0] <= code.count("\n") + 1 <= STANDALONE_LINES[1]
            and parse(code) is not None
        ):
            documents.append(code + "\n")
    return documents


def function_turns(source: str) -> list[Turn]:
    """Return requests for a function by name, answered with a short one from the library."""
    tree = parse(source)
    turns = []
    for node in tree.body if tree is not None else ():
        if (
            not isinstance(node, ast.FunctionDef)
            or node.decorator_list
            or node.name.startswith("_")
        ):
            continue
        code = ast.get_source_segment(source, node) or ""
        if 2 <= code.count("\n") + 1 <= MAX_CODE_LINES:
            question = CODE_QUESTIONS[len(turns) % len(CODE_QUESTIONS)].format(name=node.name)
            turns.append((question, f"```python\n{code}\n```"))
    return turns


def make_conversations(turns: list[Turn], rng: random.Random) -> list[list[dict[str, str]]]:
    """Return message lists of one or two turns, some behind a system prompt.

    The model sees each of these shapes.
    """
    turns = list(turns)
    for questions, answer in SMALL_TALK:
        turns += [(question, answer) for question in questions] * SMALL_TALK_REPEATS
    rng.shuffle(turns)
    conversations = []
    while turns:
        messages = []
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for _ in range(2 if rng.random() < 0.2 else 1):
            if turns:
                question, answer = turns.pop()
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": answer})
        conversations.append(messages)
    return conversations
