"""Orders of a pipeline as data, what a simulated one costs, and the parts of a pipe that tests stand in for."""

from torchremat._compat.accelerators import CPU_STREAM, CpuStream
from torchremat.interop.torchgpipe.gpipe import verify_module
from torchremat.pipeline import copying, workers
from torchremat.pipeline.balance import costs
from torchremat.pipeline.cells import precede
from torchremat.pipeline.events import PipelineEvent, pieces
from torchremat.pipeline.skip import portals
from torchremat.pipeline.timeline import costs_of, predict
from torchremat.pipeline.workers import spawn_workers
from torchremat.planning.searches.microbatches import SumsPrediction, shares
from torchremat.schedules.pipelines import recomputing
from torchremat.stages.samples import receive
