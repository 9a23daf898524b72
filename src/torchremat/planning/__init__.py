"""Planning: from a traced and a watched step to the tree of regions that fits a budget.

tracing, units          the calls of a forward, and those that are planned
watching, profiling     what each needs, measured in one step
memory, prediction      the exact interpreter, and what it says of a tree
cargo, weighing, speeds what of a unit can go into a store, and what that takes, measured
away                    what is in stores while the interpreter walks
storing                 candidates with stores
chains, mixing, solving candidates, judged
plans, files, planner   a plan as data, and how it is made
verification, fitting   one real step
batches, figures, fits  figures at shapes that nobody has run
families, choosers      which shapes are alike, and the tree for each
classes                 the trees that are kept
gauges, adaptive        steps of changing shapes, measured
"""
