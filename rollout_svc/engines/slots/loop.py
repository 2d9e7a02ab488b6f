"""The thread that samples, and what happens between two of its steps: pauses, aborts, changes of the weights."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import structlog
import torch
from safetensors import SafetensorError, safe_open

from rollout_svc.engines.base import EngineError, FinishReason, PauseMode
from rollout_svc.engines.model_files import TIED_HEAD, BaseModel
from rollout_svc.engines.slots.batch import SlotBatch
from rollout_svc.engines.slots.requests import ActiveRequest, WaitingQueue
from sluice.versions import BASE, Version
from weightsync.staged import StagedVersion

__all__ = ["InPlaceWeights", "SlotLoop"]

Result = TypeVar("Result")

log = structlog.get_logger()


class SlotLoop:
    """Samples for all active requests in its own thread.

    Args:
        batch: What is sampled.
        weights: The model's tensors.
        threads: CPU threads of a step; None leaves PyTorch's choice.
        recompute: Whether the keys and values of running samples are computed again after a change of the weights.
    """

    def __init__(self, batch: SlotBatch, weights: InPlaceWeights, *, threads: int | None, recompute: bool) -> None:
        self.batch = batch
        self.paused: PauseMode | None = None
        self.broken = ""
        self.staged: StagedVersion | None = None
        """The version of the weights; None for the base model."""
        self.suspect = False
        """Whether the live weights were found to differ from that version, until the next swap."""
        self._weights, self._threads, self._recompute = weights, threads, recompute
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._over = False
        self._last_command = threading.Lock()
        self._draining: list[Future[None]] = []
        self._waiting = WaitingQueue()
        self._held: list[ActiveRequest] = []
        self._thread = threading.Thread(target=self._run, name="slot-loop", daemon=True)

    # --- from other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End every request and the thread. Blocks for the rest of a step."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def call(self, action: Callable[[], Result]) -> Future[Result]:
        """Run an action in the thread, between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                future.set_exception(error)

        self.post(run)
        return future

    def post(self, action: Callable[[], object]) -> None:
        """Like `call`, without a result."""
        with self._last_command:
            if not self._over:
                self._commands.put(action)
                self._wake.set()
                return
        action()  # the thread has ended: the action only refuses

    @property
    def version(self) -> Version:
        """Return the version of the weights."""
        return BASE if self.staged is None else self.staged.version

    @property
    def queued(self) -> int:
        """Return the number of samples that wait for a row."""
        return len(self._waiting) + sum(len(active.samples) for active in self._held)

    # --- in the thread: requests ----------------------------------------------------------------------------------

    def add(self, active: ActiveRequest) -> None:
        """Queue a request. Call this in the thread."""
        if self.broken or self._stopping:
            active.fail(EngineError(self.broken or "the engine was stopped"))
        elif self._draining or self.paused is PauseMode.WAIT:
            self._held.append(active)
        else:
            self._waiting.add(active)

    def abort(self, active: ActiveRequest | None, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request, or all of them, with the tokens so far. Return False if none was active. Call this in the thread."""
        for held in [each for each in self._held if active is None or each is active]:
            self._held.remove(held)
            self._waiting.add(held)
        gone = self._waiting.remove(active)
        gone += self.batch.free(
            [row for row, (owner, _) in enumerate(self.batch.rows) if active is None or owner is active]
        )
        for owner, sample in gone:
            sample.finish_reason = reason
            owner.sample_ended()
        return bool(gone)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling. The future is done when sampling has stopped. Call this in the thread."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # from here on the caller cannot cancel it
        if mode is PauseMode.WAIT:
            self.paused = None  # requests that an earlier pause froze have to end, too
            self._draining.append(done)
            self._look_if_drained()
            return done
        if mode is PauseMode.ABORT:
            self.abort(None)
        self.paused = mode
        done.set_result(None)
        return done

    def resume(self) -> None:
        """Resume sampling. A pause that still waits is abandoned. Call this in the thread."""
        self.paused = None
        self._draining.clear()
        for active in self._held:
            self._waiting.add(active)
        self._held.clear()

    def _look_if_drained(self) -> None:
        if self._draining and not self.batch.rows and not self._waiting:
            self.paused = PauseMode.WAIT
            for done in self._draining:
                done.set_result(None)
            self._draining.clear()

    # --- in the thread: weights -----------------------------------------------------------------------------------

    def swap(self, staged: StagedVersion | None) -> tuple[float, float]:
        """Copy a version into the model, or the base model for None. Call this in the thread.

        Returns:
            Seconds without sampling, and seconds of the copy alone.

        Raises:
            EngineError: if it could not be applied. The version before keeps serving, unless `broken` is set.
        """
        begun = time.perf_counter()
        paths = self._files(staged)
        self._weights.check(paths)
        copying = time.perf_counter()
        try:
            self._weights.copy(paths)
        except EngineError:
            self._go_back()
            raise
        copied = time.perf_counter()
        self.staged, self.suspect = staged, False
        if self._recompute:
            self.batch.recompute_kv()
        return time.perf_counter() - begun, copied - copying

    def tensors(self) -> list[str]:
        """Return the names of the live tensors, sorted."""
        return self._weights.names()

    def differs(self, name: str, staged: StagedVersion | None) -> bool:
        """Return whether a live tensor differs from a version, or from the base model for None. Call this in the thread.

        Raises:
            EngineError: if the version's file cannot be read.
        """
        found: bool = self._weights.differs(name, self._files(staged))
        self.suspect |= found
        return found

    def _files(self, staged: StagedVersion | None) -> Sequence[Path]:
        return self._weights.base_paths if staged is None else [staged.path]

    def _go_back(self) -> None:
        try:
            self._weights.copy(self._files(self.staged))
        except EngineError as error:
            self._break(f"neither the new nor the old version could be loaded: {error}; call restart()")
            raise

    # --- the thread -----------------------------------------------------------------------------------------------

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._take_commands()
                if self.paused is None and not self.broken and (self.batch.rows or self._waiting):
                    self._step()
                else:
                    self._wake.wait()
                    self._wake.clear()
        except Exception as error:
            log.exception("sampling failed")
            self._break(f"sampling failed: {type(error).__name__}: {error}; call restart()")
        self._stopping = True
        with self._last_command:
            self._over = True
        self._take_commands()
        self._fail_all(EngineError(self.broken or "the engine was stopped"))

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _step(self) -> None:
        for active, _ in self.batch.step(self._waiting, self.version):
            active.sample_ended()
        self._look_if_drained()

    def _break(self, why: str) -> None:
        self.broken = why
        self._fail_all(EngineError(why))

    def _fail_all(self, error: EngineError) -> None:
        gone = {id(active): active for active, _ in [*self.batch.rows, *self._waiting.remove(None)]}
        gone |= {id(active): active for active in self._held}
        self.batch.rows.clear()
        self._held.clear()
        for active in gone.values():
            active.fail(error)
        for done in self._draining:
            done.set_exception(error)
        self._draining.clear()


class InPlaceWeights:
    """The live tensors of a model, by the names in its files; copies files into them in place.

    Args:
        module: The model.
        base: What its files hold.

    Raises:
        EngineError: if the model's own names differ from those of the files, so that nothing can be copied by name.
    """

    def __init__(self, module: torch.nn.Module, base: BaseModel) -> None:
        live = module.state_dict()
        missing = sorted(base.shapes.keys() - live.keys())
        if missing:
            raise EngineError(
                f"the model's files have tensors that the loaded model does not name so: {missing[:3]} ({len(missing)}); "
                'use engine = "vllm"'
            )
        self._live = {name: live[name] for name in base.shapes}
        self._base = base
        self._device = next(iter(self._live.values())).device

    @property
    def base_paths(self) -> Sequence[Path]:
        """Return the files of the base model."""
        return self._base.paths

    def check(self, paths: Sequence[Path]) -> None:
        """Compare the headers of the files with the model, before anything changes.

        Raises:
            EngineError: if they are not whole safetensors files with exactly the model's tensors.
        """
        seen: set[str] = set()
        with ExitStack() as stack:
            for name, file in _tensors(paths, stack):
                if name == TIED_HEAD and name not in self._live:
                    continue
                shape = tuple(file.get_slice(name).get_shape())
                expected = self._base.shapes.get(name)
                if shape != expected or name in seen:
                    raise EngineError(f"{name} of {list(shape)} is given; the model has {expected}; stage it again")
                seen.add(name)
        if seen != self._live.keys():
            raise EngineError(f"{sorted(self._live.keys() - seen)[:3]} are missing; stage the version again")

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def copy(self, paths: Sequence[Path]) -> None:
        """Copy the files into the model.

        Raises:
            EngineError: if a file cannot be read; the model may then hold parts of two versions.
        """
        with ExitStack() as stack:
            try:
                for name, file in _tensors(paths, stack):
                    if name in self._live:
                        self._live[name].copy_(file.get_tensor(name))
            except (SafetensorError, OSError, RuntimeError) as error:
                raise EngineError(f"the weights could not be copied: {error}") from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._live)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def differs(self, name: str, paths: Sequence[Path]) -> bool:
        """Return whether a live tensor differs from the files in any bit, after the rounding of a copy.

        Raises:
            EngineError: if no file has it.
        """
        live = self._live[name]
        with ExitStack() as stack:
            for given, file in _tensors(paths, stack):
                if given == name:
                    wanted = file.get_tensor(name).to(device=live.device, dtype=live.dtype)
                    return wanted.shape != live.shape or not torch.equal(_bits(live), _bits(wanted))
        raise EngineError(f"{name} is in none of the version's files; stage it again")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tensors(paths: Sequence[Path], stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield the name of every tensor and its open file.

    Raises:
        EngineError: if a file is not a whole safetensors file.
    """
    for path in paths:
        try:
            file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{path} is not a whole safetensors file: {error}; stage it again") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file
