"""`optforge tune`: the fastest recipe for a model, a workload and a device, within limits, in a given time.

    options     tune.* and limits.*, checked
    space       what a search may choose from, and recipes as points of it
    candidate   one recipe that is tried: what was foreseen, what was measured, what became of it
    foresee     plans in a process of their own: refusals, predicted times, memory
    judge       figures from reports, limits, Pareto fronts, successive halving; no state
    sampling    Optuna's study
    proposals   what it proposes, as candidates
    search      the loop: foresee, measure, promote, propose, until the time is up
    final       the finalists and the model as loaded, in the same rounds of one process
    record      tune.json, tune.md, best.yaml

The process that searches loads no torch and opens no device, as that of a sweep.
"""
