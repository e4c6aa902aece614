"""From the `model:` section of a recipe to a network, and the check that a network can be used."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.core.options import Options
from generalist.core.registry import is_import_path, unknown_name
from generalist.models.normalize import Normalized, NormalizeOptions
from generalist.models.registry import MODELS, ModelFactory
from generalist.models.zoo import PREFIX, timm_factory
from generalist.tensors.flat import constants_of
from generalist.tensors.modes import frozen


class ModelOptions(Options):
    """The network, which maps images in [0, 1] to logits."""

    name: str = Field(min_length=1, max_length=200)
    """A network of this library, `timm/NAME` for one of timm's, or `package.module:factory` for your own, which is
    called as factory(num_classes=..., in_channels=..., **options), and only if you say that you trust its code."""

    width: int | None = Field(default=None, ge=1, le=4096)
    """Channels of the first layer of `small`, 32 by default; the time of a step grows with its square."""

    normalize: NormalizeOptions | None = None
    """Shift and scale of the channels as a first layer. By default the network gets the pixels unchanged."""

    options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further arguments of the factory, for `timm/NAME` and import paths."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width is not None and self.name != "small":
            if self.name not in MODELS.names() and not is_import_path(self.name) and not self.name.startswith(PREFIX):
                raise ValueError(unknown_name("model", self.name, MODELS.names()))
            raise ValueError(
                f"`width` belongs to the model `small`: remove it for {self.name!r}, as in --set 'model={{name: NAME}}'"
            )
        if clash := {"num_classes", "in_channels", "in_chans", "width"} & self.options.keys():
            raise ValueError(f"`options` must not hold {sorted(clash)}: data and the other fields decide these")
        return self


def build_model(
    options: ModelOptions,
    *,
    num_classes: int,
    shape: Sequence[int],
    seed: int,
    trust_code: bool = False,
    device: str = "cpu",
) -> nn.Module:
    """The network of `options` for images of `shape` (channels, height, width), on the CPU, with weights drawn by
    `seed`. On the device `meta` it has shapes but takes no memory."""
    channels = _check_problem(num_classes, shape)
    factory = _factory(options, trust_code=trust_code)
    arguments: dict[str, Any] = {"num_classes": num_classes, "in_channels": channels, **options.options}
    if options.width is not None:
        arguments["width"] = options.width
    _check_arguments(options.name, factory, arguments)
    try:
        model = _construct(factory, arguments, seed, device)
        if seed != 0 and isinstance(model, nn.Module) and (tables := constants_of(model)):
            _take(tables, constants_of(_construct(factory, arguments, 0, device)))
    except GeneralistError:
        raise
    except Exception as error:  # what a factory does not take is the recipe's mistake, and each has errors of its own
        raise GeneralistError(
            f"model {options.name!r} cannot be built: {type(error).__name__}: {error}; see model.options"
        ) from error
    if not isinstance(model, nn.Module):
        raise GeneralistError(f"model {options.name!r} gave a {type(model).__name__}, not a torch.nn.Module")
    if options.normalize is None:
        return model
    if len(options.normalize.mean) != channels:
        raise GeneralistError(
            f"model.normalize has {len(options.normalize.mean)} means and stds for images of {channels} channels: "
            "give one per channel"
        )
    return Normalized(model, options.normalize)


@torch.no_grad()
def _take(tables: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Copy tables and masks. They belong to the architecture even if a factory draws them at random: weights trained
    with those of one seed would make no sense with those of another."""
    for name, table in tables.items():
        if name in others and others[name].shape == table.shape:
            table.copy_(others[name])


def check_size(options: ModelOptions, state: Mapping[str, Tensor], *, num_classes: int, shape: Sequence[int]) -> None:
    """Refuse weights that do not fit a network of this library, before memory is allocated for it.

    Networks by import path or from timm are not checked, because their factories may need real tensors.
    """
    if options.name not in MODELS.names():
        return
    empty = build_model(options, num_classes=num_classes, shape=shape, seed=0, device="meta")
    for name, tensor in empty.state_dict().items():
        if name not in state or state[name].shape != tensor.shape:
            raise GeneralistError(f"the weights do not fit this architecture: {name!r} is missing or of another size")


def check_model(model: nn.Module, shape: Sequence[int], num_classes: int, device: torch.device | str) -> None:
    """Refuse a model that does not map images of `shape` (channels, height, width) to `num_classes` finite logits.

    Runs it on two images, in eval mode, and leaves it as it was.
    """
    _check_problem(num_classes, shape)
    dtype = _parameter_dtype(model)
    images = random.uniform(0, "check-model", shape=(2, *shape), device=device).to(dtype)
    given = images.clone()
    try:
        with frozen(model), torch.no_grad():
            logits: object = model(images)
    except Exception as error:
        raise GeneralistError(
            f"the model fails on images [2, {', '.join(map(str, shape))}] on {device}: {type(error).__name__}: {error}"
        ) from error
    if not torch.equal(images, given):  # whoever comes next, an attack or another learner, would get other images
        raise GeneralistError("the model changes the images that it is given: write x = x - mean, not x -= mean")
    _check_logits(logits, num_classes)


def _construct(factory: ModelFactory, arguments: dict[str, Any], seed: int, device: str) -> nn.Module:
    """Call the factory with weights that depend on the seed alone.

    The initialisers of torch, timm and users draw from torch's generator: this is the one place that seeds it. On the
    CPU, so that the device does not matter, and the caller's generator is as it was afterwards.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(seed)
        return factory(**arguments)


def _factory(options: ModelOptions, *, trust_code: bool) -> ModelFactory:
    if not options.name.startswith(PREFIX):
        return MODELS.get(options.name, trust_code=trust_code)
    # timm unpickles this file, which can run code as well as an import can.
    if "checkpoint_path" in options.options and not trust_code:
        raise GeneralistError(
            "model.options.checkpoint_path may run code from that file; "
            "if you trust it, pass --trust-code (API: trust_code=True)"
        )
    return timm_factory(options.name.removeprefix(PREFIX))


def _check_arguments(name: str, factory: ModelFactory, arguments: dict[str, Any]) -> None:
    """Say which argument a factory does not take, before it runs: a TypeError from inside it means something else."""
    if not callable(factory):
        raise GeneralistError(f"model {name!r} is a {type(factory).__name__}, not a factory of models")
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise GeneralistError(
            f"model {name!r} cannot be called with {', '.join(arguments)}: {error}; see model.options"
        ) from error


def _check_problem(num_classes: int, shape: Sequence[int]) -> int:
    """The number of channels."""
    if num_classes < 2:
        raise GeneralistError(f"a classifier needs at least 2 classes, not {num_classes}")
    if len(shape) != 3 or min(shape) < 1:
        raise GeneralistError(f"the shape of an image is (channels, height, width), not {tuple(shape)}")
    return shape[0]


def _parameter_dtype(model: nn.Module) -> torch.dtype:
    """The one floating type of the parameters; float32 where there are none."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise GeneralistError(
            f"the model's parameters are of several types ({', '.join(sorted(map(str, dtypes)))}): "
            "convert them to one, for example with model.float()"
        )
    dtype = dtypes.pop() if dtypes else torch.float32
    if not dtype.is_floating_point:
        raise GeneralistError(f"the model's parameters are {dtype}: a float type is needed, as after model.float()")
    return dtype


def _check_logits(logits: object, num_classes: int) -> None:
    if not isinstance(logits, Tensor):
        raise GeneralistError(
            f"the model gives a {type(logits).__name__}, not a tensor of logits: wrap it in a module that returns those"
        )
    if logits.shape != (2, num_classes):
        raise GeneralistError(
            f"the model gives {list(logits.shape)} for 2 images, but {num_classes} classes need [2, {num_classes}]"
        )
    if not logits.is_floating_point():
        raise GeneralistError(f"the model gives {logits.dtype}: logits must be floats, not labels")
    if not bool(logits.isfinite().all()):
        raise GeneralistError("the model gives nan or inf on images in [0, 1]: its weights may be damaged")
