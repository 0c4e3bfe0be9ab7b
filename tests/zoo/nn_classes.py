"""Every module class of `torch.nn`, with arguments that reach each branch of its constructor.

`CASES` maps a class name to calls; `ABSTRACT` lists the classes that are not for building. A
class of the running release that stands in neither fails `test_zoo_nn.py`.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn

ABSTRACT = {"Module", "RNNBase", "RNNCellBase"}

Build = Callable[[type], Any]


def call(*args: Any, **kwargs: Any) -> Build:
    """Build with these plain arguments."""
    return lambda cls: cls(*args, **kwargs)


def _all_of(names: str, *builds: Build) -> dict[str, tuple[Build, ...]]:
    return dict.fromkeys(names.split(), builds)


def _blocks() -> list[nn.Module]:
    return [nn.Linear(3, 4), nn.Linear(4, 2, bias=False)]


def _encoder_layer(**kwargs: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, **kwargs)


def _decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(8, 2, 16)


PLAIN = _all_of(
    """CELU CTCLoss CosineEmbeddingLoss CosineSimilarity CrossMapLRN2d Dropout Dropout1d Dropout2d
    Dropout3d AlphaDropout FeatureAlphaDropout ELU Flatten GELU GLU GaussianNLLLoss Hardshrink
    Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity KLDivLoss L1Loss LeakyReLU
    LogSigmoid LogSoftmax MSELoss MarginRankingLoss Mish MultiLabelMarginLoss PairwiseDistance
    PoissonNLLLoss RReLU ReLU ReLU6 SELU SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softmax2d
    Softmin Softplus Softshrink Softsign Tanh Tanhshrink TripletMarginLoss
    TripletMarginWithDistanceLoss Upsample UpsamplingBilinear2d UpsamplingNearest2d
    Container""",
    call(),
)
PLAIN["CrossMapLRN2d"] = (call(3),)
PLAIN["LinearCrossEntropyLoss"] = (
    call(4, 3),
    lambda cls: cls(4, 3, out_features=(2,), bias=True, weight=torch.rand(3)),
)

POOLS = _all_of(
    """AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d AvgPool1d AvgPool2d AvgPool3d ChannelShuffle CircularPad1d CircularPad2d
    CircularPad3d LocalResponseNorm MaxPool1d MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d
    MaxUnpool3d PixelShuffle PixelUnshuffle ReflectionPad1d ReflectionPad2d ReflectionPad3d
    ReplicationPad1d ReplicationPad2d ReplicationPad3d Unfold ZeroPad1d ZeroPad2d ZeroPad3d
    """,
    call(2),
)
POOLS.update(_all_of("LPPool1d LPPool2d LPPool3d", call(2, 3)))
POOLS.update(_all_of("ConstantPad1d ConstantPad2d ConstantPad3d", call(1, 0.5)))
POOLS.update(_all_of("FractionalMaxPool2d FractionalMaxPool3d", call(2, output_ratio=0.5)))
POOLS["FractionalMaxPool2d"] += (
    lambda cls: cls(2, output_size=3, _random_samples=torch.rand(1, 3, 2)),
)
POOLS["Fold"] = (call((4, 4), 2),)
POOLS["Threshold"] = (call(0.1, 20),)
POOLS["Unflatten"] = (call(1, (2, 2)),)

CONVS: dict[str, tuple[Build, ...]] = {}
for _d in "123":
    CONVS[f"Conv{_d}d"] = (
        call(3, 4, 3),
        call(4, 8, 3, groups=2, bias=False, padding_mode="circular", padding="same"),
        call(2, 2, 1, dtype=torch.float64),
        call(2, 2, 1, dtype=torch.bfloat16),
    )
    CONVS[f"ConvTranspose{_d}d"] = (
        call(3, 4, 3),
        call(4, 4, 2, groups=2, output_padding=0, bias=False),
    )
    CONVS[f"LazyConv{_d}d"] = (call(4, 3), call(4, 3, bias=False))
    CONVS[f"LazyConvTranspose{_d}d"] = (call(4, 3), call(4, 3, bias=False))

NORMS: dict[str, tuple[Build, ...]] = {}
for _d in "123":
    NORMS[f"BatchNorm{_d}d"] = (
        call(5),
        call(5, affine=False),
        call(5, track_running_stats=False, dtype=torch.float64),
    )
    NORMS[f"InstanceNorm{_d}d"] = (call(5), call(5, affine=True, track_running_stats=True))
    NORMS[f"LazyBatchNorm{_d}d"] = (call(), call(affine=False))
    NORMS[f"LazyInstanceNorm{_d}d"] = (call(), call(affine=True))
NORMS["SyncBatchNorm"] = (call(5), lambda cls: cls.convert_sync_batchnorm(nn.BatchNorm2d(4)))
NORMS["GroupNorm"] = (call(2, 6), call(3, 6, affine=False))
NORMS["LayerNorm"] = (call(6), call((3, 6)), call(6, elementwise_affine=False), call(6, 1e-3))
NORMS["RMSNorm"] = (call(6), call((3, 6), eps=1e-3), call(6, elementwise_affine=False))

LOSSES = _all_of("BCELoss", call(), lambda cls: cls(weight=torch.rand(4)))
LOSSES.update(
    _all_of(
        "CrossEntropyLoss NLLLoss NLLLoss2d MultiLabelSoftMarginLoss MultiMarginLoss",
        call(),
        lambda cls: cls(weight=torch.linspace(0, 1, 5)),
    )
)
LOSSES["BCEWithLogitsLoss"] = (
    call(),
    lambda cls: cls(weight=torch.rand(4), pos_weight=torch.full((4,), 2.0)),
)
LOSSES["AdaptiveLogSoftmaxWithLoss"] = (call(16, 20, [4, 10]), call(16, 20, [5], head_bias=True))

LINEARS = {
    "Linear": (
        call(4, 3),
        call(40, 9, bias=False),
        call(4, 3, dtype=torch.float64),
        call(5, 3, dtype=torch.bfloat16),
        call(1, 1),
    ),
    "Bilinear": (call(3, 4, 5), call(3, 4, 5, bias=False)),
    "LazyLinear": (call(3), call(3, bias=False)),
    "PReLU": (call(), call(5, init=0.1)),
    "Embedding": (
        call(10, 3),
        call(10, 3, padding_idx=2),
        call(10, 3, padding_idx=-1, max_norm=1.0, scale_grad_by_freq=True, sparse=True),
        lambda cls: cls(10, 3, _weight=torch.rand(10, 3)),
        lambda cls: cls.from_pretrained(torch.rand(7, 2)),
        lambda cls: cls.from_pretrained(torch.rand(7, 2), freeze=False, padding_idx=1),
    ),
    "EmbeddingBag": (
        call(10, 3),
        call(10, 3, padding_idx=2, mode="sum", include_last_offset=True),
        lambda cls: cls.from_pretrained(torch.rand(7, 2)),
    ),
}

RECURRENT: dict[str, tuple[Build, ...]] = {}
for _name in ("RNN", "GRU", "LSTM"):
    RECURRENT[_name] = (
        call(4, 5),
        call(4, 5, num_layers=2, bidirectional=True, batch_first=True),
        call(4, 5, bias=False, num_layers=3, dropout=0.1),
        call(4, 5, dtype=torch.float64),
    )
    RECURRENT[f"{_name}Cell"] = (call(4, 5), call(4, 5, bias=False))
RECURRENT["LSTM"] += (call(4, 5, proj_size=3, num_layers=2),)
RECURRENT["RNN"] += (call(4, 5, nonlinearity="relu"),)

ATTENTION = {
    "MultiheadAttention": (
        call(8, 2),
        call(8, 2, kdim=3, vdim=5),
        call(8, 2, bias=False, add_bias_kv=True, add_zero_attn=True, batch_first=True),
    ),
    "Transformer": (
        call(8, 2, 1, 2, 16),
        call(8, 2, 1, 1, 16, norm_first=True, batch_first=True, activation="gelu"),
    ),
    "TransformerEncoderLayer": (call(8, 2, 16), call(8, 2, 16, norm_first=True, batch_first=True)),
    "TransformerDecoderLayer": (call(8, 2, 16), call(8, 2, 16, activation="gelu")),
    "TransformerEncoder": (
        lambda cls: cls(_encoder_layer(batch_first=True), 3),
        lambda cls: cls(_encoder_layer(batch_first=True), 2, norm=nn.LayerNorm(8)),
    ),
    "TransformerDecoder": (lambda cls: cls(_decoder_layer(), 2),),
}

CONTAINERS = {
    "Sequential": (lambda cls: cls(*_blocks()),),
    "ModuleList": (lambda cls: cls(_blocks()), call()),
    "ModuleDict": (lambda cls: cls(dict(zip("ab", _blocks()))),),
    "ParameterList": (
        lambda cls: cls([nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(2), False)]),
        lambda cls: cls([torch.randn(3), torch.zeros(2)]),
    ),
    "ParameterDict": (lambda cls: cls({"a": nn.Parameter(torch.randn(3)), "b": torch.rand(2)}),),
    "DataParallel": (lambda cls: cls(nn.Linear(3, 2)),),
}

CASES: dict[str, tuple[Build, ...]] = {
    **PLAIN,
    **POOLS,
    **CONVS,
    **NORMS,
    **LOSSES,
    **LINEARS,
    **RECURRENT,
    **ATTENTION,
    **CONTAINERS,
}

# How to call a lazy module so that it makes its parameters: the shape of one input.
LAZY_INPUTS: dict[str, tuple[int, ...]] = {"LazyLinear": (2, 5)}
for _d in (1, 2, 3):
    for _name in ("LazyConv", "LazyConvTranspose", "LazyBatchNorm", "LazyInstanceNorm"):
        LAZY_INPUTS[f"{_name}{_d}d"] = (2, 3) + (5,) * _d
