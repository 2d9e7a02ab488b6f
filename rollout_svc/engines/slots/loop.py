"""The thread that samples, and what may happen between two of its steps: pauses, aborts, other weights."""

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
from rollout_svc.engines.slots.requests import LiveRequest, WaitingLine
from sluice.versions import BASE, Version
from weightsync.staged import StagedVersion

__all__ = ["InPlaceWeights", "SlotLoop"]

Result = TypeVar("Result")

log = structlog.get_logger()


class SlotLoop:
    """Samples for all live requests in a thread of its own.

    Args:
        batch: What is sampled.
        weights: The model's tensors.
        threads: CPU threads of a step; None leaves PyTorch's choice.
        recompute: Whether other weights compute the keys and values of running samples anew.
    """

    def __init__(self, batch: SlotBatch, weights: InPlaceWeights, *, threads: int | None, recompute: bool) -> None:
        self.batch = batch
        self.paused: PauseMode | None = None
        self.broken = ""
        self.staged: StagedVersion | None = None
        """Where the weights came from; None for the base."""
        self.suspect = False
        """The live weights were found to differ from those; a swap ends that."""
        self._weights, self._threads, self._recompute = weights, threads, recompute
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self._over = False
        self._last_command = threading.Lock()
        self._draining: list[Future[None]] = []
        self._waiting = WaitingLine()
        self._held: list[LiveRequest] = []
        self._thread = threading.Thread(target=self._run, name="slot-loop", daemon=True)

    # --- from other threads ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End every request and the thread; blocks for the rest of a step."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def call(self, action: Callable[[], Result]) -> Future[Result]:
        """Run something in the thread, between two steps."""
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
        """As `call`, where nobody waits for the outcome."""
        with self._last_command:
            if not self._over:
                self._commands.put(action)
                self._wake.set()
                return
        action()  # the thread is gone: only refusals are left to give

    @property
    def version(self) -> Version:
        """The weights that tokens are sampled from."""
        return BASE if self.staged is None else self.staged.version

    @property
    def queued(self) -> int:
        """Samples that wait for a row."""
        return len(self._waiting) + sum(len(live.samples) for live in self._held)

    # --- in the thread: requests ----------------------------------------------------------------------------------

    def add(self, live: LiveRequest) -> None:
        """Queue a request. In the thread."""
        if self.broken or self._stopping:
            live.fail(EngineError(self.broken or "the engine was stopped"))
        elif self._draining or self.paused is PauseMode.WAIT:
            self._held.append(live)
        else:
            self._waiting.add(live)

    def abort(self, live: LiveRequest | None, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request with what it has, or all of them; False if there was nothing left to end. In the thread."""
        for held in [each for each in self._held if live is None or each is live]:
            self._held.remove(held)
            self._waiting.add(held)
        gone = self._waiting.remove(live)
        gone += self.batch.free(
            [row for row, (owner, _) in enumerate(self.batch.rows) if live is None or owner is live]
        )
        for owner, sample in gone:
            sample.finish_reason = reason
            owner.sample_ended()
        return bool(gone)

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop sampling; done when that is so. In the thread."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # from here on the waiting side cannot cancel it
        if mode is PauseMode.WAIT:
            self.paused = None  # what an earlier pause froze has to end as well
            self._draining.append(done)
            self._look_if_drained()
            return done
        if mode is PauseMode.ABORT:
            self.abort(None)
        self.paused = mode
        done.set_result(None)
        return done

    def resume(self) -> None:
        """Sample again; a pause that still waits is given up. In the thread."""
        self.paused = None
        self._draining.clear()
        for live in self._held:
            self._waiting.add(live)
        self._held.clear()

    def _look_if_drained(self) -> None:
        if self._draining and not self.batch.rows and not self._waiting:
            self.paused = PauseMode.WAIT
            for done in self._draining:
                done.set_result(None)
            self._draining.clear()

    # --- in the thread: weights -----------------------------------------------------------------------------------

    def swap(self, staged: StagedVersion | None) -> tuple[float, float]:
        """Copy a version into the model, or the base where it is None. In the thread.

        Returns:
            Seconds without sampling, and seconds of the copy alone.

        Raises:
            EngineError: if it could not be applied. The version before serves on, unless `broken` says otherwise.
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
            self.batch.fill_anew()
        return time.perf_counter() - begun, copied - copying

    def tensors(self) -> list[str]:
        """Names of the live weights, sorted."""
        return self._weights.names()

    def differs(self, name: str, staged: StagedVersion | None) -> bool:
        """Whether a live tensor differs from a version, or from the base where it is None. In the thread.

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
        for live, _ in self.batch.step(self._waiting, self.version):
            live.sample_ended()
        self._look_if_drained()

    def _break(self, why: str) -> None:
        self.broken = why
        self._fail_all(EngineError(why))

    def _fail_all(self, error: EngineError) -> None:
        gone = {id(live): live for live, _ in [*self.batch.rows, *self._waiting.remove(None)]}
        gone |= {id(live): live for live in self._held}
        self.batch.rows.clear()
        self._held.clear()
        for live in gone.values():
            live.fail(error)
        for done in self._draining:
            done.set_exception(error)
        self._draining.clear()


class InPlaceWeights:
    """The live tensors of a model under the names that its files use.

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
        """The model's own files."""
        return self._base.paths

    def check(self, paths: Sequence[Path]) -> None:
        """Compare the files' headers with the model, before anything is touched.

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
        """Every tensor, sorted."""
        return sorted(self._live)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def differs(self, name: str, paths: Sequence[Path]) -> bool:
        """Whether a live tensor differs from the files in any bit, after the rounding that a copy does.

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
    """Every tensor's name with its open file.

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
