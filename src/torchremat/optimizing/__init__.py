"""Gradients that are freed in the backward, and optimizer state and parameters that wait in a store.

groups.py             the options of an optimizer's groups, and its step on some of its parameters
separability.py       whether an optimizer's step is the same on all parameters at once and on one after the other
open_steps.py         what the parts of a step have found and left, until the user's `step()`
partial_steps.py      the step of an optimizer, made in parts
rehearsal.py          a part of a step that is run to be measured
tombstones.py         what stands in place of a gradient that was freed
waiting_gradients.py  small gradients, which wait for others and step together with them
scaled_losses.py      losses that a `GradScaler` has scaled
release.py            `release_gradients`: each parameter's part of the step, in the backward
entries.py            the state of parameters, of which a store has the tensors, and when it comes and goes
stored_state.py       `offload_optimizer`: the state of an optimizer in a store
module_runs.py        modules whose parameters wait in a store: their calls, and the models whose parameters cannot
parameter_uses.py     what uses these parameters, so that they must not leave
parameter_offload.py  `offload_parameters`: the parameters of a model in a store
"""
