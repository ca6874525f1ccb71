"""A profile of the fake device: the times of its steps, in the form of torch's profiles."""

from __future__ import annotations

import msgspec

from sidestep.executor.runner.profile_files import make_folder, profile_file
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.transport.step import StepInput
from sidestep.ipc.transport.worker_calls import CallResult, StartProfile, StopProfile


class FakeProfile:
    """Answers the calls that record the times of steps."""

    def __init__(self, args: WorkerArgs) -> None:
        """Begin without a profile."""
        self._args = args
        self._folder: str | None = None
        """Where the profile goes that is being recorded."""
        self._events: list[dict[str, object]] = []

    def start_profile(self, call: StartProfile) -> CallResult:
        """Begin to record."""
        if self._folder is not None:
            raise CallRefusedError("a profile is being recorded already; stop it first")
        make_folder(call.folder)
        self._folder, self._events = call.folder, []
        return {}

    def note(self, step: StepInput, start_s: float, end_s: float) -> None:
        """Record a step. start_s, end_s: on the monotonic clock."""
        if self._folder is not None:
            self._events.append(
                {
                    "ph": "X",
                    "name": f"step {step.step_id}",
                    "pid": self._args.replica,
                    "tid": self._args.rank,
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                    "args": {"rows": len(step.slots), "tokens": int(step.num_tokens.sum())},
                }
            )

    def stop_profile(self, call: StopProfile) -> CallResult:
        """End the recording and write it."""
        if self._folder is None:
            raise CallRefusedError("no profile is being recorded")
        file, self._folder = profile_file(self._folder, self._args), None
        try:
            with open(file, "wb") as out:
                out.write(msgspec.json.encode({"traceEvents": self._events}))
        except OSError as error:
            raise CallRefusedError(f"{file} cannot be written: {error.strerror}") from None
        return {"file": file}
