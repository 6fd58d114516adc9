"""denim-tiny as a module to train: Qwen3.5's text architecture, with its MTP head, in plain torch.

Owns the architecture for training and its initial weights. Parameter names are those of the published
checkpoints, so the state dict is the checkpoint. The linear layers go through `denim.recurrence`. Knows
nothing of files, data or optimisers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from denim.recurrence.gated_delta import gated_delta_chunked, l2norm

SMALLEST_STEP, LARGEST_STEP = 1e-3, 0.1  # of the decay at the start, as in Mamba2 (arXiv 2405.21060)


class Window(NamedTuple):
    """What a layer keeps of the tokens seen so far: a full-attention layer its rotated keys and its values,
    [B, heads, T, d]; a linear layer the convolution's last inputs, [B, channels, width - 1], and its states,
    [B, Hv, d_v, d_k]."""

    first: Tensor
    second: Tensor


class Linear(nn.Linear):
    """A product in the input's dtype; the weight itself stays in fp32 while training."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Zero-centred: scales by 1 + weight, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm (scaled by weight) times silu(gate), in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight * F.silu(gate.float())).to(gate.dtype)


class GatedDeltaNet(nn.Module):
    def __init__(self, c: Mapping) -> None:
        super().__init__()
        self.key_heads, self.value_heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.d_k, self.d_v = c["linear_key_head_dim"], c["linear_value_head_dim"]
        keys, values = self.key_heads * self.d_k, self.value_heads * self.d_v
        hidden = c["hidden_size"]
        self.width = c["linear_conv_kernel_dim"]
        self.conv1d = nn.Conv1d(
            2 * keys + values, 2 * keys + values, self.width, groups=2 * keys + values, bias=False
        )
        self.in_proj_qkv = Linear(hidden, 2 * keys + values)
        self.in_proj_z = Linear(hidden, values)
        self.in_proj_b = Linear(hidden, self.value_heads)
        self.in_proj_a = Linear(hidden, self.value_heads)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.norm = GatedNorm(self.d_v, c["rms_norm_eps"])
        self.out_proj = Linear(values, hidden)

    def project(self, x: Tensor, past: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, log-decay, beta of every token, packed; and the convolution's last inputs.

        x: [B, T, hidden]; past: [B, width - 1, channels].
        """
        mixed = torch.cat((past, self.in_proj_qkv(x)), 1)
        tail = mixed[:, mixed.shape[1] - (self.width - 1) :]
        taps = self.conv1d.weight.to(x.dtype)[:, 0]  # [channels, width]
        length = x.shape[1]
        mixed = F.silu(sum(mixed[:, i : i + length] * taps[:, i] for i in range(self.width)))
        keys = self.key_heads * self.d_k
        q, k, v = mixed.flatten(0, 1).split((keys, keys, self.value_heads * self.d_v), -1)
        q, k = (l2norm(y.unflatten(-1, (self.key_heads, self.d_k)).float()) for y in (q, k))
        v = v.unflatten(-1, (self.value_heads, self.d_v))
        beta = self.in_proj_b(x).float().sigmoid().flatten(0, 1)
        step = F.softplus(self.in_proj_a(x).float() + self.dt_bias).flatten(0, 1)
        return q, k, v, -self.A_log.exp() * step, beta, tail

    def finish(self, out: Tensor, x: Tensor) -> Tensor:
        """out: [B·T, Hv, d_v], x: [B, T, hidden] the layer's input. Returns [B, T, hidden]."""
        z = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.d_v))
        return self.out_proj(self.norm(out.view(z.shape), z).flatten(-2))

    def forward(self, x: Tensor, past: Window | None) -> tuple[Tensor, Window]:
        rows, length = x.shape[:2]
        before = past.first if past else x.new_zeros(rows, self.width - 1, self.conv1d.in_channels)
        q, k, v, log_decay, beta, tail = self.project(x, before)
        out, states = gated_delta_chunked(
            q, k, v, log_decay, beta,
            cu_seqlens=range(0, rows * length + 1, length),
            initial_state=past.second if past else None,
        )  # fmt: skip
        return self.finish(out, x), Window(tail, states)


class Attention(nn.Module):
    def __init__(self, c: Mapping) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        hidden = c["hidden_size"]
        self.q_proj = Linear(hidden, 2 * self.heads * self.d)
        self.k_proj = Linear(hidden, self.kv_heads * self.d)
        self.v_proj = Linear(hidden, self.kv_heads * self.d)
        self.o_proj = Linear(self.heads * self.d, hidden)
        self.q_norm = RMSNorm(self.d, c["rms_norm_eps"])
        self.k_norm = RMSNorm(self.d, c["rms_norm_eps"])
        rope = c["rope_parameters"]
        self.rotary = int(self.d * rope["partial_rotary_factor"])
        self.theta = rope["rope_theta"]

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotates the first `rotary` numbers of each head; x: [B, heads, T, d], from position `start` on."""
        places = torch.arange(start, start + x.shape[2], device=x.device)
        speeds = self.theta ** -(torch.arange(0, self.rotary, 2, device=x.device) / self.rotary)
        angles = places[:, None] * speeds
        cos, sin = angles.cos(), angles.sin()
        a, b, rest = x.split((self.rotary // 2, self.rotary // 2, self.d - self.rotary), -1)
        return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), -1)

    def forward(self, x: Tensor, past: Window | None) -> tuple[Tensor, Window]:
        q, gate = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.d)).chunk(2, -1)
        k, v = (p(x).unflatten(-1, (self.kv_heads, self.d)) for p in (self.k_proj, self.v_proj))
        start = past.first.shape[2] if past else 0
        q = self.rotate(self.q_norm(q).transpose(1, 2), start)
        k = self.rotate(self.k_norm(k).transpose(1, 2), start)
        v = v.transpose(1, 2)
        if past:
            k, v = torch.cat((past.first, k), 2), torch.cat((past.second, v), 2)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(start)
            out = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2) * gate.sigmoid()
        return self.o_proj(out.flatten(-2)), Window(k, v)


class MLP(nn.Module):
    def __init__(self, c: Mapping) -> None:
        super().__init__()
        self.gate_proj = Linear(c["hidden_size"], c["intermediate_size"])
        self.up_proj = Linear(c["hidden_size"], c["intermediate_size"])
        self.down_proj = Linear(c["intermediate_size"], c["hidden_size"])

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Mapping, kind: str) -> None:
        super().__init__()
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def feed(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, past: Window | None = None) -> tuple[Tensor, Window]:
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        mixed, window = mixer(self.input_layernorm(x), past)
        return self.feed(x, mixed), window


class Trunk(nn.Module):
    def __init__(self, c: Mapping) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Block(c, kind) for kind in c["layer_types"])
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class MTP(nn.Module):
    """Predicts the token after the next from the hidden state of a token and the next token's embedding."""

    def __init__(self, c: Mapping) -> None:
        super().__init__()
        hidden, eps = c["hidden_size"], c["rms_norm_eps"]
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps)
        self.fc = Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList(Block(c, "full_attention") for _ in range(c["mtp_num_hidden_layers"]))
        self.norm = RMSNorm(hidden, eps)

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        x = self.fc(torch.cat((self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)), -1))
        for layer in self.layers:
            x, _ = layer(x)
        return self.norm(x)


class Model(nn.Module):
    """The trunk, whose embedding is its head too, and the MTP head. Activations have dtype `dtype`."""

    def __init__(self, c: Mapping, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = Trunk(c)
        self.mtp = MTP(c)
        self.dtype = dtype

    def initialise(self, seed: int) -> None:
        """Initial weights. What writes into the residual stream begins at zero."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            with torch.no_grad():
                if name.endswith("A_log"):
                    p.uniform_(0.5, 16, generator=generator).log_()
                elif name.endswith("dt_bias"):
                    low, high = math.log(SMALLEST_STEP), math.log(LARGEST_STEP)
                    step = p.uniform_(low, high, generator=generator).exp_()
                    p.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
                elif name.endswith("conv1d.weight"):
                    p.uniform_(-0.5, 0.5, generator=generator)
                elif name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                    p.zero_()
                elif p.dim() == 2:
                    p.normal_(0, 0.02 if "embed" in name else p.shape[1] ** -0.5, generator=generator)

    def compile(self) -> None:
        """Compiles everything between the recurrences, once for all layers and lengths."""
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                module.project = torch.compile(module.project, dynamic=True)
                module.finish = torch.compile(module.finish, dynamic=True)
            elif isinstance(module, Block):
                module.feed = torch.compile(module.feed, dynamic=True)
            elif isinstance(module, Attention | RMSNorm):
                module.forward = torch.compile(module.forward, dynamic=True)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.model.embed_tokens.weight).to(self.dtype)

    def hidden(self, ids: Tensor, past: list[Window] | None = None) -> tuple[Tensor, list[Window]]:
        """ids: [B, T]. The normed hidden states [B, T, hidden], and what each layer keeps."""
        x = self.embed(ids)
        windows = []
        for i, layer in enumerate(self.model.layers):
            x, window = layer(x, past[i] if past else None)
            windows.append(window)
        return self.model.norm(x), windows

    def drafts(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """MTP hidden states [B, T, hidden] for the tokens two places on. next_ids: [B, T], those one on."""
        return self.mtp(hidden, self.embed(next_ids))

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype))
