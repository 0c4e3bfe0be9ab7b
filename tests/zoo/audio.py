"""Speech, sequence and state-space models: weight norm, codebooks, formulas for decay rates,
complex weights.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo import Model
from tests.zoo.language import numbers

DEPRECATED_NORM = ("ignore:.*weight_norm.*is deprecated",)


class PositionalConv(nn.Module):
    """wav2vec: a grouped convolution drawn by hand, then weight norm over its last dim."""

    def __init__(self):
        super().__init__()
        conv = nn.Conv1d(8, 8, 4, padding=2, groups=2)
        nn.init.normal_(conv.weight, mean=0, std=math.sqrt(4 * (1.0 - 0.1) / (4 * 8)))
        nn.init.constant_(conv.bias, 0)
        self.conv = nn.utils.weight_norm(conv, name="weight", dim=2)
        self.mask_emb = nn.Parameter(torch.FloatTensor(8).uniform_())

    def forward(self, x):
        return self.conv(x + self.mask_emb[:, None])


class Quantizer(nn.Module):
    """A codebook drawn uniformly with a moving-average copy of it, and a Gumbel projection."""

    def __init__(self):
        super().__init__()
        self.vars = nn.Parameter(torch.FloatTensor(1, 6, 4))
        nn.init.uniform_(self.vars)
        self.weight_proj = nn.Linear(4, 6)
        nn.init.normal_(self.weight_proj.weight, mean=0, std=1)
        nn.init.zeros_(self.weight_proj.bias)
        embed = torch.empty(6, 4)
        nn.init.kaiming_uniform_(embed)
        self.register_buffer("inited", torch.Tensor([True]))
        self.register_buffer("cluster_size", torch.zeros(6))
        self.register_buffer("embed", embed)
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x):
        nearest = torch.cdist(x, self.embed).argmin(-1)
        return self.vars[0, self.weight_proj(x).argmax(-1)] + self.embed_avg[nearest]


class SpectrogramStem(nn.Module):
    """A windowed Fourier basis and a triangular filter bank, both computed on construction."""

    def __init__(self, size: int = 16):
        super().__init__()
        window = torch.hann_window(size, periodic=True)
        angles = (
            2 * math.pi * torch.arange(size)[:, None] * torch.arange(size // 2 + 1)[None] / size
        )
        self.register_buffer("basis", torch.stack([angles.cos(), -angles.sin()]) * window[:, None])
        points = torch.linspace(0, size / 2, 6)
        slopes = points.unsqueeze(0) - torch.arange(size // 2 + 1).unsqueeze(1)
        down, up = -slopes[:, :-2] / 2, slopes[:, 2:] / 2
        self.register_buffer(
            "bank", torch.max(torch.zeros(1), torch.min(down, up)), persistent=False
        )
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        power = torch.einsum("bl,klf->kbf", x, self.basis).pow(2).sum(0)
        return self.conv((power @ self.bank)[:, :, None])


class Mamba(nn.Module):
    """Decay rates as logs of integers, a step bias through the inverse of softplus, marked
    parameters.
    """

    def __init__(self, inner: int = 8, state: int = 4):
        super().__init__()
        self.in_proj = nn.Linear(6, inner, bias=False)
        self.dt_proj = nn.Linear(3, inner)
        nn.init.uniform_(self.dt_proj.weight, -(3**-0.5), 3**-0.5)
        low, high = math.log(0.001), math.log(0.1)
        dt = torch.exp(torch.rand(inner) * (high - low) + low).clamp(min=1e-4)
        inverse = dt + torch.log(-torch.expm1(-dt))
        with torch.no_grad():
            self.dt_proj.bias.copy_(inverse)
        self.dt_proj.bias._no_reinit = True
        rates = torch.arange(1, state + 1, dtype=torch.float32).repeat(inner, 1).contiguous()
        self.A_log = nn.Parameter(torch.log(rates))
        self.A_log._no_weight_decay = True
        self.D = nn.Parameter(torch.ones(inner))
        self.D._no_weight_decay = True
        for module in self.modules():
            bias = getattr(module, "bias", None)
            if isinstance(module, nn.Linear) and not getattr(bias, "_no_reinit", bias is None):
                nn.init.zeros_(bias)
        with torch.no_grad():
            self.in_proj.weight /= math.sqrt(2)

    def forward(self, x):
        inner = self.in_proj(x)
        step = F.softplus(self.dt_proj(inner[..., :3]))
        return inner * self.D + (step[..., None] * -self.A_log.exp()).sum(-1)


class DiagonalStateSpace(nn.Module):
    """Complex weights kept as pairs of reals that share one storage."""

    def __init__(self):
        super().__init__()
        real = torch.full((2, 4), 0.5)
        imaginary = math.pi * torch.arange(4).repeat(2, 1)
        self.log_real = nn.Parameter(real.log())
        self.imaginary = nn.Parameter(imaginary)
        self.C = nn.Parameter(torch.view_as_real(torch.randn(2, 4, dtype=torch.cfloat)))
        self.P = nn.Parameter(torch.complex(torch.randn(4), torch.zeros(4)))

    def forward(self, x):
        rate = -self.log_real.exp() + 1j * self.imaginary
        out = (torch.view_as_complex(self.C) * rate * self.P * x[:, :, None]).sum(-1)
        return 2 * out.real


class LSTMEncoder(nn.Module):
    """Recurrent weights initialised gate by gate through chunks of each parameter."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.proj = nn.Linear(8, 3)
        for name, parameter in self.lstm.named_parameters():
            if "weight_ih" in name:
                for gate in parameter.chunk(4, 0):
                    nn.init.xavier_uniform_(gate)
            elif "weight_hh" in name:
                for gate in parameter.chunk(4, 0):
                    nn.init.orthogonal_(gate)
            else:
                parameter.data.fill_(0)
                size = parameter.size(0)
                parameter.data[size // 4 : size // 2].fill_(1)

    def forward(self, x):
        return self.proj(self.lstm(x)[0])


MODELS = [
    Model("wav2vec positions", PositionalConv, numbers(2, 8, 9), warnings=DEPRECATED_NORM),
    Model("quantizer", Quantizer, numbers(2, 3, 4)),
    Model("spectrogram", SpectrogramStem, numbers(2, 16)),
    Model("mamba", Mamba, numbers(2, 6)),
    Model("diagonal state space", DiagonalStateSpace, numbers(3, 2)),
    Model("lstm by gates", LSTMEncoder, numbers(2, 3, 5)),
]
