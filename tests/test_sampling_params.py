from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from math import inf, nan

import numpy as np
import pytest

from denim.errors import RequestError
from denim.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams


@dataclass(frozen=True)
class Defaults:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def test_neutral_values_where_nobody_says_anything() -> None:
    params = SamplingParams().resolve(Defaults())
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.seed, params.max_tokens, params.n) == (1.0, 0, 16, 1)
    assert not params.greedy
    assert not params.penalised
    assert params == SamplingParams().resolve()


def test_the_model_fills_what_the_request_leaves_open() -> None:
    defaults = Defaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1)
    params = SamplingParams(top_p=1.0, temperature=0).resolve(defaults, seed=9)
    assert params.temperature == 0.0
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1.0, 20, 0.1, 1.1)
    assert params.penalised
    assert params.seed == 9
    assert SamplingParams(seed=4).resolve(defaults, seed=9).seed == 4
    assert SamplingParams(seed=-1).resolve(defaults, seed=9).seed == 9


def test_model_defaults_out_of_range_are_refused_too() -> None:
    with pytest.raises(RequestError, match="top_p=1.5"):
        SamplingParams().resolve(Defaults(top_p=1.5))


BAD_VALUES = [
    ("n", 0),
    ("n", -1),
    ("n", MAX_N + 1),
    ("n", 1.0),
    ("n", True),
    ("n", "2"),
    ("n", None),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", nan),
    ("presence_penalty", None),
    ("frequency_penalty", inf),
    ("frequency_penalty", "0"),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", inf),
    ("temperature", -0.1),
    ("temperature", nan),
    ("temperature", inf),
    ("temperature", True),
    ("temperature", "1"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -0.5),
    ("top_p", nan),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", nan),
    ("seed", 1.5),
    ("seed", True),
    ("seed", 2**64),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 3),
    ("stop", b"x"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["1"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("ignore_eos", 1),
    ("detokenize", None),
    ("skip_special_tokens", "yes"),
    ("include_stop_str_in_output", 0),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 1.0),
    ("min_tokens", -1),
    ("min_tokens", None),
    ("min_tokens", 17),  # above the default max_tokens
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", True),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", {1: nan}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", [1]),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_a_bad_value_is_named_with_its_field_and_the_rule(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"^{field}=.*: {field} (must|needs)"):
        SamplingParams(**{field: value})


def test_stop_strings_need_text() -> None:
    with pytest.raises(RequestError, match="detokenize=True or use stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)


def test_values_are_kept_in_one_form() -> None:
    params = SamplingParams(
        stop="END", stop_token_ids=[7, 8], temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={1: 2}
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (7, 8)
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert params.logit_bias == {1: 2.0}
    none = SamplingParams(stop=None, stop_token_ids=None, logit_bias=None, max_tokens=None)
    assert (none.stop, none.stop_token_ids, none.logit_bias, none.max_tokens) == ((), (), {}, None)
    assert SamplingParams(top_k=-1).top_k == 0


def test_token_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1.0}, top_k=1000).check_vocab(10)
    with pytest.raises(RequestError, match="stop_token_ids=10: .* vocabulary size 10"):
        SamplingParams(stop_token_ids=[3, 10]).check_vocab(10)
    with pytest.raises(RequestError, match="logit_bias=12: .* vocabulary size 10"):
        SamplingParams(logit_bias={12: 1.0}).check_vocab(10)
    with pytest.raises(RequestError, match="nothing to draw"):
        SamplingParams(stop_token_ids=range(10), min_tokens=1).check_vocab(10)


def test_a_stop_token_may_be_named_twice() -> None:
    SamplingParams(stop_token_ids=[3] * 10, min_tokens=1).check_vocab(10)


def test_a_temperature_next_to_0_is_0() -> None:
    assert [SamplingParams(temperature=t).resolve().greedy for t in (0, 9e-6, 1e-5)] == [True, True, False]


def test_importing_them_does_not_import_torch() -> None:
    code = "import sys, denim.sampling_params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
