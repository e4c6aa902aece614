"""A network in evaluation mode with BatchNorm folded into its convolutions: exactly what an attack needs.

`fold` traces a network and gives a `FoldedNetwork` of the same function: convolutions whose weights include the scale
of the BatchNorm behind them, in the precision of the attack, without gradients for the weights. When the weights
change, `refresh` copies the new ones in place, so it may be part of a captured CUDA graph. A network that cannot be
traced, or has layers unknown here, is not folded, and `fold` says why.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from generalist.tensors.capture import Recorder
from generalist.tensors.modes import frozen

HARMLESS = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.Tanh,
    nn.Sigmoid,
    nn.Identity,
    nn.Dropout,
    nn.Dropout2d,
    nn.Flatten,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
)
"""Layers without weights, which are kept as they are, in evaluation mode."""


class CannotFoldError(Exception):
    """Says why a network is not folded."""


class FoldedConv(nn.Module):
    """A convolution and the BatchNorm behind it as one convolution with a bias."""

    weight: Tensor
    bias: Tensor

    def __init__(self, conv: nn.Conv2d, batchnorm: nn.BatchNorm2d | None, dtype: torch.dtype) -> None:
        super().__init__()
        if conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise CannotFoldError(f"a convolution pads by {conv.padding_mode!r} and {conv.padding!r}")
        self.source, self.batchnorm = [conv], [batchnorm]  # in lists, so that they do not become submodules
        self.stride, self.padding = conv.stride, conv.padding
        self.dilation, self.groups = conv.dilation, conv.groups
        weight = torch.empty_like(conv.weight, dtype=dtype, requires_grad=False)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", torch.empty(conv.out_channels, dtype=dtype, device=weight.device))

    @torch.no_grad()
    def refresh(self) -> None:
        conv, batchnorm = self.source[0], self.batchnorm[0]
        weight, bias = conv.weight, conv.bias
        if batchnorm is not None:
            scale, shift = affine(batchnorm)
            weight = weight * scale.reshape(-1, 1, 1, 1)
            bias = shift if bias is None else shift + bias * scale
        self.weight.copy_(weight)
        self.bias.copy_(bias) if bias is not None else self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class FoldedLinear(nn.Module):
    """A linear layer with constant weights."""

    weight: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.source = [linear]
        self.register_buffer("weight", torch.empty_like(linear.weight, dtype=dtype, requires_grad=False))
        self.register_buffer("bias", torch.empty(linear.out_features, dtype=dtype, device=linear.weight.device))

    @torch.no_grad()
    def refresh(self) -> None:
        linear = self.source[0]
        self.weight.copy_(linear.weight)
        self.bias.copy_(linear.bias) if linear.bias is not None else self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class FoldedNorm(nn.Module):
    """A BatchNorm without a convolution before it, as a scale and a shift of the channels."""

    scale: Tensor
    shift: Tensor

    def __init__(self, batchnorm: nn.BatchNorm2d, dtype: torch.dtype) -> None:
        super().__init__()
        self.source = [batchnorm]
        mean = _running(batchnorm)[0]
        for name in ("scale", "shift"):
            self.register_buffer(name, torch.empty_like(mean, dtype=dtype).reshape(-1, 1, 1))

    @torch.no_grad()
    def refresh(self) -> None:
        scale, shift = affine(self.source[0])
        self.scale.copy_(scale.reshape(-1, 1, 1))
        self.shift.copy_(shift.reshape(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


class FoldedConstant(nn.Module):
    """A tensor of the network that is neither a weight nor a statistic, such as the mean of the pixels."""

    value: Tensor

    def __init__(self, source: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.source = [source]
        self.register_buffer("value", torch.empty_like(source, dtype=dtype if source.is_floating_point() else None))

    @torch.no_grad()
    def refresh(self) -> None:
        self.value.copy_(self.source[0])

    def forward(self) -> Tensor:
        return self.value


Folded = FoldedConv | FoldedLinear | FoldedNorm | FoldedConstant


class FoldedNetwork:
    """Maps images to logits like the network that it was made from, in evaluation mode as of the last `refresh`."""

    recorder: Recorder | None = None
    """If there is one, callers' loops around the network are recorded and replayed."""

    def __init__(self, graph: fx.GraphModule, dtype: torch.dtype) -> None:
        self.graph, self.dtype = graph, dtype
        self.layers: list[Folded] = [m for m in graph.modules() if isinstance(m, Folded)]
        self.refresh()

    def refresh(self) -> None:
        """Copy the network's current weights and statistics."""
        for layer in self.layers:
            layer.refresh()

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.graph(x.to(self.dtype))
        return logits

    @torch.no_grad()
    def operations(self, x: Tensor) -> float:
        """Additions and multiplications of a forward pass, in convolutions and matrix products.

        Counted by hooks, because a dispatch mode, as in PyTorch's own counter, would keep process groups alive.
        """
        counts = list[int]()

        def count(layer: nn.Module, given: object, out: Tensor) -> None:
            assert isinstance(layer, FoldedConv | FoldedLinear), "there are hooks on no others"
            counts.append(2 * out.numel() * layer.weight[0].numel())

        hooks = [m.register_forward_hook(count) for m in self.layers if isinstance(m, FoldedConv | FoldedLinear)]
        try:
            self.graph(x.to(self.dtype))
        finally:
            for hook in hooks:
                hook.remove()
        return float(sum(counts))


def affine(batchnorm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """BatchNorm's scale and shift in evaluation mode."""
    mean, variance = _running(batchnorm)
    scale = torch.rsqrt(variance + batchnorm.eps)
    scale = scale if batchnorm.weight is None else scale * batchnorm.weight
    shift = -mean * scale
    return scale, shift if batchnorm.bias is None else shift + batchnorm.bias


def _running(batchnorm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    if batchnorm.running_mean is None or batchnorm.running_var is None:
        raise CannotFoldError("a BatchNorm keeps no running statistics")
    return batchnorm.running_mean, batchnorm.running_var


def fold(model: nn.Module, dtype: torch.dtype, *, compiled: bool = False) -> FoldedNetwork:
    """The network in evaluation mode, folded, computing in `dtype`; `CannotFoldError` says why it is impossible."""
    network = FoldedNetwork(trace(model, dtype), dtype)
    if compiled:
        network.graph.compile(dynamic=False)
    return network


def check_trace(model: nn.Module, x: Tensor, *, close: float = 1e-2) -> None:
    """Refuse to fold a network whose folded form answers these few images differently. A GPU's convolutions keep three
    digits of float32, hence `close`; a trace that took another path through the network's code is further off."""
    with frozen(model), torch.no_grad():
        wanted = model.forward(x)  # not the call itself, which if compiled would be compiled for so few images, too
    check_answers(fold(model, x.dtype), wanted, x, close=close)


@torch.no_grad()
def check_answers(network: FoldedNetwork, wanted: Tensor, x: Tensor, *, close: float) -> None:
    """Refuse a form whose answers differ from `wanted`, the network's, by more than `close` as a share of the largest
    logit: a tracer sees only one path through a network's code."""
    try:
        found = network(x).to(wanted.dtype)
    except RuntimeError as error:  # its layers meet an input that they were not folded for
        raise CannotFoldError(f"its folded form fails ({str(error).splitlines()[0]})") from error
    scale = wanted.abs().amax().clamp_min(torch.finfo(wanted.dtype).tiny)
    if found.shape != wanted.shape or not bool(((found - wanted).abs() <= close * scale).all()):
        raise CannotFoldError("its folded form gives other answers")


class _Proxy(fx.Proxy):
    """Records `a += b` as such; fx records `a = a + b`, whose result other references to `a` would not see."""

    def _in_place(self, operation: Callable[[Any, Any], Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operation, (self, other), {})

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)


class _Tracer(fx.Tracer):
    """Puts computations from buffers into the graph, as constants would keep the values of the time of tracing."""

    proxy_buffer_attributes = True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def trace(model: nn.Module, dtype: torch.dtype) -> fx.GraphModule:
    """The network's graph with folded layers in it."""
    own = [(module, dict(vars(module))) for module in model.modules()]
    try:
        return _folded(model, _traced(model), dtype)
    finally:
        for module, attributes in own:  # a tracer leaves constants there, and a forward may store its input
            vars(module).clear()
            vars(module).update(attributes)


def _traced(model: nn.Module) -> fx.GraphModule:
    _refuse_hooks(model, "")
    try:
        with frozen(model):  # traced as in evaluation mode
            return fx.GraphModule(model, _Tracer().trace(model))
    except Exception as error:  # a tracer runs the model's own code, which may fail in any way
        lines = str(error).strip().splitlines() or ["without a word"]
        raise CannotFoldError(f"it cannot be traced ({type(error).__name__}: {lines[0]})") from error


def _folded(model: nn.Module, traced: fx.GraphModule, dtype: torch.dtype) -> fx.GraphModule:
    modules = dict(model.named_modules())
    done: set[fx.Node] = set()
    for i, node in enumerate(list(traced.graph.nodes)):
        if node in done or node.op not in ("call_module", "get_attr"):
            continue
        if node.op == "call_module":
            layer, last = _folded_layer(node, modules, dtype)
        else:
            layer, last = FoldedConstant(_constant(model, str(node.target)), dtype), node
        name = f"layer_{i}"
        traced.add_module(name, layer)
        # In the convolution's place instead of its BatchNorm's: code in between may change its input in place.
        with traced.graph.inserting_before(node):
            new = traced.graph.call_module(name, node.args)
        last.replace_all_uses_with(new)
        for old in dict.fromkeys((last, node)):
            traced.graph.erase_node(old)
            done.add(old)
    return fx.GraphModule(traced, traced.graph)  # with only the layers that the graph names


def _folded_layer(node: fx.Node, modules: dict[str, nn.Module], dtype: torch.dtype) -> tuple[nn.Module, fx.Node]:
    """The replacement of a layer, and the last node that it stands for."""
    layer = modules[str(node.target)]
    _refuse_hooks(layer, str(node.target))
    if node.kwargs or len(node.args) != 1 or not isinstance(node.args[0], fx.Node):
        raise CannotFoldError(f"its layer {node.target!r} is called with more than one tensor")
    if type(layer) is nn.Conv2d:
        batchnorm, last = _norm_behind(node, modules)
        return FoldedConv(layer, batchnorm, dtype), last
    if type(layer) is nn.BatchNorm2d:
        return FoldedNorm(layer, dtype), node
    if type(layer) is nn.Linear:
        return FoldedLinear(layer, dtype), node
    if type(layer) in HARMLESS:
        return copy.deepcopy(layer).eval(), node
    raise CannotFoldError(f"its layer {node.target!r} is a {type(layer).__name__}")


def _norm_behind(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[nn.BatchNorm2d | None, fx.Node]:
    """The BatchNorm that alone reads a convolution's answer, with its node; without one, the convolution's own node."""
    follower = _only_user(node)
    if follower is None or follower.op != "call_module" or follower.args != (node,) or follower.kwargs:
        return None, node
    layer = modules[str(follower.target)]
    if not isinstance(layer, nn.BatchNorm2d) or type(layer) is not nn.BatchNorm2d:
        return None, node
    _refuse_hooks(layer, str(follower.target))
    _running(layer)
    return layer, follower


def _refuse_hooks(layer: nn.Module, name: str) -> None:
    """Refuse hooks, which would be left out: they may change weights (as spectral normalisation), inputs or answers."""
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        where = f"its layer {name!r}" if name else "it"
        raise CannotFoldError(f"{where} has hooks")


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _constant(model: nn.Module, path: str) -> Tensor:
    value: Any = model
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, nn.Parameter):
        raise CannotFoldError(f"it uses the parameter {path!r} outside of a layer")
    if not isinstance(value, Tensor):
        raise CannotFoldError(f"it uses {path!r}, which is no tensor")
    return value
