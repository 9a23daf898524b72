"""A sequence of layers on several devices of one process: cut into stages, and run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import Stream, accelerator_of, counting_devices
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.transforms import is_transformed
from torchremat.errors import PipelineError, UnsupportedError
from torchremat.pipeline.balance import balance as balanced
from torchremat.pipeline.batchnorm import commit_statistics, convert_deferred_batch_norm, discard_statistics
from torchremat.pipeline.event_recorder import Recorder
from torchremat.pipeline.microbatch import Microbatch, gather, scatter
from torchremat.pipeline.runner import Runner
from torchremat.pipeline.skip import inspect_skip_layout, verify_skippables
from torchremat.pipeline.timeline import Timeline, timeline_of, with_prediction
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
        self.devices = find_devices(devices, None if counts is None else len(counts))
        self.balance = _by_parameters(module, len(self.devices)) if counts is None else counts
        if deferred_batch_norm:
            module = cast("nn.Sequential", convert_deferred_batch_norm(module, None))
        self.partitions = nn.ModuleList(cut_stages(module, self.balance, self.devices))
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
        events = self._recorder.events()
        order = self._last.order(has_backward=any(event.kind == "backward" for event in events))
        return with_prediction(timeline_of(events, order), order, lookahead=True)

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
            target = fn(torch.empty(0, device=device)).device
            if target != device:
                raise UnsupportedError(
                    f"this would move stages of a Pipe from {device} to {target}, and the Pipe decides where its "
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
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in module]
    return list(balanced(sizes, min(stages, len(sizes)))) if sizes else []


_ADVICE = "`torchremat.pipeline.balance` has functions that find one by time, by size, or for given costs."


def cut_stages(module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> list[nn.Sequential]:
    """Return the layers as one `nn.Sequential` for each stage, on its device; they keep their names.

    Args:
        module: The layers.
        balance: How many of them each stage has.
        devices: The device of each stage; surplus devices are ignored.

    Raises:
        PipelineError: The balance, the devices or the layers are invalid; all problems are listed.
    """
    problems = _balance_problems(len(module), balance)
    if len(devices) < len(balance):
        problems.append(
            f"{len(balance)} stages need as many devices, and there are {len(devices)}: {list(map(str, devices))}"
        )
    layers = list(module.named_children())
    if len(layers) < len(module):
        problems.append("a layer occurs more than once, but it can be in one stage only")
    _raise(problems)
    stages: list[nn.Sequential] = []
    place = 0
    for count in balance:
        stage = nn.Sequential()
        for name, layer in layers[place : place + count]:
            stage.add_module(name, layer)
        stages.append(stage)
        place += count
    _raise(_sharing_problems(stages, devices))
    return [stage.to(device) for stage, device in zip(stages, devices, strict=False)]


def find_devices(devices: Iterable[torch.device | str | int] | None, stages: int | None) -> list[torch.device]:
    """Return the devices to use: the given ones; else all CUDA devices, or the CPU once per stage."""
    if devices is not None:
        listed = [torch.device(device) for device in devices]
    elif accelerators := counting_devices():
        listed = accelerators
    else:
        listed = [torch.device("cpu")] * (stages or 1)
    problems = [problem for device in dict.fromkeys(listed) for problem in _existence_problems(device)]
    _raise(problems)
    return [accelerator_of(device).normalised(device) for device in listed]


def _existence_problems(device: torch.device) -> list[str]:
    accelerator = accelerator_of(device)
    if not (accelerator.is_host or accelerator.counts):
        return [f"devices of type {device.type} are not supported, only cuda and cpu"]
    count = len(accelerator.devices())
    if not accelerator.is_host and (device.index or 0) >= count:
        return [f"there is no device {device}: torch finds {count} {device.type.upper()} devices here"]
    return []


def _balance_problems(layers: int, balance: Sequence[int]) -> list[str]:
    problems: list[str] = []
    if any(type(cast("object", count)) is not int or count < 1 for count in balance):
        problems.append(f"balance: expected ints of at least 1, got {list(balance)}")
    elif sum(balance) != layers:
        problems.append(f"the module has {layers} layers, and the balance {list(balance)} is for {sum(balance)}")
    return [f"{problem}. {_ADVICE}" for problem in problems]


def _sharing_problems(stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> list[str]:
    known: dict[nn.Parameter, tuple[str, int]] = {}
    problems: list[str] = []
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            first, owner = known.setdefault(parameter, (name, number))
            if devices[owner] != devices[number]:
                problems.append(
                    f"parameter `{name}` of stage {number} on {devices[number]} is also `{first}` of stage {owner} on "
                    f"{devices[owner]}: a parameter has one device. Put both stages on it, or use two parameters"
                )
    return problems


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise PipelineError("this pipe cannot be made:\n" + "\n".join(f"  {problem}" for problem in problems))
