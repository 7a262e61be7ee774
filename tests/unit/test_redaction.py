"""``report --redact``: names, addresses and secrets never reach the page, and what helps support stays."""

from __future__ import annotations

import base64
import html
import json
import re
import string
import sys
import time
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))  # for recorded_runs; last, so that it hides no module

from recorded_runs.cases import FOLDER, case

from provision.cli import cli
from provision.diagnosis import diagnose
from provision.diagnosis.case_code import KNOWN, decode
from provision.output import Reporter
from provision.report import NodeData, RunData, report_page
from provision.report.data import configuration
from provision.report.names import RULES
from provision.report.redaction import Known, redact
from provision.summaries.report import described
from trainer.reader import Row

NOW = 1_795_400_000.0
ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"


def letters(random, count, of=ALNUM):
    return "".join(random.choice(of) for _ in range(count))


def mixed(random, count, of=ALNUM):
    """Random letters with at least one of each kind, as generators of tokens make them."""
    return "aZ7" + letters(random, count - 3, of)


def name(random):
    return random.choice(["zhangwei", "olga", "mbappe", "priya", "schmidt"]) + letters(random, 3, string.digits)


def password(random):
    return "Pw" + letters(random, 9, ALNUM + "!#%*+_") + random.choice("!9x")


def host(random):
    return random.choice(["gpu-a", "dgx", "hpc-login", "zl-node"]) + letters(random, 4, string.digits)


def ip(random):
    return ".".join(str(random.randint(11, 223)) for _ in range(4))


def b64(random, count):
    return base64.b64encode(bytes(random.randrange(256) for _ in range(count))).decode()


def uuid(random):
    return "-".join(letters(random, count, HEX) for count in (8, 4, 4, 4, 12))


def pem(random):
    return (
        "-----BEGIN RSA PRIVATE KEY-----\n"
        + "\n".join(b64(random, 48) for _ in range(3))
        + "\n-----END RSA PRIVATE KEY-----"
    )


# Each kind: a function that returns the text as it occurs, and the values in it that must not be in the page.
KINDS = {
    "IPv4": lambda r: (v := ip(r), [v]),
    "IPv4 and port": lambda r: (f"{(v := ip(r))}:29500", [v]),
    "IPv4 network": lambda r: (f"{(v := ip(r))}/24", [v]),
    "IPv6": lambda r: (v := "2001:db8:" + ":".join(letters(r, 4, HEX[1:]) for _ in range(6)), [v]),
    "IPv6 link": lambda r: ((v := f"fe80::{letters(r, 3, HEX[1:])}:{letters(r, 4, HEX[1:])}") + "%ib0", [v]),
    "MAC": lambda r: (v := ":".join(letters(r, 2, HEX) for _ in range(6)), [v]),
    "InfiniBand GUID": lambda r: (v := "0x5" + letters(r, 15, HEX), [v]),
    "node": lambda _: ("secretnode7", ["secretnode7"]),
    "node of the fabric": lambda _: ("secretnode7-ib0", ["secretnode7"]),
    "node's domain": lambda r: (f"secretnode7.{(v := name(r))}.com", [v, "secretnode7"]),
    "domain": lambda r: (f"{(v := name(r))}.example.{r.choice(['com', 'cn', 'org', 'local', 'internal'])}", [v]),
    "domain of a common word": lambda r: (f"model.{(v := name(r))}.com", [v]),
    "host of ssh": lambda r: (f"ssh: connect to host {(v := host(r))} port 22", [v]),
    "host of NCCL": lambda r: (f"\n{(v := host(r))}:4411:4412 [0] NCCL INFO x; {v} again", [v]),
    "host of a rendezvous": lambda r: (f"rdzv_endpoint={(v := host(r))}:29500", [v]),
    "host of pdsh": lambda r: (f"\n{(v := host(r))}: [2026-11-26 22:07:55] [INFO] x\n{v}: Traceback (most", [v]),
    "host of Slurm": lambda r: (f"SLURMD_NODENAME={(v := host(r))}", [v]),
    "account of W&B": lambda r: (f"wandb: Currently logged in as: {(v := name(r))} ({(w := name(r))}) to x", [v, w]),
    "serial number": lambda r: (f"Serial Number: {(v := letters(r, 13, string.digits))}", [v]),
    "user": lambda r: (f"USER={(v := name(r))}", [v]),
    "user of id": lambda r: (f"uid=1003({(v := name(r))}) gid=1003", [v]),
    "user in Chinese": lambda r: (f"用户名:{(v := name(r))}", [v]),
    "person in Chinese": lambda _: ("负责人:张三丰", ["张三丰"]),
    "home": lambda r: (f"/home/{(v := name(r))}/{(w := name(r))}/train.py", [v, w]),
    "home of a flag": lambda r: (f"-I/home/{(v := name(r))}/include", [v]),
    "home on macOS": lambda r: (f"/Users/{(v := name(r))}/x", [v]),
    "home on Windows": lambda r: (rf"C:\Users\{(v := name(r))}\x.py", [v]),
    "folder": lambda r: (f"/data/{(v := name(r))}/models", [v]),
    "e-mail": lambda r: (f"{(v := name(r))}@{(w := name(r))}.com", [v, w]),
    "login": lambda r: (f"{(v := name(r))}@{(w := host(r))}", [v, w]),
    "author": lambda r: (f"Author: Ada {(v := name(r))} <{v}@x.org>", [v]),
    "git": lambda r: (f"git@github.com:{(v := name(r))}/{(w := name(r))}.git", [v, w]),
    "Hugging Face": lambda r: (v := "hf_" + letters(r, 34), [v]),
    "GitHub": lambda r: (v := "ghp_" + letters(r, 36), [v]),
    "GitHub fine-grained": lambda r: (v := "github_pat_" + letters(r, 22) + "_" + letters(r, 59), [v]),
    "GitLab": lambda r: (v := "glpat-" + letters(r, 20), [v]),
    "OpenAI": lambda r: (v := "sk-proj-" + letters(r, 40, ALNUM + "_-"), [v]),
    "Anthropic": lambda r: (v := "sk-ant-api03-" + letters(r, 60, ALNUM + "_-"), [v]),
    "W&B": lambda r: (v := letters(r, 40, HEX), [v]),
    "AWS id": lambda r: (v := "AKIA" + letters(r, 16, string.ascii_uppercase + string.digits), [v]),
    "AWS secret": lambda r: (f"aws_secret_access_key = {(v := mixed(r, 40, ALNUM + '+/'))}", [v]),
    "AWS secret, bare": lambda r: (v := mixed(r, 40), [v]),
    "Aliyun": lambda r: (v := "LTAI" + letters(r, 20), [v]),
    "Google": lambda r: (v := "AIza" + letters(r, 35), [v]),
    "Slack": lambda r: (v := "xoxb-" + letters(r, 12, string.digits) + "-" + letters(r, 24), [v]),
    "Slack webhook": lambda r: ("https://hooks.slack.com/services/T0/" + (v := letters(r, 24)), [v]),
    "Feishu webhook": lambda r: ("https://open.feishu.cn/open-apis/bot/v2/hook/" + (v := uuid(r)), [v]),
    "Stripe": lambda r: (v := "sk_live_" + letters(r, 24), [v]),
    "npm": lambda r: (v := "npm_" + letters(r, 36), [v]),
    "PyPI": lambda r: (v := "pypi-" + letters(r, 60), [v]),
    "Databricks": lambda r: (v := "dapi" + letters(r, 32, HEX), [v]),
    "Telegram": lambda r: (v := letters(r, 9, string.digits[1:]) + ":AA" + letters(r, 33), [v]),
    "JWT": lambda r: (v := "eyJ" + letters(r, 20) + "." + letters(r, 40) + "." + letters(r, 43), [v]),
    "basic": lambda r: (f"Authorization: Basic {(v := b64(r, 18))}", [v]),
    "bearer": lambda r: (f"authorization: bearer {(v := mixed(r, 24))}", [v]),
    "cookie": lambda r: (f"Cookie: session={(v := letters(r, 12))}; id={(w := letters(r, 9))}", [v, w]),
    "URL": lambda r: (f"https://u:{(v := password(r).replace('#', 'x'))}@{(w := name(r))}.net/x?token=a1", [v, w]),
    "PostgreSQL": lambda r: (f"postgresql://{(w := name(r))}:{(v := password(r).replace('#', 'x'))}@db:5432/x", [v, w]),
    "MongoDB": lambda r: (f"mongodb+srv://{(w := name(r))}:{(v := letters(r, 12))}@c0.ab1.mongodb.net", [v, w]),
    "Azure storage": lambda r: (f"AccountName=x;AccountKey={(v := b64(r, 64))};EndpointSuffix=y", [v]),
    "SQL server": lambda r: (f"Server=db;User Id={(w := name(r))};Password={(v := letters(r, 12))};", [v, w]),
    "presigned": lambda r: (f"https://b.s3.amazonaws.com/k?X-Amz-Signature={(v := letters(r, 64, HEX))}&a=b", [v]),
    "PEM": lambda r: (v := pem(r), v.splitlines()[1:-1]),
    "ssh key": lambda r: (f"ssh-ed25519 {(v := 'AAAAC3' + letters(r, 62))} {(w := name(r))}@x9", [v, w]),
    "password": lambda r: (f"password={(v := password(r))}", [v]),
    "password with a space": lambda r: (f'"password": "{(v := password(r))} {(w := password(r))}"', [v, w]),
    "number as a password": lambda r: (f"DB_PASSWORD: {(v := letters(r, 11, '123456789'))}", [v]),
    "password in Chinese": lambda r: (f"密码是{(v := password(r))},请", [v]),
    "password option": lambda r: (f"train.py --db-password {(v := password(r))} --lr 1e-4", [v]),
    "netrc": lambda r: (f"machine h7 login {(w := name(r))} password {(v := password(r))}", [v, w]),
    "sshpass": lambda r: (f"sshpass -p {(v := password(r))} ssh x", [v]),
    "variable": lambda r: (f"export SWANLAB_API_KEY='{(v := letters(r, 21))}'", [v]),
    "camel case": lambda r: (f'{{"clientSecret":"{(v := letters(r, 14))}"}}', [v]),
    "shadow": lambda r: (v := "$6$" + letters(r, 8) + "$" + letters(r, 86, ALNUM + "./"), [v[11:]]),
    "Vault": lambda r: (v := "hvs." + letters(r, 24), [v]),
    "UUID": lambda r: ("GPU-" + (v := uuid(r)), [v]),
    "colours inside": lambda r: (f"hf_{(v := letters(r, 20))}\x1b[0m{(w := letters(r, 20))}", [v + w]),
}  # fmt: skip

CONTEXTS = (
    "{}", "[rank0]: {}", "2026-11-26 22:07:55,123 INFO {} done", "错误:{}的值无效", "节点启动失败({})", "\tat {},",
    '"{}"', "'{}'", "run: {} --flag", "a\nb {}\nc", "x={} y", "key: {}", '{{"a": "{}"}}', "<{}>", "({})", "[{}]",
    "{}.", "{}; step 5", "`{}`", "「{}」",
)  # fmt: skip


def page_of(run):
    result = redact([run], Known(("secretnode7",)))
    return report_page(result.runs, NOW, result.removed), result


@settings(max_examples=max(6, settings.default.max_examples // 16))  # each has all kinds
@given(st.integers(0, 1 << 32).map(Random))
def test_no_kind_of_secret_reaches_the_page(random):
    values, texts = {}, []
    for kind, make in KINDS.items():
        text, hidden = make(random)
        texts.append(random.choice(CONTEXTS).format(text))
        values.update(dict.fromkeys(hidden, kind))
    random.shuffle(texts)
    event = [{"event": "notice", "time": 1.0 + place, "text": text} for place, text in enumerate(texts)]
    places = iter(texts * 2)
    node = NodeData("secretnode7", events=tuple(event), state={"state": next(places), "why": {"text": next(places)}})
    env = {f"V{place}": text for place, text in enumerate(texts)}
    record = {
        "launcher": next(places), "argv": ["train.py", *texts], "who": next(places), "master": next(places),
        "plans": {"secretnode7": {"env": env, "cwd": next(places), "argv": texts}}, "prefix": next(places),
    }  # fmt: skip
    files = {"a.yaml": json.dumps({"list": texts, **env}), "secretnode7.json": json.dumps(dict.fromkeys(texts, 1))}
    run = RunData("r-secretnode7", "failed", (node,), record=record, missing={"n1": next(places)}, files=files,
                  diagnosis="\n".join(texts), causes=tuple(texts))  # fmt: skip
    page, _ = page_of(run)
    flat = html.unescape(page).lower()
    leaks = {value: kind for value, kind in values.items() if value.lower() in flat}
    assert not leaks, leaks


@pytest.mark.parametrize(
    "text",
    [
        "step 41250 loss 0.8123 lr 1e-05 grad_norm 1.25 epoch 0.37, 1,234.5 tokens per second",
        "torch 2.13.0+cu126, transformers 5.6.0, deepspeed 0.18.2, python 3.12.4, clusterctl 0.1.0",
        "cudnn 9.1.0.70 nvidia-cublas-cu12==12.4.5.8 NCCL version 2.27.3+cuda12.9",
        "2026-11-26 22:07:55,123 2026-11-26T22:07:55.123Z 22:07:55 [22:07:55]",
        "release 5f0c1d2e3a4b, sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 79.10 GiB",
        "Qwen2_5_VLForConditionalGeneration LlavaOnevisionQwen2ForCausalLM Qwen3MoeSparseMoeBlock",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: exitcode: -9",
        "_ZN3c106detail14torchCheckFailEPKcS2_jRKSs c10::Error at::native::copy_ c10d::Reducer a[::2]",
        "KeyError: 'model.layers.0.mlp.gate.weight'; x.to(device), torchvision.io, logger.info",
        "per_device_train_batch_size=1 --pad_token <pad> max_tokens=512 tokens: 4096 tokenizer: auto",
        "use_auth_token=false hub_token=None token=$HF_TOKEN",
        "meta-llama/Llama-3.1-8B-Instruct on NVIDIA H100 80GB HBM3 at 0000:3b:00.0, mlx5_0:1/RoCE",
        "WORLD_SIZE=16 RANK=3 NCCL_IB_HCA=mlx5_0 CUDA_VISIBLE_DEVICES=0,1,2,3 OMP_NUM_THREADS=8",
        "127.0.0.1 0.0.0.0 ::1 localhost",
        "/usr/lib/x86_64-linux-gnu/libc.so.6 /opt/llm/releases/5f0c1d2e3a4b/lib/python3.12/site-packages/torch/nn/f.py",
        "/data/models/checkpoint-1000/model.safetensors",
        "bf16: true\nstep1: 5\nnode: 3 of 16\nwandb: offline\nprocess group: gloo\nserial: no",
        "rank 3 failed first: exit code 1, SIGKILL (9), node 2 of 16",
        "训练在第 41250 步失败,损失为 0.8123",
    ],
)
def test_what_helps_support_stays(text):
    result = redact([RunData("r", diagnosis=text)])
    assert result.runs[0].diagnosis == text


def test_ids_of_causes_and_checks_stay():
    checks = [path.stem for path in (Path(__file__).parent / "recorded").glob("*.yaml")]
    text = "\n".join([*KNOWN.values(), *checks])
    assert redact([RunData("r", diagnosis=text)]).runs[0].diagnosis == text


def test_the_same_value_is_the_same_word_in_all_runs_and_nodes_count_by_rank():
    def of(name, *texts):
        nodes = tuple(NodeData(each, rank) for rank, each in enumerate(("zeus", "apollo")))
        return RunData(name, nodes=nodes, missing={"hera": "zeus: no route to 10.1.2.3"}, causes=texts)

    first, second = redact([
        of("20261123-101500-alice-1a2b", "apollo rank 3", "10.1.2.4 of apollo", "alice@apollo", "/home/alice/x.py"),
        of("other", "run 20261123-101500-alice-1a2b at 10.1.2.3", "user alice"),
    ]).runs  # fmt: skip
    assert (first.id, second.id) == ("run-1", "run-2")
    assert [node.name for node in first.nodes] == ["node-1", "node-2"]
    assert dict(first.missing) == {"node-3": "node-1: no route to address-2"}
    assert first.causes == ("node-2 rank 3", "address-1 of node-2", "user-1@node-2", "/home/user-1/x.py")
    assert second.causes == ("run run-1 at address-2", "user user-1")


def test_the_page_lists_what_was_removed_and_not_the_values():
    run = RunData("r1", record={"who": "alice@ctl7"}, diagnosis="password=Hunter2x 10.1.2.3 10.1.2.4")
    page, result = page_of(run)
    assert result.removed == {"run": 1, "host": 1, "address": 2, "user": 1, "labelled": 1}
    section = re.search(r'id="removed".*?</section>', page)[0]
    assert re.search(r"IP addresses.*?address-1.*?<td>2</td>", section)
    for value in ("Hunter2x", "10.1.2.", "alice", "ctl7"):
        assert value not in page
    assert 'id="removed"' not in report_page([run], NOW)


def test_every_label_of_the_section_is_translated():
    page, _ = page_of(RunData("r", diagnosis="\n".join(make(Random(7))[0] for make in KINDS.values())))
    chinese = re.search(r"const zh = \{(.*?)\};", page, re.DOTALL)[1]
    keys = re.findall(r'data-i="(\w+)"', re.search(r'id="removed".*?</section>', page)[0])
    assert len(keys) > len(RULES)
    assert [key for key in keys if not re.search(rf"\b{key}:", chinese)] == []


def test_folders_of_file_names_are_removed_and_a_configuration_stays_readable():
    text = "# of alice\nlr: 1e-4\ndb:\n  password: 'a b'\n  hosts: [gpu-a1.acme.com, 10.1.2.3]\n"
    run = redact([RunData("r", files={"acme/sft.yaml": text, "bad.yaml": "a: [1"})]).runs[0]
    assert configuration(run) == {
        "folder-1/sft.yaml: lr": "1e-4",
        "folder-1/sft.yaml: db.password": "***",
        "folder-1/sft.yaml: db.hosts": "['host-1', 'address-1']",
    }


def test_the_case_code_survives():
    found = diagnose(case("cuda_oom").evidence)
    run = RunData("r", nodes=(NodeData("node01"), NodeData("node02", 1)), **described(found))
    shown = redact([run]).runs[0].diagnosis
    lines = re.findall(r"(?m)^  ((?:[0-9A-Z]{4}-){3}[0-9A-Z]{4})$", shown)
    assert decode(lines) == found.case
    assert "node-2 rank 3 failed first: CUDA out of memory" in shown


def test_numbers_of_curves_are_not_read_one_by_one():
    rows = tuple(Row(step, 0.5) for step in range(50_000))
    node = NodeData("n7", times=tuple((step, float(step)) for step in range(50_000)))
    run = redact([RunData("r", rows=rows, nodes=(node,))]).runs[0]
    assert run.rows is rows or run.rows == rows
    assert len(run.nodes[0].times) == 50_000


@pytest.mark.parametrize(
    "text", ["a.", "a:", "a@", "/a", "password=", "a-", "-----BEGIN A-----\n", "aB1", "1.", "\\\\"]
)
def test_no_text_takes_long(text):
    start = time.monotonic()
    redact([RunData("r", diagnosis=text * (20_000 // len(text)))])
    assert time.monotonic() - start < 10


def test_the_command_names_its_file_by_the_word_and_shows_the_nodes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(cli, ["report", "--redact", str(FOLDER / "cuda_oom")], obj=Reporter(), catch_exceptions=False)
    assert [path.name for path in tmp_path.iterdir()] == ["report-run-1.html"]
    page = Path("report-run-1.html").read_text()
    assert not re.search("node0[12]|cuda_oom", page)
    shown = capsys.readouterr().out
    assert "Names of nodes (2)" in shown
    assert "node-1 is node01, node-2 is node02" in shown
