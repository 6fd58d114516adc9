"""Grammars compiled for one model's vocabulary, on threads of their own.

Owns the compiled ones, how long compiling may take and what it may cost. Knows xgrammar, which does it, and
the tokenizer; nothing of requests.

Special tokens are no text: none is ever drawn inside a form, except those that the form itself names. Where a
schema limits the length of strings, nor are control characters but line breaks: xgrammar's grammar of such
strings would let them through, which JSON forbids.

A mask is made on the host between two steps, for which all requests wait. So a form is tried before it is
used: one whose masks take too long is refused.
"""

from __future__ import annotations

import atexit
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from statistics import median
from typing import Any

from denim.engine.tokenizer import Tokenizer, need_tokenizer
from denim.errors import RequestError
from denim.runner.constraint import Constraint, DeadEndError
from denim.structured_output import StructuredOutput

COMPILE_SECONDS = 30.0  # then the request is refused
MOST_COMPILING = 4  # at once; xgrammar works outside Python's lock, each on one core
ENDING_SECONDS = 1.0  # that the end of the program waits for a form; see `_compile`
KEPT_BYTES = 256 * 2**20
# Spaces and line breaks between two pieces of JSON. A model that writes them for ever would never end.
MOST_WHITE_SPACE = 32
MOST_MASK_SECONDS = 0.010  # of one core, for the mask behind one token; JSON takes about 0.00003
TRIED_TOKENS = 48
_LENGTHS = ('"minLength"', '"maxLength"')
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class Grammars:
    """Safe to call from several threads."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = [token for token in end_token_ids if token < vocab_size]
        self._lock = threading.Lock()  # of what is known: never held while anything is compiled
        self._making = threading.Lock()  # of `_compilers`: to make one, the vocabulary is read
        self._seats = threading.Semaphore(MOST_COMPILING)
        self._compilers: dict[tuple[frozenset[int], bool], Any] = {}  # by what is text: see `_compiler`
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
            # To come back from xgrammar while the interpreter is taken down aborts the program. That is a
            # short time, and most forms are compiled before it begins.
            join = threading.current_thread().join
            atexit.register(join, ENDING_SECONDS)
            try:
                compiled = self.build(form)
            except RequestError as error:
                with self._lock:
                    self._known.pop(form, None)
                future.set_exception(error)
            else:
                future.set_result(compiled)
            finally:
                atexit.unregister(join)

    def build(self, form: StructuredOutput) -> Any:
        """Compile and try a form here and now, however long that takes. Raises RequestError."""
        try:
            source = structural_tag(form)
            compiled = self._compiler(source).compile_structural_tag(source)
            self._try(compiled)
        except RequestError as error:
            raise _refusal(form, str(error)) from None
        except Exception as error:  # xgrammar raises RuntimeError on a form that it cannot read, and others
            raise _refusal(form, _reason(error)) from error
        return compiled

    def _try(self, compiled: Any) -> None:
        """Follow a few tokens, drawn at random. Raises RequestError if there are none, or if that takes too
        long."""
        chance = random.Random(0)
        one = Constraint(compiled, self._vocab_size, self._ends, self._ends)
        times: list[float] = []
        while len(times) < TRIED_TOKENS and not one.exhausted:
            token = chance.choice(one.allowed().tolist())
            if token in self._ends:
                continue
            begin = time.thread_time()
            try:
                one.accept(token)
            except DeadEndError:
                break
            times.append(time.thread_time() - begin)
        if times and median(times) > MOST_MASK_SECONDS:
            raise RequestError(
                f"this takes {median(times) * 1e3:.0f} ms a token to check, for which all requests would"
                f" wait; at most {MOST_MASK_SECONDS * 1e3:.0f} ms are allowed. Repetitions with bounds, and"
                " those inside others, cost most"
            )

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
        """One for the special tokens that `source` names, and with or without control characters."""
        assert self._tokenizer is not None
        named = frozenset(
            token for token in self._tokenizer.special_ids if self._tokenizer.decode_one(token) in source
        )
        kind = named, any(keyword in source for keyword in _LENGTHS)
        with self._making:
            if kind not in self._compilers:
                self._compilers[kind] = self._make_compiler(*kind)
            return self._compilers[kind]

    def _make_compiler(self, named: frozenset[int], printable: bool) -> Any:
        import xgrammar

        assert self._tokenizer is not None
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer.inner, vocab_size=self._vocab_size, stop_token_ids=self._ends or [0]
        )
        words = list(info.decoded_vocab)
        for token in self._tokenizer.special_ids - named:
            if token < len(words):
                words[token] = b""
        if printable:
            words = [b"" if _CONTROL.search(word) else word for word in words]
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
        schema = {"type": "object"} if form.json_object else json.loads(form.json)
        inner = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_WHITE_SPACE}
    elif form.regex is not None:
        inner = {"type": "regex", "pattern": _without_plus(form.regex)}
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


# Of a regular expression: a set of characters that may be repeated, or anything else.
_ATOM = re.compile(r"(?P<set>\[(?!\^?\])(?:\\.|[^\]\\])+\]|\\[wdsWDS]|\.)(?P<plus>\+)?|\\.|.", re.DOTALL)


def _without_plus(pattern: str) -> str:
    """The same language with [a-z]+ as [a-z][a-z]*, whose masks take xgrammar a hundredth of the time."""
    return _ATOM.sub(lambda atom: f"{atom['set'] * 2}*" if atom["plus"] else atom[0], pattern)


def _reason(error: Exception) -> str:
    """xgrammar's message without the place in its source."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", str(error)).strip()[:500]
