"""Planning: from a traced and a watched step to the tree of regions that fits a budget.

profiles/   the behaviour and the bytes of a step, measured in one run of it
devices/    the same for an absent device, without running the step
simulator/  the exact interpreter: the live bytes at every program point under a tree of regions
searches/   the search for trees, operators and stores
bounds/     bounds on the distance from the best tree found to the best possible
budgets, layout, inputs  the conditions of a plan, and putting a tree on a model
plans, files             a plan as data
requests, planner, doors `plan` and `frontier`: their checks, and their work
descriptions, printing   the contents of a plan, and a plan as text
frontiers, staircases    peak against time over all budgets
verification, report, fitting  one real step under a plan
conditions, scopes, checks     the first step of a training under a plan, compared with the planned one
trained, overruns, soundings, sounded  later steps, watched for the budget
shapes/     steps of changing shapes
guarding/   a step that runs again when memory runs out
compiling/  `torch.compile` with a budget
"""
