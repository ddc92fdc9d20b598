"""Adds the optimizer's update to the graph of a training step: bytes by formula, since nothing of it is traced.

An update is one pass over weights, gradients and states, and its bytes are known from their sizes (Loshchilov and Hutter,
Decoupled weight decay regularization, 2019, algorithm 2: AdamW reads and writes a weight and two running means).
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from optforge.plan.graph import OPTIMIZER, UPDATE, Access, Graph, Operator, Value
from optforge.training.settings import settings_of
from optforge.workloads.train import Train

STATE = "state"
"""Role of the storages in which an optimizer keeps its running means, named like their parameters."""


def with_update(graph: Graph, train: Train, module: nn.Module) -> Graph:
    """The graph of forward and backward pass with the update as its last operator; what the optimizer keeps is as the steps on
    `module` have decided it.

    A step of several passes has one update: its accesses are shared out over them, as everything else in a graph is of one pass.
    """
    trained = [value for value in graph.values.values() if value.role == "gradient"]
    weights = {value.name: value for value in graph.values.values() if value.role == "parameter"}
    parameters, settings = dict(module.named_parameters()), settings_of(module)
    values, reads, writes = dict(graph.values), list[Access](), list[Access]()
    for key, gradient in enumerate(trained, start=max(values, default=0) + 1):
        weight = weights[gradient.name]
        state = Value(key=key, bytes=train.state_bytes(parameters[weight.name], settings), role=STATE, name=weight.name)
        moved = [weight, *([state] if state.bytes else [])]
        values.update({value.key: value for value in moved})
        writes += [Access(key=value.key, bytes=value.bytes / graph.passes) for value in moved]
        reads += [Access(key=value.key, bytes=value.bytes / graph.passes) for value in (*moved, gradient)]
    update = Operator(
        name=settings.optimizer or train.optimizer.name,
        kind=OPTIMIZER,
        module="",
        phase=UPDATE,
        dtype="fp32",
        size=(sum(value.bytes for value in trained),),
        reads=tuple(reads),
        writes=tuple(writes),
    )
    return replace(graph, values=values, operators=[*graph.operators, update])
