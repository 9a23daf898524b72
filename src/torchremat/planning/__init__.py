"""Planning: from a traced and a watched step to the tree of regions that fits a budget.

profiles/   what a step does and needs, measured in one run of it
devices/    the same for a device that is not here, without running the step
simulator/  the exact interpreter: what is live at every moment under a tree of regions
searches/   trees, operators and stores, sought and judged
bounds/     how far the best tree found can be from the best possible
budgets, layout, inputs  what a plan is for, and how a tree is put on a model
plans, files             a plan as data
requests, planner        `plan`: what it checks, and what it does
descriptions, printing   what it tells, and a plan as text
frontiers, staircases    peak against time over all budgets
verification, fitting    one real step
shapes/     steps of changing shapes
guarding/   a step that is run again when memory runs out
compiling/  `torch.compile` with a budget
"""
