"""`denim chat`: a conversation in the terminal.

Owns the conversation and the commands inside it. The model's own chat template renders each turn.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from denim.commands.answer import Pace, print_answer
from denim.errors import DenimError

if TYPE_CHECKING:
    from denim.engine import LLM
    from denim.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C ends an answer."


class Chat:
    """One conversation with `llm`. A turn that fails leaves no trace in it."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, thinking: bool) -> None:
        self.llm = llm
        self.params = params
        self.thinking = thinking
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def reset(self) -> None:
        self.messages = list(self.opening)

    def answer(self, text: str) -> Pace:
        """Print the model's answer to `text` as it comes; a cut answer stays as far as it came.

        Raises RequestError when the conversation cannot be served (too long, no template, …), DenimError if
        the engine failed on it.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.llm.read_chat(asked, enable_thinking=self.thinking)
        answer = print_answer(self.llm.stream(prompt, self.params))
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer.pace


def run_chat(chat: Chat) -> None:
    """Read lines until /exit, the end of input, or Ctrl-C twice at the prompt: the first one may have been
    meant for an answer that had just ended."""
    notes = Console(stderr=True, highlight=False)
    asking = sys.stdin.isatty()
    if asking:
        import readline  # noqa: F401 (gives input() its line editing)

        notes.print(f"[dim]{HELP}[/]")
    interrupted = False
    while True:
        try:
            line = input("> " if asking else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted or not asking:
                return
            interrupted = True
            notes.print("\n[dim]Ctrl-C again or /exit to leave[/]")
            continue
        interrupted = False
        if line == "/exit":
            return
        if line == "/reset":
            chat.reset()
            notes.print("[dim]forgotten[/]")
        elif line.startswith("/"):
            notes.print(f"[dim]{HELP}[/]")
        elif line:
            try:
                notes.print(f"[dim]{chat.answer(line)}[/]")
            except DenimError as error:
                notes.print(f"denim: {error}", markup=False, soft_wrap=True)
