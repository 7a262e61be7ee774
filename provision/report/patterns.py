"""The patterns by which ``sensitive`` finds names, addresses and secrets in texts.

All are ASCII's: a Chinese character is no part of a word. Repetitions have limits, so that no text takes long.
"""

from __future__ import annotations

import re

NAME = r"[A-Za-z0-9](?:[\w-]*[A-Za-z0-9])?(?:\.[\w-]+)*"  # of a host

PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{1,60}-----(?:.{0,20000}?-----END [A-Z0-9 ]{1,60}-----|[A-Za-z0-9+/=\s\\]*)", re.DOTALL
)
# A label, and its value: in quotes, or to the next separator.
LABEL = re.compile(
    r"(?<![A-Za-z0-9_])(?P<name>-{0,2}[A-Za-z][A-Za-z0-9_.-]{0,100})\\?[\"']?\s{0,3}(?:=>|:=|==|[=:\uff1a])\s{0,3}\\?",
    re.ASCII,
)
OPTION = re.compile(r"(?<![A-Za-z0-9_-])(?P<name>--?[A-Za-z][A-Za-z0-9_.-]{0,100})\s{1,3}(?!-)", re.ASCII)
VALUE = re.compile(
    r"""(?P<value>"(?:[^"\\\n]|\\.){1,20000}"?|'(?:[^'\\\n]|\\.){1,20000}'?"""
    r"""|[^\s"',;&)}\]<>,;。、][^\s"',;&)}\]<>,;。、]{0,20000})"""
)
OWN = re.compile(  # labels of secrets in files and logs, besides those of options and variables
    r"(^|_)(pwd|passwort|passcode|pin_code|auth|auth_token|authorization|cookie|set_cookie|session_id|sig|webhook(_url)?"
    r"|dsn|connection_string|conn_str|pgpassword|mysql_pwd|app_key|app_secret|client_secret|encryption_key|license_key"
    r"|signing_key|master_key|storage_key|shared_access_key|api_?secret|token|apikey|secretkey|accesskey)$|^(pass|pw)$"
)
PASSWORD = re.compile(r"pass|pwd|^pw$|secret", re.IGNORECASE)  # whose value may be a number
REFERENCE = re.compile(r"\$\{?[A-Z_][A-Z0-9_]*\}?|[<\[].*|\*+|None|null|\(.*|(?i:basic|bearer|negotiate)")
SPOKEN = (  # the first two are headers: their values have several words
    re.compile(r"(?i)\bauthorization\\?[\"']?\s*[:=]\s*\\?[\"']?(?:[a-z]{4,12}\s+)?(?P<value>[^\s\"',;\\]+)", re.ASCII),
    re.compile(r"(?i)\b(?:set-)?cookie\\?[\"']?\s*[:=]\s*(?P<value>[^\r\n\"']+)", re.ASCII),
    re.compile(r"(?i)\b(?:bearer|basic)\s+(?P<value>(?=[\w~+/=.-]*[0-9=])[\w~+/=-][\w~+/=.-]{7,})", re.ASCII),
    re.compile(
        r"(?i)\b(?:password|passwd|passphrase)\s+(?:is\s+|was\s+)?[\"']?(?P<value>(?=\S*[\d!@#$%^&*+])[^\s\"']{4,})",
        re.ASCII,
    ),
    re.compile(r"(?i)\blogin\s+\S+\s+password\s+(?P<value>\S+)", re.ASCII),
    re.compile(
        r"(?i)\b(?:api|access|secret|private|encryption|license)[ -]?keys?\s*(?:is|:|=)\s*[\"']?(?P<value>[^\s\"',;]+)",
        re.ASCII,
    ),
    re.compile(r"(?i)\bserial(?:[ _-]?(?:number|no\.?))?\s*[:=]\s*[\"']?(?P<value>[A-Z0-9-]{6,40})", re.ASCII),
    re.compile(r"(?i)\bsshpass\s+-p\s*(?P<value>\"[^\"]+\"|'[^']+'|\S+)", re.ASCII),
    re.compile(r"(?i)(?:^|\s)(?:-u|--user)[ =]\s*[\"']?(?P<value>[^\s:\"']+:[^\s\"']+)", re.ASCII),
    re.compile(
        "(?:密码|口令|密钥|秘钥|密匙|令牌|私钥|凭证|授权码|访问码|验证码)\\s*(?:是|为|[:=\uff1a])?\\s*"
        "[\"'\u201c\u2018「]?(?P<value>[!-&(-~]{4,})"
    ),
    re.compile(r"(?P<value>\$(?:1|2[abxy]?|5|6|7|y|gy|apr1|argon2\w*|pbkdf2[\w-]*)\$[./A-Za-z0-9$=,+-]{8,})", re.ASCII),
    re.compile(
        r"(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-[\w-]+|sk-[\w@.-]+)\s+(?P<value>AAAA[A-Za-z0-9+/=]{16,})", re.ASCII
    ),
    re.compile(r"(?<![\w/])(?P<value>[\w.%+-]{1,64}:[^\s:@/\"']{1,128}@(?=[A-Za-z0-9]))", re.ASCII),
)
RUN = re.compile(r"(?<![A-Za-z0-9])20\d{6}-\d{6}-(?:[\w.-]{1,80}-)?[0-9a-f]{4}(?![A-Za-z0-9])", re.ASCII)  # an id
URL = re.compile(
    r"(?<![A-Za-z0-9+.-])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{1,30}):(?:\\?/){2}"
    r"[!#-&(-;=?-\[\]_a-z~\\\U000f0000-\U0010fffd]+"
)
COPY = re.compile(  # git@HOST:GROUP/PROJECT
    r"(?<![\w@.-])[\w.-]{1,64}@[\w.-]{1,255}:(?=[\w./~-]*[A-Za-z])[\w./~-]+", re.ASCII
)
PLAIN_SCHEMES = {"tcp", "udp", "env", "ib"}
EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,100}@[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63}){0,8}\.[A-Za-z]{2,24}"
    r"(?![A-Za-z0-9])",
    re.ASCII,
)
LOGIN = re.compile(  # not the version of a symbol
    r"(?<![\w@.])(?P<user>[A-Za-z_][\w.-]{0,31})@(?!GLIBC|CXX|\d)(?P<host>[A-Za-z][\w.-]{0,252})", re.ASCII
)
UUID = re.compile(r"(?<![A-Za-z0-9])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![A-Za-z0-9])", re.ASCII)
FINGERPRINT = re.compile(r"\bSHA256:[A-Za-z0-9+/]{43}=?|\bMD5(?::[0-9a-f]{2}){16}", re.ASCII)  # of keys of ssh
HEX = re.compile(r"(?<![A-Za-z0-9])(?:0x)?[0-9a-fA-F]{32,}(?![A-Za-z0-9])", re.ASCII)
DIGEST = re.compile(  # in front of a sum that identifies bytes, and no secret
    r"(?i)(?:sha-?\d+(?:sum)?|md5|blake\w*|digest|commit|revision|snapshots?|checksums?|releases?|bundle|rev)\W{1,4}$",
    re.ASCII,
)
RANDOM = re.compile(r"(?<![A-Za-z0-9+/_-])[A-Za-z0-9][A-Za-z0-9+/_-]{18,}={0,2}", re.ASCII)
MAC = re.compile(
    r"(?<![0-9A-Za-z.-])[0-9A-Fa-f]{2}([:-])(?:[0-9A-Fa-f]{2}\1){4,18}[0-9A-Fa-f]{2}(?![0-9A-Za-z]|[:-][0-9A-Fa-f])"
    r"|(?<![0-9A-Za-z:.])(?:[0-9a-f]{4}\.){2}[0-9a-f]{4}(?![0-9A-Za-z.])|(?<=\benx)[0-9a-f]{12}\b"
    r"|(?<![0-9A-Za-z:])(?:[0-9a-f]{4}:){3}[0-9a-f]{4}(?![0-9A-Za-z:])|\b0x(?!0000)[0-9a-f]{16}\b",
    re.ASCII,
)
IPV6 = re.compile(
    r"(?<![A-Za-z0-9.])(?:[0-9A-Fa-f]{1,4}:|::)(?:[0-9A-Fa-f]{0,4}:){0,7}"
    r"(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f]{1,4})?(?:%[\w.-]+)?(?![A-Za-z0-9:])",
    re.ASCII,
)
IPV4 = re.compile(r"(?<![\d.])(?<![vV])\d{1,3}(?:\.\d{1,3}){3}(?!\.?\d)|(?<=ip-)\d{1,3}(?:-\d{1,3}){3}(?!\d)", re.ASCII)
VERSION = re.compile(  # in front of four numbers that are no address
    r"(?i)(?:[a-z][\w.-]*==|\bversion[ :=]{1,2}|\b(?:cudnn|cublas|nccl|cuda|driver)[ :=]{1,2})$", re.ASCII
)
COMMON = {"127.0.0.1", "0.0.0.0", "255.255.255.255", "255.255.255.0", "255.255.0.0", "255.0.0.0"}  # noqa: S104
ENDS = (
    "com|org|edu|gov|mil|int|net|cn|hk|tw|jp|kr|sg|de|uk|fr|eu|ru|ch|nl|se|us|ca|au|br|in|it|es|fi|dk|cz|io|ai|dev|tech"
    "|biz|xyz|co|cloud|app|local|lan|internal|intranet|intra|corp|home|cluster|localdomain|private|site|online|arpa|info"
)
DOMAIN = re.compile(
    r"(?i)(?<![A-Za-z0-9_@\\-])(?<![A-Za-z0-9]\.)(?:[A-Za-z0-9_](?:[\w-]{0,61}[A-Za-z0-9])?\.){1,9}"
    rf"(?:{ENDS})(?![\w(=-]|\.\w)",
    re.ASCII,
)
SURE = re.compile(r"(?i)\.(?:com|org|edu|gov|cn|net|hk|tw|local|lan|internal|intranet|corp|localdomain)$")
IDS = {"cpu.gov", "nccl.internal"}  # of a check and a cause, which look like domains
CODE = {  # the first parts of Python's dotted names
    *("self", "cls", "torch", "torchvision", "torchaudio", "np", "numpy", "os", "sys", "logging", "logger", "log"),
    *("threading", "asyncio", "model", "module", "transformers", "datasets", "accelerate", "deepspeed", "trainer"),
    *("peft", "scipy", "skimage", "plan", "env", "config", "args", "dist", "nn", "triton", "apex", "huggingface_hub"),
}
END = r"\s\"'<>|:;,()\[\]{}=*?`!&#\u3002\uff0c\uff1b\u3001\uff08\uff09"  # characters that end a path
PATH = re.compile(
    r"(?:(?<![A-Za-z0-9_.\-~/\\<\U000f0000-\U0010fffd])|(?<=<)(?=/[\w.-]+/))(?:~[\w.-]*|\$HOME|\$\{HOME\})?/(?!/)"
    rf"[^{END}]{{2,}}|(?<![A-Za-z0-9])[A-Za-z]:(?:\\+[^{END}\\]+)+"
)
SYSTEM = {"usr", "lib", "lib64", "dev", "proc", "sys", "bin", "sbin", "boot", "etc", "pytorch", "__w"}
ORDINARY = re.compile(  # parts of a path that name no one
    r"(?i)\.?(?:home|root|users|export|data\d*|mnt|media|nfs|lustre|gpfs|share|shared|scratch|work|workspace|storage"
    r"|disk\d*|nvme\d*|ssd\d*|opt|var|tmp|run|runs|srv|llm|clusterctl|projects?|models?|datasets?|code|src|jobs?|logs?"
    r"|cache|outputs?|out|results?|checkpoints?|ckpts?|checkpoint-\d+|step_?\d+|global_step\d+|epoch-?\d+|releases"
    r"|current|envs?|venv|conda|miniconda\d*|anaconda\d*|miniforge\d*|bin|lib|lib64|local|scripts?|configs?|examples"
    r"|tests?|train|eval|tokenizer|huggingface|hub|torch|modelscope|wandb|tensorboard|node\d+|rank\d+|state|\d+"
    r"|[0-9a-f]{12}|\.+)"
)
PACKAGES = re.compile(r"(?:site|dist)-packages|python\d[\d.]*")  # below these, only packages' own files
IS = r"\\?[\"']?\s*[=:\uff1a]\s*\\?[\"']?"  # between a label and its value
HOSTS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"(?:^|[\s|\]])(?P<host>{NAME}):\d{{1,7}}:\d{{1,7}} \[\d+\] NCCL",
        rf"(?i)(?<![A-Za-z0-9])(?:host_?(?:name)?|fqdn|\w*node_?name|master_?addr|main_process_ip|endpoint){IS}(?P<host>{NAME})",
        rf"(?m)^(?P<host>(?=[\w.-]*[\d-]){NAME}): (?=\[[\dIWE]|\[rank|Traceback|\s+File )",  # pdsh
        rf"(?i)\b(?:server|node|machine|peer|remote|worker){IS}(?P<host>(?=[\w.-]*[\d-]){NAME})",
        rf"(?i)\bconnect(?:ing|ed)? to (?:host )?(?P<host>{NAME})(?=:\d| port \d)",
        rf"(?i)\b(?:resolve host(?:name)?|unknown host|from host|on host|to host)[: ]\s*[\"']?(?P<host>{NAME})",
        rf"\[(?P<host>[A-Za-z]{NAME})\]:\d{{2,5}}\b",
        rf"(?<![\w.:/@-])(?P<host>(?=[A-Za-z][\w.-]*\d){NAME}):\d{{4,5}}(?![\d:])",
        rf"(?m)^(?:[A-Z][a-z]{{2}} [ \d]\d [\d:]{{8}}|\d{{4}}-\d\d-\d\dT\S+) (?P<host>{NAME}) [\w.()-]+(?:\[\d+\])?:",
        rf"(?:主机名?|节点|服务器|机器)\s*(?:是|为|[:=\uff1a])?\s*[\"'\u201c]?(?P<host>(?=[\w.-]*[\d-])[A-Za-z]{NAME})",
        rf"\\\\\\?\\?(?P<host>[A-Za-z]{NAME})\\",
    )
)
LOGGED = r"[A-Za-z_][\w.-]{1,31}"  # a user's name
USERS = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (
        rf"(?i)(?<![A-Za-z0-9])(?:user[_. ]?(?:name|id)?|uid|login|log_?name|owner|author|who){IS}(?P<user>{LOGGED})",
        r"(?i)\b[ug]id=\d+\((?P<user>[^)\s]{1,32})\)",
        r"(?i)\b(?:for|by|of|as|invalid) user [\"']?(?P<user>[A-Za-z_][\w.-]{1,31})",
        r"(?i)\b(?:user|login)(?:name)? [\"'](?P<user>[^\"'\s]{2,32})[\"']",
        rf"(?i)\blogged in as:?\s*(?P<user>{LOGGED})",
        r"(?i)\blogged in as:?\s*\S+\s+\((?P<user>[^()\s]{2,64})\)",
        r"(?i)\bmachine \S+ login (?P<user>\S{2,32})",
        rf"(?:/home|/Users|/export/home|[A-Za-z]:\\+Users)[/\\]+(?P<user>[^/\\{END}]{{1,64}})",
        r"(?<![\w/])~(?P<user>[A-Za-z_][\w-]{1,31})/",
        r"\b(?:Author|Committer|Signed-off-by|Co-authored-by):\s*(?P<user>[^<>\n]{2,60}?)\s*<",
        rf"(?:用户名?|账号|帐号|作者|姓名|负责人|联系人)\s*(?:是|为|[:=\uff1a])\s*[\"'\u201c]?(?P<user>{LOGGED}|[\u4e00-\u9fff]{{2,4}})",
    )
)
