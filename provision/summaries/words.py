"""The monitor's words in English and Chinese, and texts whose signs are one or two columns wide.

A text is looked up by its English form. Texts of nodes, agents and logs stay as they are. Words that the report also
has are the same there, in ``templates/report/report.js``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from functools import lru_cache

Say = Callable[..., str]  # the text in the user's language, with values in place of {}

CHINESE: Mapping[str, str] = {
    # the head
    "{} node": "{} 个节点",
    "{} nodes": "{} 个节点",
    "{} GPU": "{} 个 GPU",
    "{} GPUs": "{} 个 GPU",
    "{} without an answer": "{} 个无应答",
    "{} not found": "{} 个未找到",
    "attempt {} of {}": "第 {} 次尝试,共 {} 次",
    "for {}": "已运行 {}",
    "took {}": "用时 {}",
    "why: {}": "原因:{}",
    "step {}": "第 {} 步",
    "loss {}": "损失 {}",
    "{} left": "剩余 {}",
    "{} tokens/s": "{} 词元/秒",
    "lr {}": "学习率 {}",
    "{} s/step": "{} 秒/步",
    "{} ms/step": "{} 毫秒/步",
    "no step yet": "还没有步数",
    # states and phases
    "starting": "启动中",
    "meeting": "等待节点",
    "running": "运行中",
    "ending": "结束中",
    "finished": "已完成",
    "failed": "失败",
    "stopped": "已停止",
    "lost": "失联",
    "no answer": "无应答",
    "loading": "加载",
    "tokenizing": "分词",
    "training": "训练",
    "evaluating": "评估",
    "saving": "保存",
    "finishing": "收尾",
    # the table of nodes
    "NODE": "节点",
    "RANK": "编号",
    "STATE": "状态",
    "PHASE": "阶段",
    "STEP": "步",
    "GPUS": "各 GPU",
    "USE": "利用率",
    "MEM": "显存",
    "TEMP": "温度",
    "POWER": "功率",
    "RSS": "内存",
    "SENT": "发送",
    "RECEIVED": "接收",
    "LOAD": "负载",
    "DISK FREE": "磁盘可用",
    "SAMPLE": "采样",
    "{} ago": "{} 前",
    "no sample of a GPU yet: nodes without nvidia-smi have none": "还没有 GPU 采样:没有 nvidia-smi 的节点不采样 GPU",
    # panes
    "nodes": "节点",
    "GPUs: use, memory, temperature, power": "GPU:利用率、显存、温度、功率",
    "loss": "损失",
    "tokens/s": "词元/秒",
    "steps/s": "步/秒",
    "no number yet": "还没有数值",
    "log": "日志",
    "log of rank {}": "编号 {} 的日志",
    "{}, with {}": "{},含 {}",
    "events": "事件",
    "no event yet": "还没有事件",
    # events
    "start": "开始",
    "restart": "重启",
    "checkpoint": "检查点",
    "hang": "挂起",
    "warning": "警告",
    "phase": "阶段",
    "note": "提示",
    "end": "结束",
    "attempt {} from {}": "第 {} 次尝试,从 {} 开始",
    "the start": "头",
}


def english(text: str, *values: object) -> str:
    """The text with its values."""
    return text.format(*values) if values else text


def chinese(text: str, *values: object) -> str:
    """The text in Chinese, if it is known."""
    return english(CHINESE.get(text, text), *values)


LANGUAGES: Mapping[str, Say] = {"en": english, "zh": chinese}


def language_of(environ: Mapping[str, str]) -> str:
    """``zh`` if the locale is Chinese, else ``en``: the first of LC_ALL, LC_MESSAGES and LANG that is set."""
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environ.get(name))), "")
    return "zh" if locale.lower().startswith("zh") else "en"


@lru_cache(maxsize=4096)
def _columns(text: str) -> int:
    return sum(map(_wide, text))


def _wide(sign: str) -> int:
    if unicodedata.category(sign) in {"Mn", "Me", "Cf"}:
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def columns(text: str) -> int:
    """How many columns of a terminal the text needs: Chinese signs need two."""
    return len(text) if text.isascii() else _columns(text)


def pad(text: str, width: int, *, right: bool = False) -> str:
    """The text with spaces up to ``width`` columns; ``right``: aligned at the right."""
    space = " " * (width - columns(text))
    return space + text if right else text + space


def cut(text: str, width: int) -> str:
    """As much of the text as fits into ``width`` columns."""
    if columns(text) <= width:
        return text
    used = 0
    for place, sign in enumerate(text):
        used += _wide(sign)
        if used > width:
            return text[:place]
    return text
