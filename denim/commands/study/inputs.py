"""What the precision study feeds to the rule and to the model.

Owns random inputs, texts, and the capture of real activations. Knows the engine and its Gated DeltaNet layer;
must not know what is measured on the inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from denim.commands.study.drift import RuleInputs
from denim.engine import LLM
from denim.engine.tokenizer import need_tokenizer
from denim.errors import RequestError
from denim.layers.gated_delta_net import GatedDeltaNetLayer
from denim.recurrence.gated_delta import l2norm
from denim.recurrence.short_conv import short_conv
from denim.sampling_params import SamplingParams

HALF_LIVES = (64, 512, 4096, None)  # tokens in which a head's state fades by half; None: it never fades
HEAD_DIM = 64
OPENING = "The"  # what denim-tiny continues where no text is given


def random_inputs(tokens: int, device: torch.device | str = "cpu") -> RuleInputs:
    """Independent tokens: normal q, k, v (q and k normalised), β uniform in (0, 1), a decay per head.
    The same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    heads = len(HALF_LIVES)
    q, k, v = (torch.randn(tokens, heads, HEAD_DIM, generator=generator) for _ in range(3))
    log_half = torch.tensor(0.5).log()
    log_decay = torch.tensor([0.0 if life is None else log_half / life for life in HALF_LIVES])
    beta = torch.rand(tokens, heads, generator=generator)
    parts = (l2norm(q), l2norm(k), v, log_decay.expand(tokens, heads), beta)
    return RuleInputs(*(part.to(device) for part in parts))


def texts_of(llm: LLM, text: Path | None, length: int, windows: int) -> list[list[int]]:
    """At most `windows` windows of `length` token ids, from a file or as the model itself writes them.

    Its own text is drawn at temperature 1, so that its perplexity is what the model expects of itself.
    Raises RequestError for a file that cannot be read or is shorter than one window.
    """
    tokenizer = need_tokenizer(llm.tokenizer, "The precision study")
    if text is None:
        opening = tokenizer.encode(OPENING)
        params = SamplingParams(
            n=windows,
            temperature=1,
            top_p=1,
            top_k=0,
            seed=0,
            max_tokens=max(1, length - len(opening)),
            ignore_eos=True,
            detokenize=False,
        )
        output = llm.generate(opening, params)[0]
        return [[*opening, *one.token_ids][:length] for one in output.outputs]
    try:
        tokens = tokenizer.encode(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"--text {str(text)!r} cannot be read as UTF-8 text: {error}; give another"
        ) from error
    if len(tokens) < length:
        raise RequestError(
            f"--text {str(text)!r} has {len(tokens):,} tokens; lower --length ({length:,}) or give more text"
        )
    return [tokens[i : i + length] for i in range(0, len(tokens) - length + 1, length)][:windows]


def real_inputs(llm: LLM, texts: list[list[int]], tokens: int) -> RuleInputs:
    """What the model's Gated DeltaNet layers give to the rule, heads of all layers side by side.

    The windows follow one another, from the first again, until there are `tokens`: a state that goes on
    longer than the model's own context. They lie where the engine is, which has to take a window in one step,
    and eagerly: nothing can be captured from a graph.
    """
    layers = [m for m in llm.core.runner.forward.model.modules() if isinstance(m, GatedDeltaNetLayer)]
    captured: dict[int, list[RuleInputs]] = {layer.index: [] for layer in layers}

    def capture(layer: nn.Module, args: tuple[Tensor, object], options: dict[str, Any], _: Tensor) -> None:
        assert isinstance(layer, GatedDeltaNetLayer)
        norm = options.get("norm")
        captured[layer.index].append(_rule_inputs(layer, args[0] if norm is None else norm(args[0])))

    hooks = [layer.register_forward_hook(capture, with_kwargs=True) for layer in layers]
    try:
        for text in texts:
            llm.generate(text, SamplingParams(max_tokens=1, detokenize=False))
    finally:
        for hook in hooks:
            hook.remove()
    each = [[torch.cat(parts) for parts in zip(*runs, strict=True)] for runs in captured.values()]
    whole = RuleInputs(*(torch.cat(heads, 1) for heads in zip(*each, strict=True)))
    order = torch.arange(tokens, device=whole.q.device) % len(whole.q)
    return RuleInputs(*(x[order] for x in whole))


def _rule_inputs(layer: GatedDeltaNetLayer, x: Tensor) -> RuleInputs:
    """The way of `GatedDeltaNetLayer._prefill` up to the rule, for one whole prompt x [T, hidden]."""
    qkv, _, log_decay, beta = layer._split(layer.in_proj(x))
    mixed, _ = short_conv(qkv, layer.conv, cu_seqlens=[0, len(x)])
    q, k, v = layer._heads(F.silu(mixed))
    return RuleInputs(q, k, v, log_decay, beta)
