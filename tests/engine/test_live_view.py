"""The live view of an engine: its slabs add up, and its requests are those that run, without their texts."""

from __future__ import annotations

import json

from denim import LLM, SamplingParams


def test_slabs_add_up_and_requests_are_listed() -> None:
    llm = LLM(memory="16MiB", max_num_seqs=4, seed=0)
    core = llm.core
    empty = core.live_view()
    slabs = empty["stats"]["slabs"]["total"]
    assert empty["slabs"]["sides"] == "." * slabs and empty["slabs"]["held"] == "0" * slabs
    assert empty["requests"] == {"total": 0, "shown": []}

    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, n=2)
    stream = llm.stream("The people of these States. " * 8, params)
    next(stream)
    view = core.live_view()
    json.dumps(view, allow_nan=False)
    assert view["requests"]["total"] == 2
    first = view["requests"]["shown"][0]
    assert (first["status"], first["index"], first["most_tokens"]) == ("running", 0, 8)
    assert first["prompt"] > 20 and first["first"] is not None and first["seconds"] >= first["first"]
    assert set(view["slabs"]["sides"]) <= {"s", "p", "."} and view["slabs"]["sides"].count("s") >= 2
    slabs_shown = zip(view["slabs"]["sides"], view["slabs"]["held"], strict=True)
    assert all((side == ".") == (held == "0") for side, held in slabs_shown)
    stream.close()
    assert core.live_view()["requests"]["total"] == 0
