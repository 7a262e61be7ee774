"""Removes names, addresses and secrets from texts, by rules: the part of ``redaction`` that reads a text.

A value becomes a private character of Unicode, and at the end a word such as ``node-1``: so no rule reads the words of
another. Rules use ASCII's word boundaries, because text in front of a value may be Chinese. The rules prefer to remove
too much: a name that stays is worse than a word that is missing.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from provision.masking import HIDDEN, is_harmless, names_secret, replace_tokens
from provision.output_text import clean


class Rule(NamedTuple):
    """What is removed: the word that replaces it, and its name in the report."""

    word: str
    title: str


RULES = {
    "run": Rule("run", "Ids of runs"),
    "node": Rule("node", "Names of nodes"),
    "host": Rule("host", "Other host names and domains"),
    "address": Rule("address", "IP addresses"),
    "hardware": Rule("mac", "MAC addresses and GUIDs"),
    "user": Rule("user", "User names"),
    "email": Rule("email", "E-mail addresses"),
    "folder": Rule("folder", "Folders"),
    "url": Rule("url", "URLs"),
    "labelled": Rule("secret", "Secrets by their label, such as password="),
    "token": Rule("secret", "Tokens of a known shape"),
    "pem": Rule("secret", "Keys and certificates (PEM)"),
    "random": Rule("secret", "Random letters and digits"),
    "identifier": Rule("id", "UUIDs and fingerprints"),
}
MOST = 60_000  # different values; all further ones share a word
_NAMED = 300  # characters of a known name or secret
LONGEST = 100_000  # characters of a text that are read; the rest is dropped

_FIRST = 0xF0000  # the first private character
_PRIVATE = re.compile("[\U000f0000-\U0010fffd]")
_NAME = r"[A-Za-z0-9](?:[\w-]*[A-Za-z0-9])?(?:\.[\w-]+)*"  # of a host

_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{1,60}-----(?:.{0,20000}?-----END [A-Z0-9 ]{1,60}-----|[A-Za-z0-9+/=\s\\]*)", re.DOTALL
)
# A label, and its value: in quotes, or to the next separator.
_LABEL = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>-{0,2}[A-Za-z][A-Za-z0-9_.-]{0,100})\\?[\"']?\s{0,3}(?:=>|:=|==|[=:\uff1a])\s{0,3}\\?", re.ASCII
)  # fmt: skip
_OPTION = re.compile(r"(?<![A-Za-z0-9_-])(?P<name>--?[A-Za-z][A-Za-z0-9_.-]{0,100})\s{1,3}(?!-)", re.ASCII)
_VALUE = re.compile(
    r"""(?P<value>"(?:[^"\\\n]|\\.){1,20000}"?|'(?:[^'\\\n]|\\.){1,20000}'?"""
    r"""|[^\s"',;&)}\]<>,;。、][^\s"',;&)}\]<>,;。、]{0,20000})"""
)
_OWN = re.compile(  # labels of secrets in files and logs, besides those of options and variables
    r"(^|_)(pwd|passwort|passcode|pin_code|auth|auth_token|authorization|cookie|set_cookie|session_id|sig|webhook(_url)?"
    r"|dsn|connection_string|conn_str|pgpassword|mysql_pwd|app_key|app_secret|client_secret|encryption_key|license_key"
    r"|signing_key|master_key|storage_key|shared_access_key|api_?secret|token|apikey|secretkey|accesskey)$|^(pass|pw)$"
)
_PASSWORD = re.compile(r"pass|pwd|^pw$|secret", re.IGNORECASE)  # whose value may be a number
_REFERENCE = re.compile(r"\$\{?[A-Z_][A-Z0-9_]*\}?|[<\[].*|\*+|None|null|\(.*|(?i:basic|bearer|negotiate)")
_SPOKEN = (  # the first two are headers: their values have several words
    re.compile(r"(?i)\bauthorization\\?[\"']?\s*[:=]\s*\\?[\"']?(?:[a-z]{4,12}\s+)?(?P<value>[^\s\"',;\\]+)", re.ASCII),
    re.compile(r"(?i)\b(?:set-)?cookie\\?[\"']?\s*[:=]\s*(?P<value>[^\r\n\"']+)", re.ASCII),
    re.compile(
        r"(?i)\b(?:bearer|basic)\s+(?P<value>(?=[\w~+/=.-]*[0-9=])[\w~+/=-][\w~+/=.-]{7,})", re.ASCII
    ),
    re.compile(r"(?i)\b(?:password|passwd|passphrase)\s+(?:is\s+|was\s+)?[\"']?(?P<value>(?=\S*[\d!@#$%^&*+])[^\s\"']{4,})", re.ASCII),
    re.compile(r"(?i)\blogin\s+\S+\s+password\s+(?P<value>\S+)", re.ASCII),
    re.compile(r"(?i)\b(?:api|access|secret|private|encryption|license)[ -]?keys?\s*(?:is|:|=)\s*[\"']?(?P<value>[^\s\"',;]+)", re.ASCII),
    re.compile(r"(?i)\bsshpass\s+-p\s*(?P<value>\"[^\"]+\"|'[^']+'|\S+)", re.ASCII),
    re.compile(r"(?i)(?:^|\s)(?:-u|--user)[ =]\s*[\"']?(?P<value>[^\s:\"']+:[^\s\"']+)", re.ASCII),
    re.compile(
        "(?:密码|口令|密钥|秘钥|密匙|令牌|私钥|凭证|授权码|访问码|验证码)\\s*(?:是|为|[:=\uff1a])?\\s*"
        "[\"'“‘「]?(?P<value>[!-&(-~]{4,})"
    ),
    re.compile(r"(?P<value>\$(?:1|2[abxy]?|5|6|7|y|gy|apr1|argon2\w*|pbkdf2[\w-]*)\$[./A-Za-z0-9$=,+-]{8,})", re.ASCII),
    re.compile(r"(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-[\w-]+|sk-[\w@.-]+)\s+(?P<value>AAAA[A-Za-z0-9+/=]{16,})", re.ASCII),
    re.compile(r"(?<![\w/])(?P<value>[\w.%+-]{1,64}:[^\s:@/\"']{1,128}@(?=[A-Za-z0-9]))", re.ASCII),
)  # fmt: skip
_RUN = re.compile(r"(?<![A-Za-z0-9])20\d{6}-\d{6}-(?:[\w.-]{1,80}-)?[0-9a-f]{4}(?![A-Za-z0-9])", re.ASCII)  # a run's id
_URL = re.compile(
    r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{1,30}):(?:\\?/){2}(?P<rest>[!#-&(-;=?-\[\]_a-z~\\\U000f0000-\U0010fffd]+)"
)
_COPY = re.compile(
    r"(?<![\w@.-])[\w.-]{1,64}@[\w.-]{1,255}:(?=[\w./~-]*[A-Za-z])[\w./~-]+", re.ASCII
)  # git@HOST:GROUP/PROJECT
_PLAIN_SCHEMES = {"tcp", "udp", "env", "ib"}
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,100}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,8}\.[A-Za-z]{2,24}(?![A-Za-z0-9])",
    re.ASCII,
)
_LOGIN = re.compile(r"(?<![\w@.])(?P<user>[A-Za-z_][\w.-]{0,31})@(?!GLIBC|CXX|\d)(?P<host>[A-Za-z][\w.-]{0,252})", re.ASCII)  # fmt: skip
_UUID = re.compile(r"(?<![A-Za-z0-9])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![A-Za-z0-9])", re.ASCII)
_FINGERPRINT = re.compile(r"\bSHA256:[A-Za-z0-9+/]{43}=?|\bMD5(?::[0-9a-f]{2}){16}", re.ASCII)  # of keys of ssh
_HEX = re.compile(r"(?<![A-Za-z0-9])(?:0x)?[0-9a-fA-F]{32,}(?![A-Za-z0-9])", re.ASCII)
_DIGEST = re.compile(  # in front of a sum that identifies bytes, and no secret
    r"(?i)(?:sha-?\d+(?:sum)?|md5|blake\w*|digest|commit|revision|snapshots?|checksums?|releases?|bundle|rev)\W{1,4}$", re.ASCII
)  # fmt: skip
_RANDOM = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9][A-Za-z0-9+/_-]{18,}={0,2}", re.ASCII)
_MAC = re.compile(
    r"(?<![0-9A-Za-z.-])[0-9A-Fa-f]{2}([:-])(?:[0-9A-Fa-f]{2}\1){4,18}[0-9A-Fa-f]{2}(?![0-9A-Za-z]|[:-][0-9A-Fa-f])"
    r"|(?<![0-9A-Za-z:.])(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}(?![0-9A-Za-z.])|(?<=\benx)[0-9a-f]{12}\b"
    r"|(?<![0-9A-Za-z:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![0-9A-Za-z:])|\b0x(?!0000)[0-9a-f]{16}\b",
    re.ASCII,
)
_IPV6 = re.compile(
    r"(?<![A-Za-z0-9.])(?:[0-9A-Fa-f]{1,4}:|::)(?:[0-9A-Fa-f]{0,4}:){0,7}(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{1,4})?(?:%[\w.-]+)?(?![A-Za-z0-9:])",
    re.ASCII,
)
_IPV4 = re.compile(
    r"(?<![\d.])(?<![vV])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)|(?<=ip-)\d{1,3}(?:-\d{1,3}){3}(?!\d)", re.ASCII
)
_VERSION = re.compile(
    r"(?i)(?:[a-z][\w.-]*==|\bversion[ :=]{1,2}|\b(?:cudnn|cublas|nccl|cuda|driver)[ :=]{1,2})$", re.ASCII
)
_COMMON = {"127.0.0.1", "0.0.0.0", "255.255.255.255", "255.255.255.0", "255.255.0.0", "255.0.0.0"}  # noqa: S104
_ENDS = (
    "com|org|edu|gov|mil|int|net|cn|hk|tw|jp|kr|sg|de|uk|fr|eu|ru|ch|nl|se|us|ca|au|br|in|it|es|fi|dk|cz|io|ai|dev|tech"
    "|biz|xyz|co|cloud|app|local|lan|internal|intranet|intra|corp|home|cluster|localdomain|private|site|online|arpa|info"
)
_DOMAIN = re.compile(
    rf"(?i)(?<![A-Za-z0-9_@\\-])(?<![A-Za-z0-9]\.)(?:[A-Za-z0-9_](?:[\w-]{{0,61}}[A-Za-z0-9])?\.){{1,9}}(?:{_ENDS})(?![\w(=-]|\.\w)", re.ASCII
)  # fmt: skip
_SURE = re.compile(r"(?i)\.(?:com|org|edu|gov|cn|net|hk|tw|local|lan|internal|intranet|corp|localdomain)$")
_CODE = {  # the first parts of Python's dotted names
    *("self", "cls", "torch", "torchvision", "torchaudio", "np", "numpy", "os", "sys", "logging", "logger", "log"),
    *("threading", "asyncio", "model", "module", "transformers", "datasets", "accelerate", "deepspeed", "trainer"),
    *("peft", "scipy", "skimage", "plan", "env", "config", "args", "dist", "nn", "triton", "apex", "huggingface_hub"),
}
_PATH = re.compile(
    r"(?:(?<![A-Za-z0-9_.\-~/\\<\U000f0000-\U0010fffd])|(?<=<)(?=/[\w.-]+/))(?:~[\w.-]*|\$HOME|\$\{HOME\})?/(?!/)[^\s\"'<>|:;,()\[\]{}=*?`!&#。,;、()]{2,}"
    r"|(?<![A-Za-z0-9])[A-Za-z]:(?:\\+[^\s\"'<>|:;,()\[\]{}=*?`!&#\\。,;、()]+)+"
)
_SYSTEM = {"usr", "lib", "lib64", "dev", "proc", "sys", "bin", "sbin", "boot", "etc", "pytorch", "__w"}
_ORDINARY = re.compile(  # parts of a path that name no one
    r"(?i)\.?(?:home|root|users|export|data\d*|mnt|media|nfs|lustre|gpfs|share|shared|scratch|work|workspace|storage|disk\d*|nvme\d*"
    r"|ssd\d*|opt|var|tmp|run|runs|srv|llm|clusterctl|projects?|models?|datasets?|code|src|job|jobs|logs?|cache|outputs?|out|results?"
    r"|checkpoints?|ckpts?|checkpoint-\d+|step_?\d+|global_step\d+|epoch-?\d+|releases|current|envs?|venv|conda|miniconda\d*"
    r"|anaconda\d*|miniforge\d*|bin|lib|lib64|local|scripts?|configs?|examples|tests?|train|eval|tokenizer|huggingface|hub|torch"
    r"|modelscope|wandb|tensorboard|node\d+|rank\d+|state|\d+|[0-9a-f]{12}|\.+)"
)
_PACKAGES = re.compile(r"(?:site|dist)-packages|python\d[\d.]*")  # below these, only packages' own files
_KNOWN_FILE = re.compile(
    r".+\.(?:py|pyc|sh|ya?ml|json|jsonl|toml|ini|cfg|conf|txt|log|md|so(?:\.\d+)*|c|cc|cpp|h|hpp|cu|cuh|csv|parquet|arrow|bin"
    r"|pt|pth|safetensors|model|gz|zst|tar|zip|whl|conda|ccb|lock|pid|sock|html|ipynb|gguf)"
)
_HOSTS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"(?:^|[\s|\]])(?P<host>{_NAME}):\d{{1,7}}:\d{{1,7}} \[\d+\] NCCL",
        rf"(?i)(?<![A-Za-z0-9])(?:host_?(?:name)?|fqdn|nodename|master_?addr|main_process_ip|rdzv_endpoint|endpoint)\\?[\"']?"
        rf"\s*[=:\uff1a]\s*\\?[\"']?(?P<host>{_NAME})",
        rf"(?i)\b(?:server|node|machine|peer|remote|worker)\\?[\"']?\s*[=:]\s*\\?[\"']?(?P<host>(?=[\w.-]*[\d-]){_NAME})",
        rf"(?i)\bconnect(?:ing|ed)? to (?:host )?(?P<host>{_NAME})(?=:\d| port \d)",
        rf"(?i)\b(?:resolve host(?:name)?|unknown host|from host|on host|to host)[: ]\s*[\"']?(?P<host>{_NAME})",
        rf"\[(?P<host>[A-Za-z]{_NAME})\]:\d{{2,5}}\b",
        rf"(?<![\w.:/@-])(?P<host>(?=[A-Za-z][\w.-]*\d){_NAME}):\d{{4,5}}(?![\d:])",
        rf"(?m)^(?:[A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d|\d{{4}}-\d\d-\d\dT\S+) (?P<host>{_NAME}) [\w.()-]+(?:\[\d+\])?:",
        rf"(?:主机名?|节点|服务器|机器)\s*(?:是|为|[:=\uff1a])?\s*[\"'“]?(?P<host>(?=[\w.-]*[\d-])[A-Za-z]{_NAME})",
        rf"\\\\\\?\\?(?P<host>[A-Za-z]{_NAME})\\",
    )
)
_USERS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        r"(?i)(?<![A-Za-z0-9])(?:user_?(?:name|id)?|user id|uid|login|log_?name|owner|author|who)\\?[\"']?\s*[=:\uff1a]\s*"
        r"\\?[\"']?(?P<user>[A-Za-z_][\w.-]{1,31})",
        r"(?i)\b[ug]id=\d+\((?P<user>[^)\s]{1,32})\)",
        r"(?i)\b(?:for|by|of|as|invalid) user [\"']?(?P<user>[A-Za-z_][\w.-]{1,31})",
        r"(?i)\b(?:user|login)(?:name)? [\"'](?P<user>[^\"'\s]{2,32})[\"']",
        r"(?i)\bmachine \S+ login (?P<user>\S{2,32})",
        r"(?:/home|/Users|/export/home|[A-Za-z]:\\+Users)[/\\]+(?P<user>[^/\\\s\"'<>|:;,()\[\]{}=*?`。,;、]{1,64})",
        r"(?<![\w/])~(?P<user>[A-Za-z_][\w-]{1,31})/",
        r"\b(?:Author|Committer|Signed-off-by|Co-authored-by):\s*(?P<user>[^<>\n]{2,60}?)\s*<",
        r"(?:用户名?|账号|帐号|作者|姓名|负责人|联系人)\s*(?:是|为|[:=\uff1a])\s*[\"'“]?(?P<user>[A-Za-z_][\w.-]{1,31}|[\u4e00-\u9fff]{2,4})",
    )
)
_NOT_NAMES = {  # words after "user:" or "host:" and names of every machine
    *("root", "user", "users", "admin", "nobody", "localhost", "none", "null", "true", "false", "name", "host", "node"),
    *("error", "failed", "test", "data", "dev", "home", "train", "run", "default", "unknown", "system", "name", "id"),
    *("is", "was", "not", "the", "and", "for", "to", "in", "at", "on", "a", "an", "of", "or", "time", "cpu", "gpu"),
    *("rank", "step", "loss", "cuda", "worker", "server", "torch", "python", "agent", "process", "memory", "local"),
    *("dr", "public", "shared", "tmp", "env", "static", "c10d", "etcd", "file", "tcp", "http", "https", "ip", "port"),
}
_NO_HOST = re.compile(
    r"(?i)(?:rank|step|layer|cuda|gpu|npu|epoch|line|attempt|local_?rank|worker|dataloader|level|iter)[-_]?\d*"
)


class Names:
    """The values that a report no longer has, each with its word."""

    def __init__(self) -> None:
        """Start without any."""
        self.words: list[str] = []
        self.values: list[tuple[str, str]] = []  # of each word, its rule and value
        self._places: dict[tuple[str, str], int] = {}
        self._counts: Counter[str] = Counter()
        self._known: dict[str, str] = {}  # by value in small letters, its rule
        self._secrets: dict[str, str] = {}
        self._shown: set[int] = set()
        self._patterns: list[tuple[re.Pattern[str], dict[str, str]]] = []

    def place(self, rule: str, value: str) -> str:
        """The private character of a value."""
        word = RULES[rule].word
        at = self._places.get((word, value))
        if at is None:
            self._counts[word] += 1
            full = len(self.words) >= MOST
            at = MOST if full and len(self.words) > MOST else len(self.words)
            if at == len(self.words):
                self.words.append(f"{word}-{self._counts[word]}" if not full else "removed")
                self.values.append((rule, value))
            if not full:
                self._places[word, value] = at
        return chr(_FIRST + at)

    def know(self, rule: str, value: str, *, at_once: bool = False) -> None:
        """Remember a name, which is then removed wherever it is; ``at_once`` gives it the next number of its word."""
        value = value.strip().rstrip(".").strip()
        lowered = value.lower()
        if not 2 <= len(value) <= _NAMED or lowered.isdigit() or _PRIVATE.search(value) or len(self._known) >= MOST:
            return
        if rule in {"labelled", "token", "random"}:
            if len(value) >= 8 and re.search(r"[^A-Za-z]", value):
                self._secrets.setdefault(lowered, rule)
        elif at_once or (lowered not in _NOT_NAMES and not _is_common(rule, lowered)):
            self._known.setdefault(lowered, rule)
            if at_once:
                self.place(rule, lowered)

    def settle(self) -> None:
        """Prepare the removal of the names that are known now."""
        self._patterns = [(_any_of(known), known) for known in (self._secrets, self._known) if known]

    def take(self, other: Names) -> None:
        """Know what other names know."""
        self._known = {**other._known, **self._known}
        self._secrets = {**other._secrets, **self._secrets}

    def worded(self, text: str) -> str:
        """A text with words in place of private characters."""
        if text.isascii():
            return text

        def word(found: re.Match[str]) -> str:
            at = ord(found[0]) - _FIRST
            self._shown.add(at)
            return self.words[at]

        return _PRIVATE.sub(word, text)

    def removed(self) -> dict[str, int]:
        """By rule, how many different values the texts have lost."""
        counts = Counter(self.values[at][0] for at in self._shown)
        return {rule: counts[rule] for rule in RULES if counts[rule]}

    def of(self, rule: str) -> dict[str, str]:
        """By word, the values of one rule."""
        return {word: value for word, (own, value) in zip(self.words, self.values, strict=True) if own == rule}

    def known(self, text: str, *, secrets: bool) -> str:
        """A text without known secrets, or without known names."""
        for pattern, known in self._patterns:
            if (known is self._secrets) is secrets:
                text = pattern.sub(self._placer(known), text)
        return text

    def _placer(self, known: Mapping[str, str]) -> Callable[[re.Match[str]], str]:
        return lambda found: self.place(known.get(found[0].lower(), "host"), found[0].lower())


def redacted(text: str, names: Names, label: str = "") -> str:
    """A text without names, addresses and secrets; each has a private character in its place.

    Args:
        text: the text.
        names: receives the values.
        label: the key whose value the text is.
    """
    text = _bounded(text)
    for step in _STEPS:
        text = step(text, names, label)
    return text


def _bounded(text: str) -> str:
    """A text as the page shows it, of bounded length."""
    return _PRIVATE.sub("", clean(text if len(text) <= LONGEST else f"{text[:LONGEST]}\N{HORIZONTAL ELLIPSIS}"))


def learn(text: str, names: Names, label: str = "") -> None:
    """Remember the hosts, users and secrets that a text shows by what is around them."""
    seen = redacted(text, names, label)  # its secrets are known then
    plain = _PRIVATE.sub(" ", seen) if seen != text else text
    for source in dict.fromkeys((_bounded(text), plain)):
        line = f"{label}={source}" if label else source
        for pattern in _HOSTS:
            for found in pattern.finditer(line):
                names.know("host", found["host"])
        for pattern in _USERS:
            for found in pattern.finditer(line):
                names.know("user", found["user"])
        for found in _LOGIN.finditer(line):
            names.know("user", found["user"])
            names.know("host", found["host"])


def is_label(name: str) -> bool:
    """Whether a key or label is that of a secret: an option's, a variable's, or one in a file or log."""
    bare = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")) if not name.isupper() else name.lstrip("-")
    last = bare.replace("-", "_").rpartition(".")[2]
    return names_secret(last) or names_secret(last.lower()) or _OWN.search(last.lower()) is not None


def is_value(label: str, value: str) -> bool:
    """Whether a value of a secret's label is one: no reference, no number for a token, nothing that is masked already."""
    value = value.strip("\"'\\ ")
    if not value or is_harmless(value) or _REFERENCE.fullmatch(value) or _PRIVATE.fullmatch(value):
        return False
    if _PASSWORD.search(label):
        return value != HIDDEN
    return not re.fullmatch(r"[-+\d.,eE%]{1,11}", value)


def _labelled(text: str, names: Names, label: str) -> str:
    if label and is_label(label):
        return names.place("labelled", _learnt(names, text)) if is_value(label, text) else text
    for pattern in _SPOKEN[:2]:
        text = pattern.sub(lambda found: _of_value(found, names), text)
    for pattern in (_LABEL, _OPTION):
        text = _values(pattern, text, names)
    for pattern in _SPOKEN[2:]:
        text = pattern.sub(lambda found: _of_value(found, names), text)
    return text


def _values(pattern: re.Pattern[str], text: str, names: Names) -> str:
    """Replace the values of labels. A value that is none may have labels itself, so the search continues in it."""
    parts, at = [], 0
    for found in iter(lambda: pattern.search(text, at), None):
        parts.append(text[at : found.end()])
        at = found.end()
        inner = pattern.match(text, at)
        if not is_label(found["name"]) or (inner and is_label(inner["name"])):  # or a label in front of another
            continue
        value = _VALUE.match(text, at)
        if value is None or not is_value(found["name"], value["value"]):
            continue
        parts.append(names.place("labelled", _learnt(names, value["value"].strip("\"'\\"))))
        at = value.end()
    return "".join(parts) + text[at:]


def _of_value(found: re.Match[str], names: Names) -> str:
    value = found["value"]
    if not is_value("password", value):
        return found[0]
    start, end = found.start("value") - found.start(), found.end("value") - found.start()
    return found[0][:start] + names.place("labelled", _learnt(names, value.strip("\"'"))) + found[0][end:]


def _learnt(names: Names, value: str) -> str:
    names.know("labelled", value)
    return value


def _pem(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return _PEM.sub(lambda found: names.place("pem", found[0]), text)


def _known_secrets(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return names.known(text, secrets=True)


def _tokens(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return replace_tokens(text, lambda token: names.place("token", token))


def _urls(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    def url(found: re.Match[str]) -> str:
        if found["scheme"].lower() in _PLAIN_SCHEMES and "@" not in found[0]:
            return found[0]
        whole = found[0].rstrip(".,;:)]\\")
        return names.place("url", whole) + found[0][len(whole) :]

    text = _URL.sub(url, text)
    text = _COPY.sub(lambda found: names.place("url", found[0]), text)
    return _EMAIL.sub(lambda found: names.place("email", found[0].lower()), text)


def _logins(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    def login(found: re.Match[str]) -> str:
        for rule in ("user", "host"):
            names.know(rule, found[rule])
        host = names.known(found["host"], secrets=False)
        host = host if host != found["host"] else names.place("host", host.lower())
        return f"{names.place('user', found['user'].lower())}@{host}"

    return _LOGIN.sub(login, text)


def _random(text: str, names: Names, label: str) -> str:
    text = _UUID.sub(lambda found: names.place("identifier", found[0].lower()), text)
    text = _FINGERPRINT.sub(lambda found: names.place("identifier", found[0]), text)

    def digits(found: re.Match[str]) -> str:
        before = f"{label}: {text[: found.start()]}"[-40:]
        return found[0] if _DIGEST.search(before) or len(set(found[0])) < 6 else names.place("random", found[0])

    text = _HEX.sub(digits, text)
    return _RANDOM.sub(lambda found: names.place("random", found[0]) if _is_random(found[0]) else found[0], text)


def _is_random(word: str) -> bool:
    """Whether a word of at least 19 characters looks random: its kinds of characters alternate often."""
    kinds = ["d" if letter.isdigit() else "u" if letter.isupper() else "l" for letter in word if letter.isalnum()]
    if len(set(kinds)) < 3 and not ("+" in word or word.endswith("=")):
        return False
    changes = sum(
        first != second for part in re.split(r"[-_+/=]", word) for first, second in zip(_kinds(part), _kinds(part)[1:], strict=False)
    )  # fmt: skip
    return changes >= (0.3 if kinds.count("d") > 1 else 0.5) * len(kinds)  # names of classes have few digits


def _kinds(word: str) -> str:
    return "".join("d" if letter.isdigit() else "u" if letter.isupper() else "l" for letter in word)


def _addresses(text: str, names: Names, label: str) -> str:
    text = _MAC.sub(lambda found: names.place("hardware", found[0].lower()), text)

    def six(found: re.Match[str]) -> str:
        value = found[0].partition("%")[0]
        try:
            number = int(ipaddress.IPv6Address(value))
        except ValueError:
            return found[0]
        small = number < 1 << 16 or value.lower().startswith("c10::")
        return found[0] if small else names.place("address", value.lower())

    def four(found: re.Match[str]) -> str:
        value = found[0].replace("-", ".")
        before = f"{label}={text[: found.start()]}"[-60:]
        is_address = all(int(part) < 256 for part in value.split(".")) and value not in _COMMON
        return names.place("address", value) if is_address and not _VERSION.search(before) else found[0]

    text = _IPV6.sub(six, text)
    return _IPV4.sub(four, text)


def _known_names(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    text = names.known(text, secrets=False)
    return _RUN.sub(lambda found: names.place("run", found[0].lower()), text)


def _paths(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    return _PATH.sub(lambda found: "".join(_path(found[0], names)), text)


def _path(path: str, names: Names) -> Iterator[str]:
    """A path's parts; folders get words, other than those of every machine and of packages."""
    parts = re.split(r"([/\\]+)", path.rstrip("."))
    named = [part for part in parts[::2] if part]
    if not path.startswith("~") and named and named[0] in _SYSTEM:
        yield path
        return
    below = after_home = False
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        if (
            place % 2
            or not part
            or below
            or _PACKAGES.fullmatch(part)
            or (_ORDINARY.fullmatch(part) and not after_home)
            or (place == 0 and re.fullmatch(r"~|\$HOME|\$\{HOME\}|[A-Za-z]:", part))
            or _PRIVATE.fullmatch(part)
            or (is_last and _KNOWN_FILE.fullmatch(part) and not after_home)
        ):
            yield part
        else:
            yield names.place("user" if after_home else "folder", part.lower() if after_home else part)
        if part:
            below = below or _PACKAGES.fullmatch(part) is not None
            after_home = part in {"home", "Users"} or (after_home and bool(place % 2))
    yield path[len(path.rstrip(".")) :]


def _domains(text: str, names: Names, label: str) -> str:  # noqa: ARG001 - a step
    def domain(found: re.Match[str]) -> str:
        name = found[0]
        first, labels = name.partition(".")[0].lower(), name.count(".") + 1
        is_sure = _SURE.search(name) is not None or labels > 2 or re.search(r"[\d-]", name) is not None
        return (
            found[0]
            if first in _CODE or not (is_sure or name.endswith((".io", ".ai")))
            else names.place("host", name.lower())
        )

    return _DOMAIN.sub(domain, text)


def _is_common(rule: str, name: str) -> bool:
    """Whether a word beside a label is none of a host or user: a rank, a file, an address, a number."""
    if rule == "host":
        if len(name) < 3:
            return True
        return bool(_NO_HOST.fullmatch(name) or _KNOWN_FILE.fullmatch(name) or re.fullmatch(r"[\d.:]+", name))
    return False


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """One pattern for many words, as a tree of their letters: its time does not grow with their number."""
    tree: dict[str, object] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})  # type: ignore[assignment]
        node[""] = {}
    return re.compile(rf"(?i)(?<![A-Za-z0-9]){_branch(tree)}(?![A-Za-z0-9])")


def _branch(tree: dict[str, object]) -> str:
    """The pattern of a tree; loops down single branches, so that long words need no deep recursion."""
    text = ""
    while len(tree) == 1 and "" not in tree:
        ((letter, below),) = tree.items()
        text, tree = text + re.escape(letter), below  # type: ignore[assignment]
    branches = [re.escape(letter) + _branch(below) for letter, below in tree.items() if letter]  # type: ignore[arg-type]
    if not branches:
        return text
    return f"{text}(?:{'|'.join(branches)}){'?' if '' in tree else ''}"


_STEPS: Sequence[Callable[[str, Names, str], str]] = (
    _known_secrets, _pem, _labelled, _tokens, _urls, _logins, _random, _known_names, _addresses, _paths, _domains,
)  # fmt: skip
