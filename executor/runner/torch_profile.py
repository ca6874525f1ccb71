"""A profile of a rank by torch's profiler: operators on the CPU, and kernels on a GPU."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

from sidestep.executor.runner.profile_files import make_folder, profile_file
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.executor.runner.worker_calls import CallRefusedError
from sidestep.ipc.transport.worker_calls import CallResult, StartProfile, StopProfile


class TorchProfile:
    """Answers the calls that record with torch's profiler.

    The profiler records the operators of the thread that starts it, which is the thread of the
    steps.
    """

    def __init__(self, args: WorkerArgs) -> None:
        """Begin without a profile."""
        self._args = args
        self._profile: profile | None = None
        """The profile that is being recorded."""
        self._folder = ""

    def start_profile(self, call: StartProfile) -> CallResult:
        """Begin to record."""
        if self._profile is not None:
            raise CallRefusedError("a profile is being recorded already; stop it first")
        make_folder(call.folder)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        self._profile, self._folder = profile(activities=activities), call.folder
        self._profile.start()
        return {}

    def stop_profile(self, call: StopProfile) -> CallResult:
        """End the recording, with all steps that were launched, and write it."""
        if self._profile is None:
            raise CallRefusedError("no profile is being recorded")
        recorded, self._profile = self._profile, None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        recorded.stop()
        file = profile_file(self._folder, self._args)
        try:
            recorded.export_chrome_trace(file)
        except (OSError, RuntimeError) as error:
            raise CallRefusedError(f"{file} cannot be written: {error}") from None
        return {"file": file}
