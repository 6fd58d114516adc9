"""`denim generate`: one prompt, its completion as it comes.

Owns where the prompt comes from and how the completion is shown. Text goes to stdout and nothing else
does, so it can be piped; the pace goes to stderr.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from denim.commands.answer import FAILED, print_answer
from denim.errors import DenimError, RequestError

if TYPE_CHECKING:
    from denim.engine import LLM
    from denim.sampling_params import SamplingParams


def read_prompt(prompt: str | None) -> str:
    """The prompt as given, or stdin for "-" and where stdin is piped in. Raises RequestError for none, and
    for a stdin that brings nothing."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise RequestError("no prompt; give one, or pipe it in: echo 'Once upon a time' | denim generate")
    text = sys.stdin.read()
    if not text:
        raise RequestError("the prompt is empty: stdin has no text; pipe some in, or give the prompt itself")
    return text


def stream_completion(llm: LLM, prompt: str, params: SamplingParams) -> bool:
    """Print the completion as it comes, then its pace. Returns False if Ctrl-C ended it.

    Raises RequestError for a prompt that cannot be served, DenimError if the engine failed on it.
    """
    answer = print_answer(llm.stream(prompt, params))
    end = answer.finish_reason or "interrupted"
    Console(stderr=True, highlight=False).print(f"[dim]{answer.pace}; end: {end}[/]")
    return not answer.interrupted


def print_completion(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Print the whole completion as one JSON object, times in seconds. Raises as above."""
    output = llm.generate(prompt, params)[0]
    completion, metrics = output.outputs[0], output.metrics
    if completion.finish_reason == "error":
        raise DenimError(FAILED)
    result: dict[str, Any] = {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_ids),
        "cached_tokens": output.num_cached_tokens,
        "completion_tokens": len(completion.token_ids),
    }
    if metrics and metrics.first_token_time and metrics.finished_time:
        result["seconds_to_first_token"] = round(metrics.first_token_time - metrics.arrival_time, 6)
        result["seconds"] = round(metrics.finished_time - metrics.arrival_time, 6)
    print(json.dumps(result, ensure_ascii=False, indent=2))
