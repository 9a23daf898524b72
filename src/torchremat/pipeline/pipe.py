"""A sequence of layers on several devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import Stream, accelerator_of
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.transforms import is_transformed
from torchremat.errors import PipelineError, UnsupportedError
from torchremat.pipeline.balance import balance as balanced
from torchremat.pipeline.batchnorm import commit_statistics, convert_deferred_batch_norm, discard_statistics
from torchremat.pipeline.microbatch import Microbatch, gather, scatter
from torchremat.pipeline.partitions import listed_devices, partitioned
from torchremat.pipeline.predictions import predicted_step
from torchremat.pipeline.recorder import Recorder
from torchremat.pipeline.runner import Runner
from torchremat.pipeline.skip import inspect_skip_layout, verify_skippables
from torchremat.pipeline.timeline import Timeline
from torchremat.regions.decisions import AnyPolicy
from torchremat.regions.patches import count_elsewhere
from torchremat.regions.runtime import is_checkpointing, is_recomputing
from torchremat.regions.settings import Check, Settings

Mode = Literal["always", "except_last", "never"]


class Applicable(Protocol):
    """A plan for a stage, or the plans of all stages of a pipe: implemented by `Plan` and `StagePlans`."""

    def check(self, target: Any, /) -> None:
        """Raise if it was made for a module other than this one."""
        ...

    def apply(self, target: Any, /) -> None:
        """Put it on the module, after the check."""
        ...


class Pipe(nn.Module):
    """A sequence of layers cut into stages, which work on the microbatches of a batch at the same time.

    Gradients are bit for bit the same as if the layers ran on one microbatch after the other. Skips that are stashed in
    one stage and popped in another go there directly.

    Args:
        module: The layers. They are moved to the devices of their stages.
        balance: How many layers each stage has; by default as even as possible in parameter bytes over all devices.
        devices: The device of each stage; surplus ones are ignored. All CUDA devices by default, or the CPU for every
            stage.
        chunks: The microbatches of a batch; a batch of fewer rows has fewer.
        checkpoint: Which microbatches are recomputed in backward: all; all but the last of a batch, whose backward
            begins at once; none. Or plans: the result of `pipeline.plan_stages`, or a `Plan` for each stage, made for
            `pipe.partitions[stage]` and a microbatch; any object with their `check` and `apply` works.
        deferred_batch_norm: Whether batch normalisation tracks the statistics of the batch, not of its microbatches.
        record: Whether steps are recorded for `timeline`.
        check: What to compare in recomputes; see `torchremat.checkpointed`.
        preserve_rng: Whether recomputes draw the random numbers of the forward.
        policy: The operators whose outputs are kept; see `torchremat.checkpointed`.

    Attributes:
        partitions: The stages, each an `nn.Sequential`.
        balance: How many layers each stage has.
        devices: The device of each stage.
        chunks: The microbatches of a batch.
        checkpoint: As given.

    Raises:
        PipelineError: The layers, their skips, the balance, the devices or the options are invalid.
        PlanError: A plan was made for layers other than those of its stage.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: Mode | Applicable | Sequence[Applicable] = "except_last",
        deferred_batch_norm: bool = False,
        record: bool = False,
        check: Check = "metadata",
        preserve_rng: bool = True,
        policy: AnyPolicy | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Sequential):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
            raise PipelineError(f"module: expected an nn.Sequential, got {type(module).__name__}.")
        if type(cast("object", chunks)) is not int or chunks < 1:
            raise PipelineError(f"chunks={chunks!r}: expected an int of at least 1.")
        if isinstance(checkpoint, str) and checkpoint not in get_args(Mode):
            raise PipelineError(
                f"checkpoint={checkpoint!r}: allowed are {', '.join(map(repr, get_args(Mode)))}, or plans."
            )
        verify_skippables(module)
        counts = None if balance is None else list(balance)
        self.devices = listed_devices(devices, None if counts is None else len(counts))
        self.balance = _by_parameters(module, len(self.devices)) if counts is None else counts
        if deferred_batch_norm:
            module = cast("nn.Sequential", convert_deferred_batch_norm(module, None))
        self.partitions = nn.ModuleList(partitioned(module, self.balance, self.devices))
        self.devices = self.devices[: len(self.balance)]
        self.chunks = chunks
        self.checkpoint = checkpoint
        self._settings = Settings(check=check, preserve_rng=preserve_rng, policy=policy)
        self._layout = inspect_skip_layout(list(self.partitions))
        self._copy_streams: list[list[Stream]] = [[] for _ in self.devices]
        self._recorder = Recorder(on=record)
        self._last: Runner | None = None
        if not isinstance(checkpoint, str):
            self._apply_plans(checkpoint)

    @outside_graphs
    def forward(self, input: object) -> object:
        """Run a batch through the stages.

        Args:
            input: On the device of the first stage. Tensors, in any nesting, with the same size in their first
                dimension, along which they are cut; all other values go to every microbatch.

        Returns:
            The output of the last stage on its device, put together along the first dimension.

        Raises:
            PipelineError: The input cannot be cut, or the outputs of the microbatches cannot be concatenated.
            UnsupportedError: The pipe is called in a region, or under torch.func.
        """
        if is_checkpointing() or is_recomputing():
            raise UnsupportedError(
                "a Pipe was called in a region, and its stages run in their own threads, which the region does "
                "not see. A Pipe recomputes by itself: use its `checkpoint` argument."
            )
        if is_transformed():
            raise UnsupportedError(
                "a Pipe was called under torch.func or forward-mode differentiation, which the threads of its stages "
                "do not know of. Transform the layers without a Pipe; `torch.func.functional_call` alone works."
            )
        microbatches = scatter(input, self.chunks)
        try:
            if self.balance:
                self._run(microbatches)
            output = gather(microbatches)
        except BaseException:
            discard_statistics(self)
            raise
        commit_statistics(self)
        return output

    def timeline(self) -> Timeline:
        """Return the events of each stage in the last step, with a prediction from the times of its parts.

        Call it after the step's backward has ended. It waits for CUDA devices.

        Raises:
            UnsupportedError: The pipe was made without `record=True`, or has not run.
        """
        if not self._recorder.on or self._last is None:
            raise UnsupportedError(
                "timeline: no step was recorded. Make the pipe with `record=True`, and run forward and backward first."
            )
        return predicted_step(self._recorder, self._last)

    def __len__(self) -> int:
        """Return the number of layers."""
        return sum(len(cast("nn.Sequential", stage)) for stage in self.partitions)

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield the layers."""
        for stage in self.partitions:
            yield from cast("nn.Sequential", stage)

    def __getitem__(self, index: int) -> nn.Module:
        """Return a layer."""
        return list(self)[index]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Pipe:
        for device in self.devices:
            found = fn(torch.empty(0, device=device)).device
            if found != device:
                raise UnsupportedError(
                    f"this would move stages of a Pipe from {device} to {found}, and the Pipe decides where its "
                    "stages are. Choose the devices when you make it, with `devices=`."
                )
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, object]:
        """Return the state of a copy: everything but the streams and the record."""
        return {**self.__dict__, "_copy_streams": [[] for _ in self.devices], "_last": None}

    def _run(self, microbatches: list[Microbatch]) -> None:
        runner = self._runner(len(microbatches))
        if self._recorder.on:
            self._recorder.start(self.devices)
            self._last = runner
        runner.run(microbatches)

    def _runner(self, count: int) -> Runner:
        recomputed = 0
        if self.training and isinstance(self.checkpoint, str):
            recomputed = {"always": count, "except_last": count - 1, "never": 0}[self.checkpoint]
        settings = [self._settings if number < recomputed else None for number in range(count)]
        for device, streams in zip(self.devices, self._copy_streams, strict=True):
            streams += [accelerator_of(device).new_stream(device) for _ in range(len(streams), count)]
        return Runner(
            stages=list(self.partitions),
            devices=self.devices,
            layout=self._layout,
            copy_streams=self._copy_streams,
            settings=[settings] * len(self.devices),
            recorder=self._recorder,
        )

    def _apply_plans(self, plans: Applicable | Sequence[Applicable]) -> None:
        if hasattr(plans, "apply"):  # plans of all stages, which are a sequence as well
            cast("Applicable", plans).apply(self)
            return
        each = cast("Sequence[Applicable]", plans)
        if len(each) != len(self.partitions):
            raise PipelineError(
                f"checkpoint: {len(each)} plans were given for {len(self.partitions)} stages; give one for each."
            )
        for plan, stage in zip(each, self.partitions, strict=True):
            plan.check(stage)
        for plan, stage in zip(each, self.partitions, strict=True):
            plan.apply(stage)
            count_elsewhere(stage)


def _by_parameters(module: nn.Sequential, stages: int) -> list[int]:
    sizes = [sum(one.nbytes for one in layer.parameters()) for layer in module]
    return list(balanced(sizes, min(stages, len(sizes)))) if sizes else []
