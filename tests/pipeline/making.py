"""Events and timelines in few words."""

from probes.pipelines import PipelineEvent
from schedules.orders import parse
from torchremat.pipeline.timeline import Timeline


def event(word, start_s, end_s):
    """An event by its letter, stage and microbatch, such as F0.1."""
    (action,) = parse([word])[0]
    return PipelineEvent(
        kind=action.kind, stage=action.stage, microbatch=action.microbatch, start_s=start_s, end_s=end_s
    )


def timeline(*events, stages=1, **others):
    return Timeline(events=tuple(event(*one) for one in events), stages=stages, **others)
