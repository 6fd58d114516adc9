"""Grammars compiled for one model's vocabulary, on threads of their own.

Owns the compiled ones, how long compiling may take and what it may cost. Knows xgrammar, which does it, and
the tokenizer; nothing of requests.

Special tokens are no text: none is ever drawn inside a form, except those that the form itself names.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from denim.engine.tokenizer import Tokenizer, need_tokenizer
from denim.errors import RequestError
from denim.json_schema import in_patterns
from denim.runner.constraint import Constraint
from denim.structured_output import StructuredOutput

COMPILE_SECONDS = 30.0  # then the request is refused
MOST_COMPILING = 4  # at once; xgrammar works outside Python's lock, each on one core
KEPT_BYTES = 256 * 2**20
# Spaces and line breaks between two pieces of JSON. A model that writes them for ever would never end.
MOST_WHITE_SPACE = 32


class Grammars:
    """Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = [token for token in end_token_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._seats = threading.Semaphore(MOST_COMPILING)
        self._compilers: dict[frozenset[int], Any] = {}  # by the special tokens that are text
        self._known: OrderedDict[StructuredOutput, Future[Any]] = OrderedDict()  # last used at the end

    def constraint(self, form: StructuredOutput, ending_ids: Sequence[int]) -> Constraint:
        """For one completion that `ending_ids` end. Compiles the form if that was not done before.

        Raises RequestError if it cannot be compiled, or not in time, or allows no text.
        """
        return Constraint(self.compiled(form), self._vocab_size, self._ends, ending_ids)

    def compiled(self, form: StructuredOutput) -> Any:
        """An xgrammar.CompiledGrammar; waits for it. Raises RequestError."""
        try:
            return self.compile(form).result(COMPILE_SECONDS)
        except TimeoutError:
            raise too_long_to_compile(form) from None

    def compile(self, form: StructuredOutput) -> Future[Any]:
        """Start compiling, or find what was compiled before. The future may raise RequestError."""
        need_tokenizer(self._tokenizer, "Structured output")
        with self._lock:
            future = self._known.get(form)
            if future is not None:
                self._known.move_to_end(form)
                return future
            future = self._known[form] = Future()
            self._forget_oldest()
        # A daemon, as nothing can stop it: it must not keep the program from ending.
        threading.Thread(target=self._compile, args=(form, future), name="denim-grammar", daemon=True).start()
        return future

    def _compile(self, form: StructuredOutput, future: Future[Any]) -> None:
        with self._seats:
            try:
                source = structural_tag(form)
                compiled = self._compiler(source).compile_structural_tag(source)
                Constraint(compiled, self._vocab_size, self._ends, self._ends)
            except RequestError as error:
                self._refuse(form, future, _refusal(form, str(error)))
            except Exception as error:
                self._refuse(form, future, _refusal(form, _reason(error)))
            else:
                future.set_result(compiled)

    def _refuse(self, form: StructuredOutput, future: Future[Any], error: RequestError) -> None:
        with self._lock:
            self._known.pop(form, None)
        future.set_exception(error)

    def _forget_oldest(self) -> None:
        """Keep within KEPT_BYTES. What is being compiled counts nothing, and stays."""
        sizes = {
            form: future.result().memory_size_bytes
            for form, future in self._known.items()
            if future.done() and future.exception() is None
        }
        total = sum(sizes.values())
        for form, size in sizes.items():
            if total <= KEPT_BYTES:
                return
            total -= size
            del self._known[form]

    def _compiler(self, source: str) -> Any:
        """One for the special tokens that `source` names."""
        assert self._tokenizer is not None
        named = frozenset(
            token for token in self._tokenizer.special_ids if self._tokenizer.decode_one(token) in source
        )
        with self._lock:
            if named not in self._compilers:
                self._compilers[named] = self._make_compiler(named)
            return self._compilers[named]

    def _make_compiler(self, named: frozenset[int]) -> Any:
        import xgrammar

        assert self._tokenizer is not None
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.inner, vocab_size=self._vocab_size, stop_token_ids=self._ends or [0]
        )
        words = list(info.decoded_vocab)
        for token in self._tokenizer.special_ids - named:
            if token < len(words):
                words[token] = b""
        vocabulary = xgrammar.TokenizerInfo(
            words,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=self._ends,
            add_prefix_space=info.add_prefix_space,
        )
        return xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)


def too_long_to_compile(form: StructuredOutput) -> RequestError:
    return _refusal(form, f"this took more than {COMPILE_SECONDS:.0f} s to compile; make it simpler")


def _refusal(form: StructuredOutput, reason: str) -> RequestError:
    where = form.kind if form.named is None else f"{form.named} ({form.kind})"
    return RequestError(f"{where}: {reason}", form.named or form.kind)


def structural_tag(form: StructuredOutput) -> str:
    """The form in xgrammar's own language."""
    if form.structural_tag is not None:
        inner = json.loads(form.structural_tag)
        inner = inner.get("format", inner)
    elif form.json is not None or form.json_object:
        schema = {"type": "object"} if form.json_object else in_patterns(json.loads(form.json))
        inner = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITE_SPACE}
    elif form.regex is not None:
        inner = {"type": "regex", "pattern": form.regex}
    elif form.grammar is not None:
        inner = {"type": "grammar", "grammar": form.grammar}
    else:
        strings = [{"type": "const_string", "value": string} for string in form.choice or ()]
        inner = {"type": "or", "elements": strings}
    if form.after is not None:
        begin = form.opening or ""
        free = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": form.after}
        before: dict[str, Any] = {
            "type": "sequence",
            "elements": [free, {"type": "regex", "pattern": "\\n{0,2}"}],
        }
        if form.opening is not None:
            before = {"type": "optional", "content": before}
        inner = {"type": "sequence", "elements": [before, inner]}
    return json.dumps({"type": "structural_tag", "format": inner}, ensure_ascii=False)


def _reason(error: Exception) -> str:
    """xgrammar's message without the place in its source."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()[:500]
