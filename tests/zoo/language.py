"""Language models: GPT-2, Llama, T5, BERT, mup and Megatron shapes, with the initialisation each
is known for.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.zoo import Model, tokens

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 31, 12


def mask_out(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~keep, float("-inf"))


# GPT-2: one fused projection, a causal mask buffer, normal init scaled for the residual stream


class GPTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer(
            "bias",
            torch.tril(torch.ones((LENGTH, LENGTH), dtype=torch.bool)).view(1, 1, LENGTH, LENGTH),
            persistent=False,
        )
        self.register_buffer("masked_bias", torch.tensor(-1e4), persistent=False)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, HEADS, -1).transpose(1, 2)
            for t in self.c_attn(x).split(WIDTH, dim=2)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        scores = torch.where(self.bias[:, :, :length, :length], scores, self.masked_bias)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class GPTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), GPTAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """Every module is initialised twice, by its constructor and by `apply`; the head is tied."""

    def __init__(self, depth: int = 2, through_data: bool = True):
        super().__init__()
        self.through_data = through_data
        self.wte = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.wpe = nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList([GPTBlock() for _ in range(depth)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * depth))

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            if self.through_data:
                module.weight.data.normal_(mean=0.0, std=0.02)
            else:
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.data.zero_()
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


# Llama: RMS norm, rotary buffers computed by formula, grouped keys


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Rotary(nn.Module):
    """Frequencies kept out of the checkpoint, and tables derived from them on construction."""

    def __init__(self, dim: int, base: float = 10000.0, scale: float | None = None):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        if scale is not None:  # the stretched frequencies of long-context models
            wavelength = 2 * math.pi / inv_freq
            inv_freq = torch.where(wavelength > 8.0, inv_freq / scale, inv_freq)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.original_inv_freq = self.inv_freq
        angles = torch.outer(torch.arange(LENGTH, dtype=torch.float32), self.inv_freq)
        both = torch.cat((angles, angles), dim=-1)
        self.register_buffer(
            "cos_cached", both.cos().to(torch.get_default_dtype()), persistent=False
        )
        self.register_buffer("sin_cached", both.sin()[None, None, :, :], persistent=False)

    def forward(self, x):
        length = x.shape[-2]
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        return x * self.cos_cached[:length] + turned * self.sin_cached[0, 0, :length]


class LlamaAttention(nn.Module):
    def __init__(self, groups: int, scale: float | None):
        super().__init__()
        self.head = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, groups * self.head, bias=False)
        self.v_proj = nn.Linear(WIDTH, groups * self.head, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.rotary_emb = Rotary(self.head, scale=scale)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        scores = self.rotary_emb(q) @ self.rotary_emb(k).transpose(2, 3) / math.sqrt(self.head)
        scores = mask_out(scores, torch.ones(length, length, dtype=torch.bool).tril())
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class LlamaBlock(nn.Module):
    def __init__(self, groups: int, scale: float | None):
        super().__init__()
        self.self_attn = LlamaAttention(groups, scale)
        self.gate_proj = nn.Linear(WIDTH, 24, bias=False)
        self.up_proj = nn.Linear(WIDTH, 24, bias=False)
        self.down_proj = nn.Linear(24, WIDTH, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(
        self, depth: int = 2, groups: int = 2, scale: float | None = None, tied: bool = False
    ):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(LlamaBlock(groups, scale) for _ in range(depth))
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self._init_weights)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class MetaStyleLlama(Llama):
    """The reference layout: complex rotary table, a mask filled by triu, trunc_normal_ at three
    sigma.
    """

    def __init__(self):
        super().__init__()
        angles = torch.outer(
            torch.arange(LENGTH).float(), 1.0 / (500.0 ** (torch.arange(0, 4, 2)[:2].float() / 4))
        )
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)
        mask = torch.full((LENGTH, LENGTH), float("-inf"))
        self.register_buffer("mask", torch.triu(mask, diagonal=1))
        for number, layer in enumerate(self.layers):
            std = 0.02 / (2 * (number + 1)) ** 0.5
            for weight in layer.parameters():
                if weight.dim() == 2:
                    nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-3 * std, b=3 * std)


# T5: one relative position table shared by all layers, factor-scaled init


class T5Attention(nn.Module):
    def __init__(self, table: bool):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        if table:
            self.relative_attention_bias = nn.Embedding(8, HEADS)

    def bias(self, length):
        distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
        bucket = (distance.abs().clamp(max=3) + 4 * (distance > 0).to(torch.int64)).clamp(max=7)
        return self.relative_attention_bias(bucket).permute(2, 0, 1)[None]

    def forward(self, x, bias):
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, HEADS, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(2, 3) + bias).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).reshape(batch, length, WIDTH))


class T5(nn.Module):
    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(T5Attention(table=n == 0) for n in range(2))
        self.decoder = nn.ModuleList(T5Attention(table=n == 0) for n in range(2))
        self.encoder_tokens, self.decoder_tokens = nn.Embedding(1, 1), nn.Embedding(1, 1)
        self.encoder_tokens.weight = self.decoder_tokens.weight = self.shared.weight
        self.norm = RMSNorm(WIDTH)
        self.norm.weight.data.fill_(factor)
        self.shared.weight.data.normal_(mean=0.0, std=factor)
        for layer in [*self.encoder, *self.decoder]:
            layer.q.weight.data.normal_(mean=0.0, std=factor * (WIDTH * 4) ** -0.5)
            for other in (layer.k, layer.v, layer.o):
                other.weight.data.normal_(mean=0.0, std=factor * WIDTH**-0.5)
            if hasattr(layer, "relative_attention_bias"):
                layer.relative_attention_bias.weight.data.normal_(0.0, factor * WIDTH**-0.5)

    def forward(self, ids):
        x = self.shared(ids)
        for stack in (self.encoder, self.decoder):
            bias = stack[0].bias(ids.shape[1])
            for layer in stack:
                x = x + layer(self.norm(x), bias)
        return F.linear(x, self.shared.weight)


# BERT: position_ids expanded, token types zero of the same size, a tied decoder with its own bias


class BertEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(LENGTH).expand((1, -1)))
        self.register_buffer(
            "token_type_ids",
            torch.zeros(self.position_ids.size(), dtype=torch.long),
            persistent=False,
        )

    def forward(self, ids):
        length = ids.shape[1]
        x = self.word_embeddings(ids) + self.position_embeddings(self.position_ids[:, :length])
        return self.LayerNorm(x + self.token_type_embeddings(self.token_type_ids[:, :length]))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embeddings = BertEmbeddings()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 32, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.transform = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        self.decoder = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.decoder.bias = self.bias
        self.decoder.weight = self.embeddings.word_embeddings.weight
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
                if module.padding_idx is not None:
                    with torch.no_grad():
                        module.weight[module.padding_idx].fill_(0)

    def forward(self, ids):
        return self.decoder(self.transform(self.encoder(self.embeddings(ids)))) + self.bias


# Mup and Megatron: attributes on parameters, rescaling, master weights cut into shards


class MupMLP(nn.Module):
    """Rescales its weights in place by a ratio and marks every parameter with its base shape."""

    def __init__(self, width: int = 24, base: int = 8):
        super().__init__()
        self.first, self.hidden = nn.Linear(6, width), nn.Linear(width, width)
        self.readout = nn.Linear(width, 3, bias=False)
        self.output_mult = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        nn.init.kaiming_normal_(self.first.weight, a=1, mode="fan_in")
        nn.init.zeros_(self.readout.weight)
        for name, parameter in self.named_parameters():
            parameter.infshape = (base, *parameter.shape[1:])
            parameter.lr_mult = base / width if name.startswith("hidden") else 1.0
        with torch.no_grad():
            self.hidden.weight *= (base / width) ** 0.5
            self.hidden.bias.data = self.hidden.bias.data * 2 + 1
            self.first.weight.copy_(self.first.weight - self.first.weight.mean())

    def forward(self, x):
        return self.output_mult * self.readout(self.hidden(self.first(x).relu()).tanh())


class ColumnParallelLinear(nn.Module):
    """Draws the full weight in float32, keeps the slice of one rank, marks the parameter."""

    def __init__(self, rank: int, world: int = 2):
        super().__init__()
        rows = 8 // world
        self.weight = nn.Parameter(torch.empty(rows, WIDTH))
        self.bias = nn.Parameter(torch.empty(rows))
        master = torch.empty(8, WIDTH, dtype=torch.float, requires_grad=False)
        nn.init.xavier_normal_(master)
        master = master.to(dtype=torch.get_default_dtype())
        pieces = torch.split(master, rows // 2, dim=0)[rank::world]
        with torch.no_grad():
            torch.cat(pieces, dim=0, out=self.weight)
            self.bias.zero_()
        for parameter in (self.weight, self.bias):
            parameter.tensor_model_parallel, parameter.partition_dim = True, 0

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Megatron(nn.Module):
    def __init__(self):
        super().__init__()
        self.ranks = nn.ModuleList(ColumnParallelLinear(rank) for rank in range(2))
        self.down = nn.Linear(8, WIDTH)
        self.down.weight.sequence_parallel = True

    def forward(self, x):
        return self.down(torch.cat([layer(x) for layer in self.ranks], dim=-1))


def numbers(*shape: int):
    """Evenly spaced inputs of one shape."""
    return lambda: (torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape),)


MODELS = [
    Model("gpt2", GPT, tokens()),
    Model("gpt2 by nn.init", lambda: GPT(through_data=False), tokens()),
    Model("llama", Llama, tokens()),
    Model("llama tied, long context", lambda: Llama(1, 4, scale=8.0, tied=True), tokens()),
    Model("llama in bfloat16", lambda: Llama().to(torch.bfloat16)),
    Model("llama in the reference layout", MetaStyleLlama, tokens()),
    Model("t5", T5, tokens()),
    Model("bert", Bert, tokens()),
    Model("mup", MupMLP, numbers(2, 6)),
    Model("megatron", Megatron, numbers(2, WIDTH)),
]
