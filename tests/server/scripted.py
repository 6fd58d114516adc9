"""An engine that says what a test tells it to, token by token, and nothing else.

It is the clients' side of a real engine (`EngineFront`: prompts are read, text is made) with a script in the
place of the loop. So tests can have a model write tool calls, fail in the middle, or never answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from denim.engine.facts import EngineFacts
from denim.engine.front import EngineFront
from denim.engine.messages import Abort, Accepted, Add, Answer, Ask, Command, Deltas
from denim.engine.outputs import StreamDelta
from denim.engine.tokenizer import load_tokenizer
from denim.engine.unavailable import EngineDiedError
from tests.engine.byte_tokenizer import save

HERMES_TEMPLATE = """\
{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Call as <tool_call>{"name": …, "arguments": …}</tool_call>.<|im_end|>
{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

STATES = {"total": 0, "used": 0, "cached": 0, "free": 0}
STATS: dict[str, Any] = {
    "slabs": STATES,
    "pages": STATES,
    "slots": STATES,
    **dict.fromkeys(("running", "waiting", "swapped", "preempted_swap", "preempted_recompute"), 0),
    **dict.fromkeys(("steps", "captured_steps", "tokens"), 0),
    "tiers": {},
    "prefix": {"queries": 0, "hit_tokens": 0, "query_tokens": 0, "lost": {"no_checkpoint": 0}},
}


class ScriptedEngine(EngineFront):
    """Writes `text`; `template` is the model's chat template. `added` has every request that came.

    A token comes when the one before has been read: what a stream is made of does not depend on the clock.

    ends: the finish reason behind the last token; None: the reply never ends. pause: seconds before each
    token.
    """

    def __init__(self, folder: Path, text: str = "", template: str | None = None, **facts: Any) -> None:
        save(folder, **({} if template is None else {"chat_template": template}))
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        known: dict[str, Any] = dict.fromkeys(field.name for field in fields(EngineFacts)) | {
            "model": "scripted",
            "device": "cpu",
            "dtype": "float32",
            "vocab_size": 300,
            "end_token_ids": (),
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 512,
            "page_size": 16,
            "chunk_size": 64,
            "checkpoint_policy": "auto",
            "strip_lines": (),
            "weight_bytes": 0,
            "arena_bytes": 0,
            "slot_bytes": 0,
            "page_bytes": 0,
        }
        super().__init__(EngineFacts(**known | facts), tokenizer)
        self.text = text
        self.ends: str | None = "stop"
        self.pause = 0.0
        self.cached = 0
        self.added: list[Add] = []
        self.aborted: list[int] = []

    def say(self, text: str | Sequence[int], ends: str | None = "stop", pause: float = 0.0) -> None:
        """What the next requests get."""
        self.text, self.ends, self.pause = text, ends, pause  # type: ignore[assignment]

    def die(self) -> None:
        """As when the engine's process is killed. From any thread."""
        self._lose(EngineDiedError("the engine process was ended by SIGKILL"))

    async def close(self) -> None:
        pass

    def _send(self, command: Command) -> None:
        match command:
            case Add():
                self.added.append(command)
                asyncio.get_running_loop().create_task(self._play(command))
            case Abort(ticket):
                self.aborted.append(ticket)
            case Ask(number, "stats"):
                self._take([Answer(number, STATS, None)])
            case Ask(number):
                self._take([Answer(number, self.facts, None)])

    async def _play(self, add: Add) -> None:
        ids, ends, pause = self._ids(), self.ends, self.pause
        self._take([Accepted(add.ticket, f"scripted-{add.ticket}")])
        for at, token in enumerate(ids):
            await asyncio.sleep(pause)
            last = ends if at == len(ids) - 1 else None
            self._take([Deltas([self._delta(add, index, token, last) for index in range(add.params.n)])])
            await self._read(add.ticket)

    async def _read(self, ticket: int) -> None:
        """Wait until the reader has what was given, so that a busy machine joins no tokens."""
        await asyncio.sleep(0)  # it is given on this event loop, behind what runs now
        while (one := self._waiting._open.get(ticket)) is not None and one.stream._waiting:
            await asyncio.sleep(0)

    def _ids(self) -> list[int]:
        assert self.tokenizer is not None
        text: Any = self.text
        return self.tokenizer.encode(text) if isinstance(text, str) else list(text)

    def _delta(self, add: Add, index: int, token: int, ends: str | None) -> tuple[int, StreamDelta]:
        return add.ticket, StreamDelta(
            f"scripted-{add.ticket}", index, "", [token], finish_reason=ends, num_cached_tokens=self.cached
        )
