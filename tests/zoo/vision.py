"""Vision models: ViT, Swin, ResNet, ConvNeXt, U-Net and detector shapes, initialised as in public
code.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo import Model, image

WIDTH = 12


class DropPath(nn.Module):
    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or self.rate == 0.0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Mlp(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class ViTBlock(nn.Module):
    def __init__(self, drop_path: float, layer_scale: float | None):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp, self.drop_path = Mlp(WIDTH), DropPath(drop_path)
        self.gamma = None
        if layer_scale is not None:
            self.gamma = nn.Parameter(layer_scale * torch.ones(WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        y = self.proj((q @ k.transpose(1, 2) / math.sqrt(WIDTH)).softmax(-1) @ v)
        x = x + self.drop_path(y if self.gamma is None else self.gamma * y)
        return x + self.drop_path(self.mlp(self.norm2(x)))


def init_vit(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Conv2d):
        fan_in = module.in_channels * module.kernel_size[0] * module.kernel_size[1]
        nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / fan_in))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.constant_(module.bias, 0)
        nn.init.constant_(module.weight, 1.0)


class ViT(nn.Module):
    """Drop-path rates read one by one from a tensor; positions and class token by trunc_normal_."""

    def __init__(self, depth: int = 3, layer_scale: float | None = None, sine: bool = False):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        rates = [x.item() for x in torch.linspace(0, 0.1, depth)]
        self.blocks = nn.Sequential(*[ViTBlock(rate, layer_scale) for rate in rates])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        self.apply(init_vit)
        for number, block in enumerate(self.blocks):
            block.proj.weight.data.div_(math.sqrt(2.0 * (number + 1)))
        nn.init.zeros_(self.head.weight)
        if sine:
            self.pos_embed = nn.Parameter(sine_table(4, WIDTH), requires_grad=False)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


def sine_table(side: int, dim: int) -> torch.Tensor:
    """The fixed two-dimensional sine positions of masked autoencoders, with a zero row in front."""
    omega = 1.0 / 10000 ** (torch.arange(dim // 4, dtype=torch.float64) / (dim / 4))
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"))
    angles = grid.reshape(2, -1).double()[..., None] * omega
    table = torch.cat([angles.sin(), angles.cos()], dim=-1).permute(1, 0, 2).reshape(side**2, dim)
    return torch.cat([torch.zeros(1, dim), table.float()]).unsqueeze(0)


class WindowAttention(nn.Module):
    """Swin: a learned table of relative positions and an index buffer made by broadcasting."""

    def __init__(self, window: int = 2, heads: int = 2):
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        coords = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        )
        flat = torch.flatten(coords, 1)
        relative = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += window - 1
        relative[:, :, 1] += window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones((heads, 1, 1))))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        length = self.qkv.bias.numel() // 3
        self.qkv.bias[length : 2 * length].data.zero_()

    def forward(self, x):
        windows, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(windows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        scores = scores * torch.clamp(self.logit_scale, max=4.6).exp()
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        scores = scores + bias.view(length, length, -1).permute(2, 0, 1)[None]
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(windows, length, WIDTH)


class Swin(nn.Module):
    def __init__(self, resolution: int = 4, window: int = 2, shift: int = 1):
        super().__init__()
        self.window = window
        self.patch_embed = nn.Conv2d(3, WIDTH, 4, 4)
        rates = torch.linspace(0, 0.2, 4).tolist()
        self.attention = nn.ModuleList(WindowAttention(window) for _ in rates)
        self.drop_path = nn.ModuleList(DropPath(rate) for rate in rates)
        self.reduction = nn.Linear(WIDTH, 4, bias=False)
        self.apply(init_vit)
        self.register_buffer("attn_mask", self._shifted_mask(resolution, shift))

    def _shifted_mask(self, resolution: int, shift: int) -> torch.Tensor:
        regions = torch.zeros((1, resolution, resolution, 1))
        parts = (slice(0, -self.window), slice(-self.window, -shift), slice(-shift, None))
        count = 0
        for rows in parts:
            for columns in parts:
                regions[:, rows, columns, :] = count
                count += 1
        split = resolution // self.window
        windows = regions.view(1, split, self.window, split, self.window, 1)
        windows = windows.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2)
        mask = windows.unsqueeze(1) - windows.unsqueeze(2)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2).reshape(-1, self.window**2, WIDTH)
        for attention, drop_path in zip(self.attention, self.drop_path):
            x = x + drop_path(attention(x))
        return self.reduction(x)


class BasicBlock(nn.Module):
    def __init__(self, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width * stride, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width * stride)
        self.conv2 = nn.Conv2d(width * stride, width * stride, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width * stride)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(width, width * stride, 1, stride, bias=False),
                nn.BatchNorm2d(width * stride),
            )

    def forward(self, x):
        short = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + short)


class ResNet(nn.Module):
    """Kaiming init over `modules()`, then the last norm of each block set to zero."""

    def __init__(self, zero_init_residual: bool = True):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 7, 2, 3, bias=False)
        self.layers = nn.Sequential(BasicBlock(4, 1), BasicBlock(4, 2), BasicBlock(8, 2))
        self.fc = nn.Linear(16, 5)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
                nn.init.constant_(module.weight, 1)
                nn.init.constant_(module.bias, 0)
        if zero_init_residual:
            for module in self.modules():
                if isinstance(module, BasicBlock):
                    nn.init.constant_(module.bn2.weight, 0)

    def forward(self, x):
        return self.fc(self.layers(F.relu(self.stem(x))).mean((2, 3)))


class ConvNeXt(nn.Module):
    def __init__(self):
        super().__init__()
        rates = [r.tolist() for r in torch.linspace(0, 0.3, 4).split([1, 3])]
        self.rates = rates
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.depthwise = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.gamma = nn.Parameter(1e-6 * torch.ones(8), requires_grad=True)
        self.head = nn.Linear(8, 5)
        self.apply(init_vit)
        self.head.weight.data.mul_(0.5)
        self.head.bias.data.mul_(0.5)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.gamma[:, None, None] * self.depthwise(x)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """A denoiser: a table of noise levels by cumulative product, and output layers set to zero."""

    def __init__(self):
        super().__init__()
        betas = torch.linspace(1e-4**0.5, 0.02**0.5, 10, dtype=torch.float64) ** 2
        alphas = torch.cumprod(1.0 - betas, dim=0)
        before = torch.cat([torch.ones(1, dtype=torch.float64), alphas[:-1]])
        for name, value in (
            ("betas", betas),
            ("sqrt_alphas", alphas.sqrt()),
            ("sqrt_rest", (1.0 - alphas).sqrt()),
            ("variance", torch.log((betas * (1 - before) / (1 - alphas)).clamp(min=1e-20))),
        ):
            self.register_buffer(name, value.to(torch.float32))
        self.register_buffer(
            "freqs", torch.exp(-math.log(1e4) * torch.arange(4) / 4), persistent=False
        )
        self.fourier = nn.Parameter(torch.randn(4) * 16.0, requires_grad=False)
        self.down = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.out = nn.Conv2d(8, 3, 2)
        for parameter in self.out.parameters():
            parameter.detach().zero_()

    def forward(self, x):
        return self.out(self.up(F.silu(self.norm(self.down(x)))))


class Detector(nn.Module):
    """Anchors and offsets computed from shapes, a focal bias prior, a frozen batch norm."""

    def __init__(self):
        super().__init__()
        self.query_embed = nn.Embedding(6, 8)
        self.scale = nn.ParameterList([nn.Parameter(torch.ones(1) * s) for s in (1.0, 2.0)])
        self.cls_logits = nn.Conv2d(8, 4, 3)
        nn.init.normal_(self.cls_logits.weight, std=0.01)
        nn.init.constant_(self.cls_logits.bias, -math.log((1 - 0.01) / 0.01))
        for name, value in (("weight", torch.ones(8)), ("running_var", torch.ones(8) - 1e-5)):
            self.register_buffer(f"frozen_{name}", value)
        self.offsets = nn.Linear(8, 16)
        nn.init.constant_(self.offsets.weight.data, 0.0)
        angles = torch.arange(4, dtype=torch.float32) * (2.0 * math.pi / 4)
        grid = torch.stack([angles.cos(), angles.sin()], -1)
        grid = (grid / grid.abs().max(-1, keepdim=True)[0]).view(4, 1, 2).repeat(1, 2, 1)
        for point in range(2):
            grid[:, point, :] *= point + 1
        with torch.no_grad():
            self.offsets.bias = nn.Parameter(grid.view(-1))
        nn.init.xavier_uniform_(self.query_embed.weight.data, gain=0.5)
        ratios, scales = torch.as_tensor([0.5, 1.0, 2.0]), torch.as_tensor([4.0, 8.0])
        heights = (ratios.sqrt()[:, None] * scales[None, :]).view(-1)
        widths = ((1 / ratios.sqrt())[:, None] * scales[None, :]).view(-1)
        self.cell_anchors = [
            (torch.stack([-widths, -heights, widths, heights], dim=1) / 2).round().to(dtype)
            for dtype in (torch.float32, torch.int64)
        ]


MODELS = [
    Model("vit", ViT, image()),
    Model("vit with layer scale", lambda: ViT(2, layer_scale=1e-5), image()),
    Model("vit with sine positions", lambda: ViT(2, sine=True), image()),
    Model("swin", Swin, image()),
    Model("resnet", ResNet, image()),
    Model("convnext", ConvNeXt, image()),
    Model("unet", UNet, image()),
    Model("detector", Detector),
]
