"""What a caller asks of one request: how tokens are drawn, when to stop, what to report.

Owns the fields, their ranges and their defaults; names and meanings are vLLM's. Knows nothing of
tensors, tokenizers or models. A bad value is refused when the object is made, with an error that names
the field, the value and what is allowed; what depends on the vocabulary is checked by `check_vocab`.

Five fields default to None, "as the model's generation_config.json says": temperature, top_p, top_k,
min_p and repetition_penalty. `resolve` fills them in; inside the engine all of them are numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from numbers import Integral, Real
from typing import Any, Protocol

from denim.errors import RequestError
from denim.structured_output import StructuredOutput

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS: a temperature below it means the most likely token
MAX_LOGPROBS = 20  # vLLM's default max_logprobs, and the OpenAI API's limit
MAX_N = 16384  # vLLM's VLLM_MAX_N_SEQUENCES
MAX_PENALTY = 2.0  # the OpenAI API's range of presence_penalty and frequency_penalty
MAX_LOGIT_BIAS = 100.0  # the OpenAI API's range of logit_bias
SEED_BITS = 64


class SamplingDefaults(Protocol):
    """What `resolve` reads of a model's generation_config.json; None: the model does not say."""

    @property
    def temperature(self) -> float | None: ...
    @property
    def top_p(self) -> float | None: ...
    @property
    def top_k(self) -> int | None: ...
    @property
    def min_p(self) -> float | None: ...
    @property
    def repetition_penalty(self) -> float | None: ...


_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Raises RequestError that names the field and what is allowed.

    n: number of completions. With a seed, completion i is the one that a single request with seed + i
        would get. With temperature 0 all n are equal, which is allowed.
    presence_penalty, frequency_penalty: subtracted from the logit of every token that was generated,
        once, and once per occurrence; -2 to 2.
    repetition_penalty: divides the positive and multiplies the negative logits of every token of prompt
        and output; above 0, 1 is neutral.
    temperature: 0 takes the most likely token (the lowest id of equals).
    top_p: the fewest most likely tokens whose probability reaches top_p; above 0, at most 1.
    top_k: the k most likely tokens; 0 or -1: all.
    min_p: tokens of at least min_p times the highest probability; 0 to 1.
    seed: draws depend on it alone, not on other requests; None or -1: the engine picks one.
    stop: a string or a list of strings that end the text.
    stop_token_ids: tokens that end it, beside the model's own end tokens.
    ignore_eos: go on past the model's end tokens.
    max_tokens: None: up to the end of the context. min_tokens: no end or stop before so many tokens.
    logprobs, prompt_logprobs: log-probabilities of the token and of so many most likely ones, from the
        model's logits before any of the above; 0 to 20.
    logit_bias: token id -> number added to its logit; -100 to 100.
    structured: a form that the text must have (vLLM's structured_outputs). Where the text has it and nothing
        can follow, the completion ends, before min_tokens too; where it may go on, an end token may end it.
    detokenize: False: token ids only, `text` stays empty.
    skip_special_tokens: False: special tokens stand in `text` (the one that ends it only with
        include_stop_str_in_output).
    include_stop_str_in_output: keep the stop string or the stopping token's text.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    structured: StructuredOutput | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        def keep(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "must be True or False")
        keep("n", _integer("n", self.n, 1, MAX_N))
        for name in ("presence_penalty", "frequency_penalty"):
            keep(name, _number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY))
        if self.repetition_penalty is not None:
            keep(
                "repetition_penalty",
                _number("repetition_penalty", self.repetition_penalty, 0.0, open_low=True),
            )
        if self.temperature is not None:
            keep("temperature", _number("temperature", self.temperature, 0.0))
        if self.top_p is not None:
            keep("top_p", _number("top_p", self.top_p, 0.0, 1.0, open_low=True))
        if self.min_p is not None:
            keep("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.top_k is not None:
            keep("top_k", max(0, _integer("top_k", self.top_k, -1)))
        if self.seed is not None:
            seed = _integer("seed", self.seed, -(2 ** (SEED_BITS - 1)), 2**SEED_BITS - 1)
            keep("seed", None if seed == -1 else seed)
        if self.max_tokens is not None:
            keep("max_tokens", _integer("max_tokens", self.max_tokens, 1))
        keep("min_tokens", _integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", self.min_tokens, f"must be at most max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                keep(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        if self.structured is not None and not isinstance(self.structured, StructuredOutput):
            raise _bad("structured", self.structured, "must be a StructuredOutput or None")
        keep("stop", _stop_strings(self.stop))
        if self.stop and not self.detokenize:
            raise _bad("stop", self.stop, "needs text; set detokenize=True or use stop_token_ids")
        keep("stop_token_ids", _token_ids(self.stop_token_ids))
        keep("logit_bias", _biases(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken. Of resolved parameters only."""
        assert self.temperature is not None, "resolve() fills in the temperature first"
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens so far. Of resolved parameters only."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def resolve(self, defaults: SamplingDefaults | None = None, seed: int = 0) -> SamplingParams:
        """The same parameters with no field left open but max_tokens.

        Open fields come from `defaults` (the model's generation_config.json), then from the neutral
        values; an open seed becomes `seed`. Raises RequestError if the model's own values are out of range.
        """
        filled: dict[str, Any] = {"seed": seed if self.seed is None else self.seed}
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) is None:
                value = getattr(defaults, name, None)
                filled[name] = neutral if value is None else value
        return replace(self, **filled)

    def most_tokens(self, room: int) -> int:
        """How many tokens a completion may have where the context has room for `room`."""
        return room if self.max_tokens is None else min(self.max_tokens, room)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises RequestError if a token id named here is not below `vocab_size`."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            for token in ids:
                if token >= vocab_size:
                    raise _bad(name, token, f"must be below the vocabulary size {vocab_size}")
        if self.min_tokens and len(set(self.stop_token_ids)) >= vocab_size:
            raise _bad("stop_token_ids", "every token", "leaves nothing to draw for min_tokens; name fewer")


def checked_params(params: object) -> SamplingParams:
    """What a caller gave as parameters; None: the defaults. RequestError if they are something else."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params={params!r} must be SamplingParams")
    return params


def _bad(field: str, value: object, rule: str) -> RequestError:
    return RequestError(f"{field}={value!r}: {field} {rule}.", field)


def _number(
    field: str, value: object, low: float, high: float | None = None, open_low: bool = False
) -> float:
    above = f"above {low:g}" if open_low else f"at least {low:g}"
    rule = f"must be a finite number {above}" + ("" if high is None else f" and at most {high:g}")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _bad(field, value, rule)
    number = float(value)
    if not isfinite(number) or number < low or (open_low and number == low):
        raise _bad(field, value, rule)
    if high is not None and number > high:
        raise _bad(field, value, rule)
    return number


def _integer(field: str, value: object, low: int, high: int | None = None) -> int:
    rule = f"must be an integer of at least {low}" + ("" if high is None else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _bad(field, value, rule)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _bad(field, value, rule)
    return number


def _stop_strings(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Iterable) or isinstance(strings, (bytes, Mapping)):
        raise _bad("stop", value, "must be a string or a list of strings")
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _bad("stop", string, "must hold strings of at least one character")
    return strings


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise _bad("stop_token_ids", value, "must be a list of token ids")
    return tuple(_integer("stop_token_ids", token, 0) for token in value)


def _biases(value: object) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _bad("logit_bias", value, "must map token ids to numbers")
    return {
        _integer("logit_bias", token, 0): _number("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        for token, bias in value.items()
    }
