"""`sidestep run-batch`, which answers a file of requests with an engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import closing

from sidestep.frontend.api.event_loop import new_event_loop
from sidestep.frontend.api.progress import progress_bar
from sidestep.frontend.cli.generate import start_engine
from sidestep.frontend.cli.serve import needs_extra
from sidestep.frontend.options.engine_args import EngineArgs
from sidestep.frontend.options.option_flags import option_values
from sidestep.frontend.options.serve_options import ServerArgs
from sidestep.frontend.server.batch_file import BatchResult, OutputFile, Plan, make_plan
from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.common.logs import tell


def run_run_batch(parsed: argparse.Namespace) -> int:
    """Run `sidestep run-batch` and return its exit status.

    The status is 0 when every line of the input has a good answer in the output.
    """
    args, arguments = (
        ServerArgs(**option_values(parsed, ServerArgs)),
        EngineArgs.from_cli_args(parsed),
    )
    _check(parsed, arguments)
    # The input is opened first: a wrong name must not leave an empty output behind.
    with open(parsed.input_file, "rb") as lines, closing(OutputFile(parsed.output_file)) as output:
        plan = make_plan(lines, output.written)
        failed = plan.failed_before
        for broken in plan.broken:
            output.write(broken)
            failed += 1
        if plan.requests:
            failed += _run(plan, output, args, arguments, parsed.max_concurrency)
    total = len(plan.requests) + len(plan.broken) + plan.skipped
    skipped = f"; {plan.skipped} were there already" if plan.skipped else ""
    tell(
        f"{total} requests in {parsed.output_file}: {total - failed} answered, "
        f"{failed} failed{skipped}"
    )
    return 1 if failed else 0


def _check(parsed: argparse.Namespace, arguments: EngineArgs) -> None:
    if parsed.max_concurrency < 1:
        raise ValidationError("max_concurrency", "must be at least 1")
    for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
        if getattr(arguments, name) is not None:
            raise ValidationError(
                name, "would refuse lines of the batch; max_concurrency says how many run at once"
            )
    if os.path.exists(parsed.output_file) and os.path.samefile(
        parsed.input_file, parsed.output_file
    ):
        raise ValidationError("output_file", "is the input")


def _run(
    plan: Plan, output: OutputFile, args: ServerArgs, arguments: EngineArgs, max_concurrency: int
) -> int:
    """Return the number of requests that have failed."""
    with needs_extra("server"):
        from sidestep.frontend.server.batch import answer_all
    failed = 0
    llm = start_engine(arguments)
    try:
        with (
            progress_bar(len(plan.requests), "request") as progress,
            asyncio.Runner(loop_factory=new_event_loop) as runner,
        ):

            def take(result: BatchResult) -> None:
                nonlocal failed
                output.write(result)
                failed += not result.succeeded
                progress.update()

            runner.run(
                answer_all(
                    llm,
                    args,
                    args.model_names(arguments.model),
                    plan.requests,
                    max_concurrency,
                    take,
                )
            )
    finally:
        llm.shutdown()
    return failed
