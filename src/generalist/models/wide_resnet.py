"""Wide residual networks (Zagoruyko and Komodakis, 2016) for 32x32 images."""

from __future__ import annotations

from torch import nn

from generalist.models.layers import he_init
from generalist.models.preact import PreactNet
from generalist.models.registry import MODELS


def wide_resnet(*, num_classes: int, in_channels: int, blocks: int, widen: int) -> nn.Module:
    """Three stages of `blocks` pre-activation blocks with 16, 32 and 64 channels times `widen`."""
    model = PreactNet(
        num_classes=num_classes,
        in_channels=in_channels,
        stem_channels=16,
        stage_channels=[16 * widen, 32 * widen, 64 * widen],
        blocks=blocks,
    )
    he_init(model)
    nn.init.zeros_(model.classifier.bias)
    return model


@MODELS.register("wrn-10-1")
def wrn_10_1(*, num_classes: int, in_channels: int) -> nn.Module:
    return wide_resnet(num_classes=num_classes, in_channels=in_channels, blocks=1, widen=1)


@MODELS.register("wrn-28-10")
def wrn_28_10(*, num_classes: int, in_channels: int) -> nn.Module:
    return wide_resnet(num_classes=num_classes, in_channels=in_channels, blocks=4, widen=10)


# 5 blocks a stage are 30 layers. With the stem and the three shortcuts the depth is 34, the usual name; the Generalist
# papers call the same network WRN-32-10. It is one network under two names.
@MODELS.register("wrn-32-10")
@MODELS.register("wrn-34-10")
def wrn_34_10(*, num_classes: int, in_channels: int) -> nn.Module:
    return wide_resnet(num_classes=num_classes, in_channels=in_channels, blocks=5, widen=10)
