from __future__ import annotations

import pytest
import torch

from denim.runner.logprobs import prompt_logprobs, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reports_against_the_definition(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    next_ids = [3, 39, 0, 7, int(logits[4].argmax())]
    expected = logits.double().log_softmax(-1)
    reports = prompt_logprobs(logits, next_ids, 6)
    assert len(reports) == 5
    for row, report in enumerate(reports):
        own = expected[row, next_ids[row]].item()
        assert report.token == next_ids[row]
        assert report.logprob == pytest.approx(own, abs=1e-5)
        assert report.rank == 1 + int((expected[row] > own).sum())
        top = sorted(expected[row].tolist(), reverse=True)[:6]
        assert report.top_logprobs == pytest.approx(top, abs=1e-5)
        assert [expected[row, token].item() for token in report.top_ids] == pytest.approx(top, abs=1e-9)
    assert reports[4].rank == 1


def test_no_more_tokens_than_there_are_and_none_if_none_are_wanted() -> None:
    logits = torch.zeros(1, 3)
    token = torch.tensor([1])
    (report,) = token_logprobs(logits, token, 20).to_host()
    assert sorted(report.top_ids) == [0, 1, 2]
    assert report.shortened(2).top_ids == report.top_ids[:2]
    (report,) = token_logprobs(logits, token, 0).to_host()
    assert (report.top_ids, report.top_logprobs, report.rank) == ([], [], 1)
    assert prompt_logprobs(torch.zeros(0, 3), [], 2) == []
