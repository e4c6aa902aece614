"""A folded network as a list of fused convolutions, found in its graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn
from torch.nn import functional as F

from generalist.tensors.folding import CannotFoldError, FoldedConv, FoldedLinear

ADDITIONS = (operator.add, operator.iadd, torch.add)
RECTIFIERS = (torch.relu, F.relu)


@dataclass(frozen=True)
class Step:
    """One fused convolution: relu(conv(x) + residual + side convolution). Step i makes value i + 1; value 0 is x."""

    layer: FoldedConv
    x: int
    residual: int | None = None
    side: tuple[int, FoldedConv] | None = None
    """A value, and the strided 1x1 convolution through which it is added."""
    relu: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        """The numbers of the values that it reads."""
        added = () if self.residual is None else (self.residual,)
        return (self.x, *added, *((self.side[0],) if self.side else ()))


@dataclass(frozen=True)
class Plan:
    """The convolutions, and the rest of the network after them."""

    steps: tuple[Step, ...]
    tail: fx.GraphModule

    @property
    def first_reader(self) -> dict[int, int]:
        """By value, the first step that reads it, which in the backward pass is the last to add to its gradient."""
        return {value: i for i in reversed(range(len(self.steps))) for value in self.steps[i].reads}


class _Planner:
    """Goes through the graph once. A convolution waits until it is known what is added to it and whether it is
    rectified."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.modules = dict(graph.named_modules())
        self.side_values: set[int] = set()
        self.order = {node: i for i, node in enumerate(graph.graph.nodes)}
        self.steps: list[Step] = []
        self.values: dict[fx.Node, int] = {}
        self.waiting: dict[fx.Node, Step] = {}

    def take(self, node: fx.Node) -> bool:
        """Whether the node is part of the plan; the first one that is not starts the tail."""
        if node.op == "placeholder" and not self.values:
            self.values[node] = 0
            return True
        layer = self.modules.get(str(node.target)) if node.op == "call_module" else None
        inputs = [argument for argument in node.args if isinstance(argument, fx.Node)]
        if not inputs or any(i not in self.values and i not in self.waiting for i in inputs):
            return False
        if isinstance(layer, FoldedConv):
            self.waiting[node] = Step(layer, self.value(inputs[0]))
        elif isinstance(layer, nn.Identity):
            self._rename(inputs[0], node)
        elif isinstance(layer, nn.ReLU) or node.target in RECTIFIERS:
            return self._rectify(node, inputs[0])
        elif node.target in ADDITIONS and len(inputs) == len(node.args) == 2 and not node.kwargs:  # no alpha
            return self._add(node, inputs)
        else:
            return False
        return True

    def value(self, node: fx.Node) -> int:
        """The number of a node's value; if the node was waiting, its step is added now."""
        if node not in self.values:
            self.steps.append(self.waiting.pop(node))
            self.values[node] = len(self.steps)
        return self.values[node]

    def _rename(self, old: fx.Node, new: fx.Node) -> None:
        self.values[new] = self.value(old)

    def _rectify(self, node: fx.Node, x: fx.Node) -> bool:
        if x not in self.waiting or len(x.users) > 1:
            return False
        self.waiting[x] = replace(self.waiting[x], relu=True)
        self._rename(x, node)
        return True

    def _add(self, node: fx.Node, inputs: Sequence[fx.Node]) -> bool:
        other, main = sorted(inputs, key=self._fitness)
        step = self.waiting.get(main)
        if other is main or step is None or len(main.users) > 1 or step.residual is not None or step.side is not None:
            return False
        if self._overwrites(node):
            return False
        waiting = self.waiting.get(other)
        one_way = waiting is not None and len(other.users) == 1 and waiting.x not in self.side_values
        if waiting is not None and one_way and _is_side(waiting):
            self.side_values.add(waiting.x)
            del self.waiting[other]
            step = replace(step, side=(waiting.x, waiting.layer))
        else:
            step = replace(step, residual=self.value(other))
        del self.waiting[main]
        self.waiting[node] = step
        return True

    def _overwrites(self, node: fx.Node) -> bool:
        """Whether it is an in-place addition to a value that is read again later."""
        target = node.all_input_nodes[0]
        number = self.values.get(target)
        same = [target] if number is None else [other for other, value in self.values.items() if value == number]
        later = any(self.order[user] > self.order[node] for other in same for user in other.users)
        return node.target is operator.iadd and later

    def _fitness(self, node: fx.Node) -> tuple[bool, bool, int]:
        """Of two values to be added, the fitter one takes the other into its own step."""
        step = self.waiting.get(node)
        alone = step is not None and len(node.users) == 1
        return alone, step is not None and not _is_side(step), self.order[node]


def _is_side(step: Step) -> bool:
    layer = step.layer
    plain = step.residual is None and step.side is None and layer.dilation == (1, 1) and layer.groups == 1
    return plain and layer.weight.shape[2:] == (1, 1) and layer.stride == (2, 2) and layer.padding == (0, 0)


def plan(graph: fx.GraphModule) -> Plan:
    """The fused convolutions of a folded network; `CannotFoldError` if it does not start with such a list."""
    planner = _Planner(graph)
    nodes = list(graph.graph.nodes)
    begin = next((i for i, node in enumerate(nodes) if not planner.take(node)), len(nodes))
    if not planner.steps:
        raise CannotFoldError("it does not begin with a convolution")
    rest = nodes[begin:]
    outside = {source for node in rest for source in node.all_input_nodes if source not in rest}
    if len(outside) != 1:
        raise CannotFoldError("its convolutions end in more than one value")
    (features,) = outside
    if planner.value(features) != len(planner.steps) or planner.waiting:
        raise CannotFoldError("a convolution is not part of the chain")
    result = Plan(tuple(planner.steps), _tail(graph, rest, features))
    for value, reader in result.first_reader.items():
        if result.steps[reader].x != value:
            raise CannotFoldError("a value is added before it is convolved")
    if len(result.first_reader) != len(result.steps):
        raise CannotFoldError("a convolution leads nowhere")
    return result


def _tail(graph: fx.GraphModule, nodes: Sequence[fx.Node], features: fx.Node) -> fx.GraphModule:
    tail = fx.Graph()
    made: dict[fx.Node, fx.Node] = {features: tail.placeholder("features")}
    for node in nodes:
        made[node] = tail.node_copy(node, lambda old: made[old])
    return fx.GraphModule(graph, tail)


def mean_and_linear(plan: Plan) -> FoldedLinear | None:
    """The linear layer of a network that ends in exactly the mean over the image and that layer."""
    nodes = list(plan.tail.graph.nodes)
    if len(nodes) != 4:
        return None
    features, mean, linear, _ = nodes
    layer = dict(plan.tail.named_modules()).get(str(linear.target))
    over_image = mean.target == "mean" and mean.kwargs == {"dim": (2, 3)} and mean.args == (features,)
    return layer if over_image and isinstance(layer, FoldedLinear) and linear.args == (mean,) else None


Shape = tuple[int, int, int]
"""Channels, height, width."""


def value_shapes(steps: Sequence[Step], shape: Sequence[int]) -> list[Shape]:
    """The shape of every value for images of `shape`; `CannotFoldError` if an addition would broadcast."""
    shapes: list[Shape] = [(int(shape[0]), int(shape[1]), int(shape[2]))]
    for step in steps:
        made = _after(step.layer, shapes[step.x])
        added = [] if step.residual is None else [shapes[step.residual]]
        added += [] if step.side is None else [_after(step.side[1], shapes[step.side[0]])]
        if any(other != made for other in added):
            raise CannotFoldError("it adds values of different shapes")
        shapes.append(made)
    return shapes


def _after(layer: FoldedConv, shape: Shape) -> Shape:
    height, width = (
        (size + 2 * int(layer.padding[i]) - layer.dilation[i] * (layer.weight.shape[2 + i] - 1) - 1) // layer.stride[i]
        + 1
        for i, size in enumerate(shape[1:])
    )
    return layer.weight.shape[0], height, width
