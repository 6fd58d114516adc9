"""Frames come out as they went in, however the stream cuts them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from denim.cache.node import as_tokens
from denim.engine.cache_wishes import CacheWishes
from denim.engine.messages import Add, Answer, Deltas, Refused
from denim.engine.outputs import StreamDelta
from denim.engine.prompts import ReadPrompt
from denim.errors import RequestError
from denim.sampling_params import SamplingParams
from denim.server.frames import FrameReader, packed

MESSAGES = st.lists(st.lists(st.one_of(st.integers(), st.text(), st.binary(max_size=300))), max_size=6)


@given(MESSAGES, st.data())
def test_any_cut(frames: list[list[Any]], data: st.DataObject) -> None:
    stream = b"".join(packed(messages) for messages in frames)
    reader, came = FrameReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        came += reader.feed(stream[:size])
        stream = stream[size:]
    assert came == [message for messages in frames for message in messages]


def test_half_a_frame_gives_nothing() -> None:
    whole, reader = packed(["a", "b"]), FrameReader()
    assert reader.feed(whole[:-1]) == []
    assert reader.feed(whole[-1:] + packed(["c"])) == ["a", "b", "c"]


def test_what_the_engine_and_the_server_say() -> None:
    params = SamplingParams(n=2, stop=["x"], logit_bias={3: 1.0}, max_tokens=None)
    prompt = ReadPrompt(None, as_tokens([1, 2]), (1,), (2,))
    said = [
        Add(7, prompt, params, "mine", 1, CacheWishes("salt", [1], True)),
        Deltas([(7, StreamDelta("mine", 1, "", [5], finish_reason="stop", stop_reason="x"))]),
        Answer(1, {"pages": {"used": 1}}, None),
    ]
    assert FrameReader().feed(packed(said)) == said


def test_an_error_keeps_its_kind_and_its_parameter() -> None:
    (refused,) = FrameReader().feed(packed([Refused(1, RequestError("too hot", "temperature"))]))
    assert type(refused.error) is RequestError
    assert (str(refused.error), refused.error.param) == ("too hot", "temperature")
