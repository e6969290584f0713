"""Grammars of structured output: compiles them, and tells which tokens may come next after the answer so far.

Does not need torch: the gateway uses it to check grammars, every engine to follow them. A grammar's state is a function
of the grammar and the answer's tokens alone, so an engine that has not seen the attempt before can compute it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import llguidance as ll
from msgspec import Struct

from shared.core.kv.block_keys import unpack_tokens
from shared.protocol.errors import Invalid
from shared.protocol.ids import AttemptId
from shared.protocol.sampling import NO_GRAMMAR, Grammar

KEPT_ATTEMPTS = 256
KEPT_GRAMMARS = 64
WHITESPACE = r"( |\r?\n[ \t]{0,32})?"
"""Whitespace allowed between the parts of JSON: a space, or a newline and its indent. If more is allowed, small models
tend to emit whitespace without end."""
MESSAGE_CHARS = 300
LIMITS = ll.LLParserLimits(verbose_errors=False)
"""The library's default limits of time and memory, without verbose errors."""
NOTHING = "nothing follows this grammar"
_ANY_OBJECT = '{"type": "object"}'


class Next(Struct, frozen=True):
    """Which tokens may come next."""

    allowed: bytes
    """One bit for every token id, lowest bit first. May be longer than the vocabulary."""
    complete: bool
    """The grammar is complete: only an EOS token may follow."""


class GrammarError(ValueError):
    """The grammar is invalid, or no answer can follow it."""


class AnswerAstray(GrammarError):
    """The answer so far does not follow the grammar. This is not the request's fault."""


def error_of(error: GrammarError) -> str:
    """The error text for a sequence's result."""
    return str(error) if isinstance(error, AnswerAstray) else f"{NO_GRAMMAR}{error}"


class Follower:
    """The grammar states of the answers that one engine is generating. Not thread-safe."""

    def __init__(self, tokenizer: ll.LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ends = _ends(tokenizer)
        self._fresh: OrderedDict[Grammar, ll.LLMatcher] = OrderedDict()
        self._states: OrderedDict[AttemptId, _State] = OrderedDict()

    def next(self, attempt: AttemptId, grammar: Grammar, answer: bytes) -> Next:
        """Which tokens may follow `answer` (packed ids). Correct for any answer; fast if it extends the answer of the
        attempt's last call by a few tokens. Raises GrammarError."""
        state = self._states.pop(attempt, None)
        if state is None or state.grammar != grammar or not answer.startswith(state.answer):
            state = _State(grammar, self._start(grammar), b"")
        new = unpack_tokens(answer[len(state.answer) :])
        if new and not state.matcher.consume_tokens(new):
            raise AnswerAstray("the answer so far does not follow the grammar")
        state.answer = answer
        allowed = _mask(state.matcher, self._ends)
        self._states[attempt] = state
        if len(self._states) > KEPT_ATTEMPTS:
            self._states.popitem(last=False)
        return Next(allowed, state.matcher.is_stopped())

    def _start(self, grammar: Grammar) -> ll.LLMatcher:
        fresh = self._fresh.pop(grammar, None)
        if fresh is None:
            fresh = start(grammar, self._tokenizer)
        self._fresh[grammar] = fresh
        if len(self._fresh) > KEPT_GRAMMARS:
            self._fresh.popitem(last=False)
        return fresh.deep_copy()


class _State(Struct):
    grammar: Grammar
    matcher: ll.LLMatcher
    answer: bytes


@lru_cache(maxsize=KEPT_GRAMMARS)
def problem(grammar: Grammar) -> str:
    """Why no answer can follow the grammar, as far as can be told without the model's tokenizer; empty if one can.
    Thread-safe."""
    try:
        start(grammar, _bytes())
    except GrammarError as e:
        return str(e)
    return ""


def start(grammar: Grammar, tokenizer: ll.LLTokenizer) -> ll.LLMatcher:
    """The state before the first token. Raises GrammarError if the grammar is invalid, or nothing can follow it."""
    matcher = ll.LLMatcher(tokenizer, _compiled(grammar), log_level=0, limits=LIMITS)
    _mask(matcher, _ends(tokenizer))
    return matcher


def byte_tokenizer(vocab_size: int, marks: Sequence[int], end: int) -> ll.LLTokenizer:
    """The tokenizer of a vocabulary in which ids 0-255 are bytes. `marks` are the other ids in use; `end` is the EOS."""
    return ll.LLTokenizer(ll.TokenizerWrapper(_ByteVocabulary(vocab_size, marks, end)), n_vocab=vocab_size)


def file_tokenizer(path: Path, vocab_size: int, ends: Sequence[int]) -> ll.LLTokenizer:
    """The tokenizer of a tokenizer.json file; `ends` are the EOS ids. Raises Invalid if the library cannot read it."""
    try:
        text = path.read_text(encoding="utf-8")
        return ll.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(ends))
    except (OSError, ValueError, RuntimeError) as e:
        raise Invalid(f"{path}: {e}", param="model") from e


class _ByteVocabulary:
    """A byte vocabulary in the form that llguidance expects."""

    def __init__(self, vocab_size: int, marks: Sequence[int], end: int) -> None:
        self.eos_token_id = end
        self.bos_token_id = None
        self.tokens = [bytes([id_]) for id_ in range(256)]
        self.tokens += [b"<|%d|>" % id_ if id_ in marks else b"" for id_ in range(256, vocab_size)]
        self.special_token_ids = list(range(256, vocab_size))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def _bytes() -> ll.LLTokenizer:
    return byte_tokenizer(257, (256,), 256)


def _compiled(grammar: Grammar) -> str:
    try:
        match grammar.kind:
            case "json_object":
                return _json(_ANY_OBJECT)
            case "json_schema":
                return _json(grammar.text)
            case "regex":
                return str(ll.LLMatcher.grammar_from_regex(grammar.text))
            case "choice":
                return ll.grammar_from("choice", grammar.text)
            case "grammar":
                return ll.grammar_from("grammar", grammar.text)
    except (ValueError, TypeError, RecursionError) as e:
        raise GrammarError(str(e)) from e


def _json(schema: str) -> str:
    return str(ll.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE}))


def _mask(matcher: ll.LLMatcher, ends: int) -> bytes:
    """A bit set for each token that may come next. Raises GrammarError if there is none."""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        why = matcher.get_error().strip()
        raise GrammarError(NOTHING if why.startswith("NoExtension") else why[:MESSAGE_CHARS])
    if not matcher.is_accepting() and not int.from_bytes(mask, "little") & ~ends:
        raise GrammarError(NOTHING)
    return mask


def _ends(tokenizer: ll.LLTokenizer) -> int:
    return sum(1 << id_ for id_ in set(tokenizer.eos_tokens))
