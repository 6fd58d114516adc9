"""How a completion ends when no token ends it."""

from __future__ import annotations

from array import array

from denim.engine.completion import Completion
from denim.engine.outputs import RequestOutput
from denim.engine.tokenizer import Tokenizer
from denim.runner.sampler import SamplingState
from denim.sampling_params import SamplingParams
from tests.engine.conftest import TEXT_VOCAB


def test_an_abort_gives_out_what_was_held_back_and_an_error_does_not(tokenizer: Tokenizer) -> None:
    for reason, rest in (("abort", "E"), ("error", "")):
        params = SamplingParams(stop="END").resolve()
        request = RequestOutput("r", "x", array("i", [1]), [])
        sampling = SamplingState(params, [1], TEXT_VOCAB)
        one = Completion(request, 0, params, sampling, 16, [], tokenizer)
        assert one.accept(ord("E"), None).text == ""
        last = one.end(reason)
        assert (last.text, last.finish_reason, last.token_ids) == (rest, reason, [])
        assert one.output.text == rest
