"""The Enron maildir as JSON Lines, parsed as in Chua et al. 2024, appendix B.1.

    python artifacts/papers/enron.py maildir > mails.jsonl

The privacy unit is the sender; a mail gives one record per receiver, those of Cc and Bcc included.
Left out are forwarded mails, and those in which any 20 words of the body come twice
(``docs/papers/studies.md``).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfopt.training.data.stdlib import walk

_NGRAM = 20  # words
_HEADER = re.compile(
    r"^(date|from|to|cc|bcc|subject):[ \t]*(.*(?:\n[ \t]+.*)*)", re.IGNORECASE | re.MULTILINE
)
_ADDRESS = re.compile(r"[^\s,;:<>\"'()]+@[^\s,;:<>\"'()]+")
_FORWARDED_SUBJECT = re.compile(r"^\s*fwd?\s*:", re.IGNORECASE)
_FORWARDED_BODY = re.compile(
    r"^[\s>]*-+\s*forwarded\s+(by|message)\b|^[\s>]*begin forwarded message:",
    re.IGNORECASE | re.MULTILINE,
)


def repeats_ngram(text: str, n: int = _NGRAM) -> bool:
    """Return True if some run of ``n`` words occurs more than once.

    >>> repeats_ngram("a b c a b d", 2), repeats_ngram("a b c a d b", 2)
    (True, False)
    """
    words = text.split()
    runs = [tuple(words[begin : begin + n]) for begin in range(len(words) - n + 1)]
    return len(set(runs)) < len(runs)


def parse(mail: str) -> dict[str, Any]:
    """Date, sender, receivers (each once, in order), subject and body of one mail.

    Raises ValueError where there is no header, no sender or no receiver.
    """
    mail = mail.replace("\r\n", "\n")
    head, separator, body = mail.partition("\n\n")
    fields: dict[str, str] = {}
    for name, value in _HEADER.findall(head):
        fields.setdefault(name.lower(), re.sub(r"\s*\n\s*", " ", value).strip())
    if not separator or not fields:
        raise ValueError("no mail header")
    senders = _ADDRESS.findall(fields.get("from", ""))
    if not senders:
        raise ValueError("no sender")
    receivers = [
        address.lower()
        for name in ("to", "cc", "bcc")
        for address in _ADDRESS.findall(fields.get(name, ""))
    ]
    if not receivers:
        raise ValueError("no receiver")
    return {
        "date": fields.get("date", ""),
        "sender": senders[0].lower(),
        "receivers": list(dict.fromkeys(receivers)),
        "subject": fields.get("subject", ""),
        "body": body.strip(),
    }


def records(folder: Path) -> Iterator[dict[str, str]]:
    """Records of the maildir: one file per mail, one record per receiver, the sender as user."""
    for path in walk(folder):
        data = path.read_bytes()
        try:
            mail = data.decode("utf-8")
        except UnicodeDecodeError:
            mail = data.decode("latin-1")  # mails of that time name no charset; every byte is valid
        try:
            fields = parse(mail)
        except ValueError:
            continue
        body = fields["body"]
        forwarded = _FORWARDED_SUBJECT.match(fields["subject"]) or _FORWARDED_BODY.search(body)
        if forwarded or not body or repeats_ngram(body):
            continue
        for receiver in fields["receivers"]:
            head = f"Date: {fields['date']}\nFrom: {fields['sender']}\nTo: {receiver}\n"
            text = f"{head}Subject: {fields['subject']}\n\n{body}\n"
            yield {"user": fields["sender"], "text": text}


if __name__ == "__main__":
    for record in records(Path(sys.argv[1])):
        print(json.dumps(record))
