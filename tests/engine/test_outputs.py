from __future__ import annotations

from denim.engine.outputs import CompletionOutput, Logprob, StreamDelta, logprobs_by_token
from denim.runner.logprobs import TokenLogprobs


def test_a_report_in_vllm_s_form() -> None:
    """The token itself comes first; it is not repeated among the likeliest ones."""
    report = TokenLogprobs(9, -3.0, 5, [4, 2], [-0.5, -1.0])
    assert list(logprobs_by_token(report, chr).items()) == [
        (9, Logprob(-3.0, 5, "\t")),
        (4, Logprob(-0.5, 1, "\x04")),
        (2, Logprob(-1.0, 2, "\x02")),
    ]
    best = TokenLogprobs(4, -0.5, 1, [4, 2], [-0.5, -1.0])
    assert list(logprobs_by_token(best, None).items()) == [
        (4, Logprob(-0.5, 1, None)),
        (2, Logprob(-1.0, 2, None)),
    ]


def test_a_token_s_own_rank_is_told_where_others_are_as_likely() -> None:
    tied = TokenLogprobs(2, -0.5, 1, [4, 2], [-0.5, -0.5])
    assert logprobs_by_token(tied, None)[2].rank == 1


def test_a_text_is_what_its_pieces_say() -> None:
    output = CompletionOutput(0, token_ids=[5])
    assert output.text == ""
    output.pieces += ["so", " far"]
    assert output.text == "so far"
    assert repr(output).startswith(
        "CompletionOutput(index=0, text='so far', token_ids=[5], cumulative_logprob="
    )


def test_finished_means_that_there_is_a_reason() -> None:
    for make in (
        lambda reason: StreamDelta("r", 0, "", [], finish_reason=reason),
        lambda r: CompletionOutput(0, finish_reason=r),
    ):
        assert not make(None).finished
        assert make("stop").finished
