"""The engine on CUDA with every attention, and with KV in 8 bits: the same tokens up to near ties."""

from __future__ import annotations

import pytest
import torch

from denim import LLM, SamplingParams
from denim.engine.outputs import CompletionOutput
from tests.exactness.judge import BF16_TIE, agree_up_to_a_tie

pytestmark = pytest.mark.gpu

# Nats. A number in the middle of two e4m3 numbers, 6% apart, is stored as either where bf16 rounds otherwise:
# 0.17 seen on prompts of random tokens.
FP8_TIE = 0.3

GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True)


def outputs(**options: object) -> list[CompletionOutput]:
    """denim-tiny on prompts of odd lengths, several segments long the longest."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 4000, (n,), generator=generator).tolist() for n in (1, 17, 64, 300, 1500)]
    llm = LLM(device="cuda", memory="64MiB", debug=True, max_num_batched_tokens=512, **options)
    return [output.outputs[0] for output in llm.generate(prompts, GREEDY)]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_triton_is_torch(dtype: str, kv_dtype: str, eager: bool) -> None:
    common = {"dtype": dtype, "kv_dtype": kv_dtype}
    reference = outputs(attention_backend="torch", **common)
    for cold, ours in zip(reference, outputs(enforce_eager=eager, **common), strict=True):
        tie = FP8_TIE if kv_dtype == "fp8" else 1e-3 if dtype == "float32" else BF16_TIE
        agree_up_to_a_tie(cold, ours.token_ids, tie)
