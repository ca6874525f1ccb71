"""`sidestep eval`, which measures what a model can do, alone or against a reference.

Compression changes a model: weights of fewer bits, a smaller KV cache. The command says by how
much, and its exit status fails a build that went too far.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sidestep.frontend.evaluation.comparison import compare
from sidestep.frontend.evaluation.json_validity import JsonValidity
from sidestep.frontend.evaluation.needle import Needle
from sidestep.frontend.evaluation.perplexity import Perplexity, exponential
from sidestep.frontend.evaluation.report import Report
from sidestep.frontend.evaluation.run import OPTION, Plan, device_of, key_of, run_units
from sidestep.frontend.evaluation.state import State
from sidestep.frontend.evaluation.subject import AGAINST, MODEL, Subject, reference_arguments
from sidestep.frontend.evaluation.tasks import Tasks
from sidestep.frontend.evaluation.thresholds import LIMITS, failures
from sidestep.frontend.evaluation.units import Figures, Suite, check_length
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.eval_options import EvalArgs
from sidestep.frontend.options.option_flags import option_values
from sidestep.ipc.common.logs import tell

_NOT_OF_FIGURES = ("state", "against", "against_options", *LIMITS)
"""Options that no result depends on, and those that are reported with the models."""


def run_eval(parsed: argparse.Namespace) -> int:
    """Run `sidestep eval` and return its exit status: 1 if a figure does not keep to its limit."""
    args = EvalArgs(**option_values(parsed, EvalArgs))
    report = evaluate(args, EngineArgs.from_cli_args(parsed))
    print(report.to_json() if parsed.json else "\n".join(report.lines()))
    for failure in report.failed:
        tell(f"sidestep eval: {failure}", logging.ERROR)
    return 1 if report.failed else 0


def evaluate(args: EvalArgs, arguments: EngineArgs) -> Report:
    """Measure a model, and then the reference if there is one.

    All files are read, and all prompts made and checked, before the first engine starts. Raises
    ValidationError, which names the option; SidestepError; OSError.
    """
    subjects = [Subject.load(MODEL, arguments, args)]
    if args.against is not None:
        subjects.append(Subject.load(AGAINST, reference_arguments(arguments, args), args))
    suites = _suites(args, subjects)
    plans = [[(suite, suite.units(subject)) for suite in suites] for subject in subjects]
    for subject, plan in zip(subjects, plans, strict=True):
        _check(subject, plan)
    options = _options(args, subjects, suites, plans)
    with State(args.state, options) as state:
        for subject, plan in zip(subjects, plans, strict=True):
            run_units(subject, plan, state)
        figures = _figures(subjects, plans, state)
        devices = {subject.role: device_of(subject, state) for subject in subjects}
    failed = failures(args, figures)
    return Report(arguments.model, args.against, devices, options, figures, failed)


def _suites(args: EvalArgs, subjects: Sequence[Subject]) -> list[Suite]:
    suites: list[Suite] = []
    if args.measures_text:
        suites.append(Perplexity(args, subjects))
    if args.needle is not None:
        suites.append(Needle(args))
    if args.measures_json:
        suites.append(JsonValidity(args))
    if args.tasks is not None:
        suites.append(Tasks(args))
    return suites


def _check(subject: Subject, plan: Plan) -> None:
    for suite, units in plan:
        for unit in units:
            check_length(unit, OPTION[suite.name], subject.config.max_model_len)


def _options(
    args: EvalArgs, subjects: Sequence[Subject], suites: Sequence[Suite], plans: Sequence[Plan]
) -> dict[str, Any]:
    """Return what the results depend on: models, options, and the contents of files.

    The digest of all prompts also covers tokenizers, templates and built-in texts.
    """
    options: dict[str, Any] = {subject.role: subject.identity() for subject in subjects}
    measured = msgspec.to_builtins(args)
    options |= {name: value for name, value in measured.items() if name not in _NOT_OF_FIGURES}
    for suite in suites:
        if (digest := getattr(suite, "digest", None)) is not None:
            options[f"{suite.name}_sha256"] = digest
        if isinstance(suite, Perplexity):
            options |= {
                "text": str(suite.path),
                "context": suite.context,
                "stride": suite.stride,
            }
    digests = hashlib.sha256()
    for plan in plans:
        for suite, units in plan:
            for unit in units:
                prompt = (suite.name, unit.name, unit.prompt, unit.params)
                digests.update(msgspec.json.encode(prompt))
    return {**options, "prompts_sha256": digests.hexdigest()}


def _figures(
    subjects: Sequence[Subject], plans: Sequence[Plan], state: State
) -> dict[str, Figures]:
    results = [
        {
            suite.name: {unit.name: state.results[key_of(subject, suite, unit)] for unit in units}
            for suite, units in plan
        }
        for subject, plan in zip(subjects, plans, strict=True)
    ]
    figures: dict[str, Figures] = {
        subject.role: {suite.name: suite.figures(found[suite.name]) for suite, _ in plan}
        for subject, plan, found in zip(subjects, plans, results, strict=True)
    }
    if len(subjects) > 1 and Perplexity.name in results[0]:
        vocab_size = max(subject.config.spec.vocab_size for subject in subjects)
        figures["comparison"] = {
            "perplexity_increase": _increase(figures),
            **compare(results[0][Perplexity.name], results[1][Perplexity.name], vocab_size),
        }
    return figures


def _increase(figures: Mapping[str, Figures]) -> float:
    """Return by which share of the reference's perplexity the model's is larger."""
    ours, reference = (figures[role]["perplexity"]["nll_per_token"] for role in (MODEL, AGAINST))
    return exponential(ours - reference) - 1
