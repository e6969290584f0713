"""The toy model: next-token logits from the KV content of a sequence.

Ids 0-255 are bytes. A chat prompt is `ROLE role "\\n" content` for every message, then `ROLE "assistant\\n"`.
A prompt can contain a script, in the last message of a chat or anywhere in a plain prompt:

    <<say:TEXT>>   answer exactly TEXT, a byte a token, then EOS
    <<fail>>       fail; <<fail:N>> fails after N tokens of the answer
    <<nan>>        fail like a model whose logits are not finite

Without a script, the toy says lowercase words without end. It does not know the prompt's length: it finds the start
of the answer in the tokens. So a failover, whose prompt includes the answer so far, continues the same script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

from msgspec import Struct

from shared.text.toy_text import EOS, ROLE

_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_SPACE = 0x20
_SPACE_LOGIT = 6.6
_VOWELS = frozenset(b"aeiou")
_SCRIPT = re.compile(rb"<<(?:say:(?P<text>.*?)|fail(?::(?P<after>\d+))?|(?P<nan>nan))>>", re.DOTALL)

Logits = Mapping[int, float]
"""Token id -> logit; ids that are absent have probability 0."""


class ScriptedFailure(Exception):
    """The prompt told the toy to fail this sequence."""


class Transcript(Struct, frozen=True):
    """The tokens of a sequence, split into the low and the high byte of each id."""

    low: bytes
    high: bytes

    def last_role_mark(self, end: int) -> int:
        """Index of the last ROLE token before `end`, or -1."""
        at = end
        while (at := self.high.rfind(b"\x01", 0, at)) >= 0:
            if self.low[at] == ROLE & 0xFF:
                return at
        return -1


def next_logits(transcript: Transcript, content: bytes) -> Logits:
    """Logits of the token after `transcript`. `content` is a digest of all KV before that token. Raises
    ScriptedFailure."""
    header = transcript.last_role_mark(len(transcript.low))
    if header >= 0:
        prompt_start = max(0, transcript.last_role_mark(header))
        prompt_end = header
    else:
        prompt_start, prompt_end = 0, len(transcript.low)
    script = _last_script(transcript.low, prompt_start, prompt_end)
    if script is None:
        return _words(transcript, content)
    answer = _answer_so_far(transcript.low, header, script)
    if script["text"] is None:
        if len(answer) >= int(script["after"] or 0):
            raise ScriptedFailure(
                "logits are not finite" if script["nan"] else "the prompt told the toy to fail"
            )
        return _words(transcript, content)
    said = _progress(script["text"], answer)
    if transcript.low[-1:] == bytes([EOS & 0xFF]) and transcript.high[-1:] == b"\x01":
        return _words(transcript, content)
    return {script["text"][said] if said < len(script["text"]) else EOS: 0.0}


def _last_script(low: bytes, start: int, end: int) -> re.Match[bytes] | None:
    return max(_SCRIPT.finditer(low, start, end), key=re.Match.start, default=None)


def _answer_so_far(low: bytes, header: int, script: re.Match[bytes]) -> bytes:
    if header < 0:
        return low[script.end() :]
    line_end = low.find(b"\n", header)
    return low[line_end + 1 :] if line_end >= 0 else low[header + 1 :]


def _progress(text: bytes, answer: bytes) -> int:
    """How many bytes of `text` have been said. `answer` is normally a beginning of `text`. If a plain prompt goes on
    after its script, it is not: then this is the length of the longest beginning of `text` that `answer` ends with."""
    if text.startswith(answer):
        return len(answer)
    return next(k for k in range(min(len(text), len(answer)), -1, -1) if answer.endswith(text[:k]))


def _words(transcript: Transcript, content: bytes) -> Logits:
    noise = blake2b(content, digest_size=len(_LETTERS)).digest()
    last = transcript.low[-1] if transcript.high[-1] == 0 else 0
    after_vowel = last in _VOWELS
    logits = {
        letter: byte / 32 - (2.0 if (letter in _VOWELS) is after_vowel else 0.0)
        for letter, byte in zip(_LETTERS, noise, strict=True)
    }
    if last in _LETTERS:
        logits[_SPACE] = _SPACE_LOGIT
    return logits
