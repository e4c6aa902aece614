"""ONNX: the network as a graph that runs without PyTorch, kept only if it gives the same answers as the network."""

from __future__ import annotations

import importlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from generalist.core import random
from generalist.core.errors import GeneralistError
from generalist.core.files import write_bytes
from generalist.export.source import Source

TOLERANCE = 1e-4
"""How far logits may be apart: absolutely, or relative to the largest if that is above 1."""
BATCHES = (1, 5)
"""Batch sizes that are tried, neither of them the traced one: the number of images must stay variable."""


def write_onnx(source: Source, path: Path) -> list[str]:
    """Input `image` [batch, channels, height, width] in [0, 1], output `logits`; the normalization is inside."""
    for name in ("onnx", "onnxscript"):  # PyTorch's exporter imports them, and its own complaint is less clear
        _need(name)
    runtime = _need("onnxruntime")
    odd = {str(tensor.dtype) for tensor in source.model.parameters() if tensor.dtype != torch.float32}
    if odd:
        raise GeneralistError(f"this network computes in {odd.pop()}: ONNX files hold only float32 networks")
    data = _traced(source)
    worst = _difference(runtime, data, source)
    if not worst <= TOLERANCE:
        raise GeneralistError(
            f"the ONNX graph's logits are {worst:.2g} away from the network's, more than {TOLERANCE:g}: nothing is kept"
        )
    write_bytes(path, data)
    return [
        f"input: image [batch, {', '.join(map(str, source.shape))}], float32 in [0, 1]; output: logits",
        f"checked with onnxruntime {runtime.__version__}: logits differ from PyTorch's by {worst:.1e} at most",
    ]


def _need(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise GeneralistError(
            f"an export to ONNX needs {name}: pip install 'generalist-at[export]' ({error})"
        ) from error


def _traced(source: Source) -> bytes:
    """The bytes of the model file."""
    example = random.uniform(0, "export", shape=(2, *source.shape))
    batch = torch.export.Dim("batch")
    try:
        with warnings.catch_warnings(), _quiet("torch.onnx"), _quiet("onnxscript"):
            warnings.simplefilter("ignore")  # about the exporter's own future; what matters is checked below
            program = torch.onnx.export(
                source.model,
                (example,),
                dynamo=True,
                dynamic_shapes=({0: batch},),
                input_names=["image"],
                output_names=["logits"],
                verbose=False,
            )
        assert program is not None
        program.model.metadata_props["generalist"] = json.dumps(source.about)
        data: bytes = program.model_proto.SerializeToString()
    except Exception as error:  # the exporter passes on any exception of a user's network
        reason = " ".join(str(error).split())[:300]
        raise GeneralistError(f"this network cannot be written as ONNX: {type(error).__name__}: {reason}") from error
    return data


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Within this context the logger reports only errors."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _difference(runtime: Any, data: bytes, source: Source) -> float:
    """The largest distance between the logits of the two networks, on the scale of the tolerance."""
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])
    worst = 0.0
    for size in BATCHES:
        images = random.uniform(1, "export", shape=(size, *source.shape))
        with torch.no_grad():
            expected = source.model(images)
        (found,) = session.run(["logits"], {"image": images.numpy()})
        if found.shape != tuple(expected.shape):
            return float("inf")
        scale = max(1.0, float(expected.abs().max()))
        distance = float((torch.from_numpy(found) - expected).abs().max()) / scale
        if not distance <= TOLERANCE:  # true for nan as well
            return distance
        worst = max(worst, distance)
    return worst
