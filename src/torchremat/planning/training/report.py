"""The results of `verify`, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass

from torchremat.tensors.sizes import format_bytes, format_flops

# A step that takes longer than predicted by more than this share is called slow.
_SLOW_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class StepComparison:
    """Whether a step with the regions of a model does what one without them does.

    Attributes:
        is_exact: Whether loss, gradients and buffers are equal bit for bit; None if undecidable: the plain step does
            not fit, or two plain steps differ, deterministic kernels do not help, and the step with the regions differs
            by no more.
        differences: The differing tensors, by name, with the largest difference. If two plain steps differ, only
            tensors that differ by more than these.
        noise: The difference of two plain steps, by name; measured only if something differs.
        is_deterministic: Whether the compared steps ran with torch's deterministic kernels, since two plain steps
            differ without them.
        is_repeatable: Whether two plain steps differ by no more than rounding. If they do, no step can be compared with
            them, and `is_exact` is None unless a tensor differs that plain steps have in common.
    """

    is_exact: bool | None
    differences: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    is_deterministic: bool = False
    is_repeatable: bool = True


@dataclass(frozen=True, kw_only=True)
class Report(StepComparison):
    """The results of `verify`. Its attributes are also those of `StepComparison`.

    Attributes:
        peak_bytes: Measured peak of forward and backward with the regions, in absolute bytes.
        plain_peak_bytes: The same without them; None if that step does not fit.
        predicted_bytes: The applied plan's prediction for it; None without a plan.
        kept_bytes: Bytes that the forward left for the backward, with the regions.
        plain_kept_bytes: The same without them; None if that step does not fit.
        seconds: Median seconds of forward and backward with the regions.
        plain_seconds: The same without them.
        recomputed_flops: Flops recomputed with the regions.
        regions: Wrapped modules that a plan or `wrap` put there.
        no_effect: Why the regions save nothing, or "" if they do.
        predicted_slowdown: Seconds with the regions over those without, as predicted by the applied plan; None for a
            plan without stores, whose seconds may be those of another device.
        resident_bytes: The part of `peak_bytes` that stays on the device and is no tensor of the step's, like
            workspaces.
        slack_bytes: The most that the device's allocator gave beyond the requested bytes, with the regions. It is not
            part of `peak_bytes`, and depends on the allocator's cache; 0 on the CPU.
        took_seconds: Seconds that `verify` took.
        steps: Steps that it ran.
    """

    peak_bytes: int
    plain_peak_bytes: int | None
    predicted_bytes: int | None
    kept_bytes: int
    plain_kept_bytes: int | None
    seconds: float
    plain_seconds: float | None
    recomputed_flops: int
    regions: int
    no_effect: str
    predicted_slowdown: float | None = None
    resident_bytes: int = 0
    slack_bytes: int = 0
    took_seconds: float = 0.0
    steps: int = 0

    @property
    def is_slow(self) -> bool:
        """Whether the step took more than 10% longer than the applied plan predicted."""
        if self.predicted_slowdown is None or not self.plain_seconds:
            return False
        return self.seconds / self.plain_seconds > (1 + _SLOW_SHARE) * self.predicted_slowdown

    def __str__(self) -> str:
        rows = self._exact_rows()
        if self.plain_peak_bytes is not None:
            percent = 100 * self.peak_bytes / self.plain_peak_bytes
            share = f", {percent:.0f}% of plain ({format_bytes(self.plain_peak_bytes)})"
        else:
            share = ""
        rows.append(f"peak       {format_bytes(self.peak_bytes)}{share}")
        if self.predicted_bytes is not None:
            off = 100 * (self.peak_bytes - self.predicted_bytes) / self.predicted_bytes
            rows.append(f"predicted  {format_bytes(self.predicted_bytes)}, measured {off:+.2f}%")
        if self.resident_bytes or self.slack_bytes:
            rows.append(
                f"device     {format_bytes(self.resident_bytes)} of it are resident (workspaces and others); its "
                f"allocator gave up to {format_bytes(self.slack_bytes)} more than requested"
            )
        if self.plain_seconds:
            told = "" if self.predicted_slowdown is None else f", {self.predicted_slowdown:.2f} x predicted"
            rows.append(
                f"time       {self.seconds / self.plain_seconds:.2f} x plain ({self.plain_seconds * 1e3:.0f} ms, "
                f"medians){told}"
            )
            if self.is_slow:
                rows.append(
                    f"slow       by more than {100 * _SLOW_SHARE:.0f}% above the prediction: the stores are slower "
                    "than when they were measured, or something else runs. Plan again, or without stores"
                )
        rows.append(f"recomputed {format_flops(self.recomputed_flops)}, {self.regions} wrapped modules")
        if self.no_effect:
            rows.append(f"no effect because {self.no_effect}")
        if self.steps:
            rows.append(f"took       {self.took_seconds:.1f} s, for {self.steps} steps")
        return "\n".join(rows)

    def _exact_rows(self) -> list[str]:
        """Return the lines about the results: what was found, and the tensors that differ."""
        by_itself = f"plain differs from plain by itself, in {len(self.noise)} results" if self.noise else ""
        match self.is_exact:
            case True:
                found = "loss, gradients and buffers equal bit for bit"
            case False:
                found = "NOT EQUAL"
            case None if not self.noise:
                found = "not compared, the plain step does not fit"
            case None if self.is_repeatable:
                found = f"equal within the difference of two plain steps: {by_itself}"
            case None:
                found = f"NOT COMPARABLE: {by_itself}, and by more than rounding"
        kernels = ", with deterministic kernels; without them, two plain steps differ" if self.is_deterministic else ""
        lines = self.differences[:10] if self.differences else self.noise[:10]
        rows = [f"exact      {found}{kernels}", *(f"           {line}" for line in lines)]
        if self.differences and self.noise:
            rows += [f"           {by_itself}", *(f"           {line}" for line in self.noise[:10])]
        return rows
