"""Planning: from a traced and a watched step to the tree of regions that fits a budget.

profiles/   the behaviour and the bytes of a step, measured in one run of it
exactness/  whether the recompute of each unit repeats its forward
peers/      the processes that train one model together
devices/    the machine to plan for: this one, or one that is only described, for which the step does not run
simulator/  the exact interpreter: the live bytes at every program point under a tree of regions
searches/   the search for trees, operators and stores
bounds/     bounds on the distance from the best tree found to the best possible
budgets, hosts           a budget in bytes, and the memory of a host
layout, roots            putting a tree on a model
plan_options             the options of `plan` and others
stepping                 how the optimizer steps: whether gradients are released, and where its state waits
store_profiles           the payload of each unit in a store
parameter_bytes          the bytes of parameters that wait in a store
placed_step              a step where it runs: what all its profiles have in common
profiled_step            a step that was profiled, with the search over it: what plans and frontiers are made from
planner                  `plan` and `frontier`
bars                     the progress of planning in a terminal
results/    plans and frontiers: as data, text, pages and files
training/   real steps under a plan: verified, fitted, checked, watched
shapes/     steps of changing shapes
guarding/   a step that runs again when memory runs out
compiling/  `torch.compile` with a budget
"""
