"""Options without their secrets, for files and services that keep them."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

REDACTED = "<redacted>"

_ENVIRONMENT = re.compile(r"(^|_)env(_vars?|ironment)?$")
_SECRET = re.compile(r"passw(or)?d|passphrase|secret|credential|authorization|bearer|cookie|(^|_)pwd")
_WORD = r"(^|_|access|api|auth|private)(key|token)"
_NAMED_FOR_ONE = re.compile(_WORD + r"$|(^|_)(auth|pass|pat|sig|signature)$")
_NAMED_FOR_SOME = re.compile(_WORD + "s?(_|$)")
_USER_OF_URL = re.compile(r"(?<=\w://)[^/?#\s]+(?=@)")
_PAIR_OF_URL = re.compile(r"(?<=[?&;#])([\w.-]+)(=)([^&;#\s]+)")
_PAIR = re.compile(r"^\s*([\w.-]+)(\s*[:=]\s*)(?!//)(\S.*)", re.DOTALL)
"""A text that is a header or a variable with its value."""
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_CREDENTIALS = re.compile(r"\b((?i:bearer)\s+|(?i:basic)\s+(?=\S+[A-Z0-9=]))\S+")
"""As a header has them. Those for Basic are in base64; what follows the word in prose is not."""
SESSION_KEY = "sk-slime-"
"""What the keys of agents' sessions begin with, which are part of URLs."""
_SESSION_KEY = re.compile(SESSION_KEY + r"[\w-]+")
_HARMLESS = re.compile(
    r"^(eval_)?(input|label|metadata|multimodal|reward|tool)_keys?$"  # columns and entries
    r"|^(bos|eos|pad|stop|unk)_token$|(^|_)token_(dispatcher|drop|map)|_tokens_buckets$|_(first|per)_token$|_path$"
)
_HARMLESS_VARIABLES = ("GPG_KEY", "OLDPWD", "PWD")
"""A key's public fingerprint, and directories."""
_SWITCHES = ("", "0", "1", "false", "no", "off", "on", "true", "yes")


def redacted(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which every secret is `REDACTED`, at any depth: what its name calls one, and all environment variables.
    In a list, the words after ``--some-password`` are judged by that name, as on a command line."""
    return {name: _redact(str(name), value) for name, value in options.items()}


def is_secret(name: str, value: Any) -> bool:
    """Whether the name of an option or an environment variable calls its value a secret. A number, unless the name ends
    in key or token (``judge_token: 123``), is a count or an id, not a secret. Nor is a switch, or the path of a file
    that is there."""
    if value is None or isinstance(value, bool) or name in _HARMLESS_VARIABLES:
        return False
    if isinstance(value, str) and (value.lower() in _SWITCHES or (os.path.isabs(value) and os.path.exists(value))):
        return False
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name.lstrip("-")).replace("-", "_").lower()
    if _SECRET.search(name):
        return True
    if _HARMLESS.search(name):
        return False
    return bool(_NAMED_FOR_ONE.search(name) or (_NAMED_FOR_SOME.search(name) and not _is_numeric(value)))


def _redact(name: str, value: Any) -> Any:
    if isinstance(value, Mapping) and _ENVIRONMENT.search(name.lower()):
        return dict.fromkeys(value, REDACTED)
    if is_secret(name, value):
        return REDACTED
    if isinstance(value, str):
        return _redacted_text(name, value)
    if isinstance(value, Mapping):
        return redacted(value)
    if is_dataclass(value) and not isinstance(value, type):
        shown = {field.name for field in fields(value) if field.repr}
        return redacted({name: each for name, each in asdict(value).items() if name in shown})
    return redacted_words(value) if isinstance(value, (list, tuple)) else value


def _redacted_text(name: str, text: str) -> str:
    """A text that holds others: JSON, another program's command line, a URL with its user, a header's credentials."""
    if text.lstrip().startswith(("{", "[")):
        try:
            found = json.loads(text)
            shown = _redact(name.lstrip("-").replace("-", "_"), found)
            return text if shown == found else json.dumps(shown, ensure_ascii=False)
        except RecursionError:  # nobody can tell what is in it
            return REDACTED
        except ValueError:
            pass
    words = text.split()
    if len(words) > 1 and words[0].startswith("--"):
        return text if redacted_words(words) == words else " ".join(map(str, redacted_words(words)))
    return _PAIR.sub(_redacted_pair, redacted_line(text))


def redacted_line(text: str, secrets: Collection[str] = ()) -> str:
    """A line of prose without ``secrets``, users of URLs, URLs' parameters that are named for one, and credentials."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = _PAIR_OF_URL.sub(_redacted_pair, _USER_OF_URL.sub(REDACTED, text))
    text = _SESSION_KEY.sub(REDACTED, text)
    return _CREDENTIALS.sub(rf"\1{REDACTED}", text)


def _redacted_pair(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{REDACTED}" if is_secret(found[1], found[3]) else found[0]


def redacted_words(words: Sequence[Any]) -> list[Any]:
    """A command line in which every secret is `REDACTED`: the words after a flag that is named for one."""
    flag, result = "", []
    for word in words:
        if isinstance(word, str) and is_flag(word):
            flag, equals, value = word.partition("=")
            result.append(flag + equals + str(_redact(flag, value)) if equals else flag)
        else:
            result.append(_redact(flag, word))
    return result


def redacted_command(text: str) -> str:
    """A command of the shell to be printed: as it is, or where it holds secrets, its words without these and quotes."""
    try:
        words = shlex.split(text)
    except ValueError:  # quotes that are of no such word, in a comment for one
        words = text.split()
    shown = [_redacted_in_command(word) for word in redacted_words(words)]
    return text if shown == words else " ".join(shown)


def _redacted_in_command(word: str) -> str:
    """One word: a variable with its value, or another command, as of ``bash -c``."""
    begin = ""
    if variable := _VARIABLE.match(word):
        begin, word = f"{variable[1]}=", str(_redact(variable[1], variable[2]))
    is_json = word.lstrip().startswith(("{", "["))  # which has been looked at as such
    return begin + (redacted_command(word) if len(word.split()) > 1 and not is_json else word)


def is_flag(word: str) -> bool:
    """Whether a word of a command line begins what follows it: ``--name``, ``--name=value`` or ``-n``."""
    if word.startswith("--"):
        return not re.search(r"\s", word.partition("=")[0].strip())
    return re.fullmatch(r"-[A-Za-z]", word) is not None


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_numeric(item) for item in value)
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
