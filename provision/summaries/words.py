"""The words of ``monitor`` and ``top`` in English and Chinese, and texts whose signs are one or two columns wide.

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
    "{} % effective": "有效训练 {} %",
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
    "spare": "备用",
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
    "RSS": "进程内存",
    "SENT": "发送",
    "RECEIVED": "接收",
    "LOAD": "负载",
    "CLOCK": "时钟",
    "THROTTLE": "降频原因",
    "MEMORY": "内存",
    "DISK FREE": "磁盘可用",
    "SAMPLE": "采样",
    "PROCESSES": "进程",
    "{} ago": "{} 前",
    "no sample of a GPU yet: nodes without nvidia-smi have none": "还没有 GPU 采样:没有 nvidia-smi 的节点不采样 GPU",
    "no sample of the network yet: rates need two samples": "还没有网络采样:速率需要两次采样",
    "out": "发",
    "in": "收",
    # clusterctl top
    "use {} %": "利用率 {} %",
    "no node": "没有节点",
    "GPU": "GPU",
    "PID": "PID",
    "USER": "用户",
    "COMMAND": "命令",
    "no process uses a GPU": "没有进程使用 GPU",
    "processes on the GPUs": "GPU 上的进程",
    "q quit  g nodes, GPUs, processes, network  arrow keys scroll": "q 退出  g 节点、GPU、进程、网络  方向键滚动",
    # what slows a GPU down
    "hw thermal": "硬件过热保护",
    "sw thermal": "温度限制",
    "hw power brake": "外部功率制动",
    "hw slowdown": "硬件降频",
    "sw power cap": "功率上限",
    "sync boost": "同步提频",
    "applications clocks setting": "应用时钟设置",
    "display clock setting": "显示时钟设置",
    "other": "其他",
    # panes
    "nodes": "节点",
    "GPUs: use, memory, temperature, power, SM clock, throttling": "GPU:利用率、显存、温度、功率、SM 时钟、降频",
    "network: interfaces and InfiniBand ports": "网络:接口和 InfiniBand 端口",
    "{}, {} expected {} to {}": "{},{} 预期 {} 至 {}",
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
    "stack": "调用栈",
    "note": "提示",
    "end": "结束",
    "attempt {} from {}": "第 {} 次尝试,从 {} 开始",
    "attempt {} from the start": "第 {} 次尝试,从头开始",
    # keys
    "quit; the run continues": "退出;运行继续",
    "list of runs, to see another": "运行列表,可切换",
    "stop the run (asks)": "停止运行(会询问)",
    "save a checkpoint, and continue": "保存检查点并继续",
    "save a checkpoint and stop (asks)": "保存检查点并停止(会询问)",
    "diagnosis; there, c copies it": "诊断;其中 c 复制",
    "nodes, single GPUs, or network": "节点、各个 GPU 或网络",
    "copy the diagnosis": "复制诊断",
    "log of the next rank, R: of all": "下一个编号的日志,R:全部",
    "logs of several ranks, such as 0 3-5": "几个编号的日志,如 0 3-5",
    "search the logs; Escape ends it": "搜索日志;Esc 结束",
    "log or events (narrow terminals)": "日志或事件(窄终端)",
    "this help": "本帮助",
    "next pane; arrow keys scroll": "下一个窗格;方向键滚动",
    "GPUS has a sign for the use of each GPU. USE, MEM and TEMP are ranges over": (
        "“各 GPU”列中每个 GPU 有一个符号表示利用率。利用率、显存和温度是节点"
    ),
    "the GPUs of a node, POWER is their sum. Agents take a sample every 10 s.": (
        "各 GPU 的范围,功率是总和。代理每 10 秒采样一次。"
    ),
    "A GPU that is slowed down has a sign: T, t heat; B power brake; p power cap;": (
        "降频的 GPU 有一个符号:T、t 温度;B 功率制动;p 功率上限;"
    ),
    "H hardware; c clocks set; s sync boost.": "H 硬件;c 时钟设置;s 同步提频。",
    "A log line with (x N) stands for N lines that differ only in their numbers.": (
        "带 (x N) 的日志行代表 N 行,它们只有数字不同。"
    ),
    "Below a curve: R restart, H hang, C checkpoint, ! warning. Times are UTC.": (
        "曲线下方:R 重启,H 挂起,C 检查点,! 警告。时间为 UTC。"
    ),
    "quit": "退出",
    "help": "帮助",
    "stop": "停止",
    "save": "保存",
    "diagnosis": "诊断",
    "runs": "运行",
    "rank": "编号",
    "search": "搜索",
    "panes": "窗格",
    # questions and notices
    "confirm": "确认",
    "y  yes      n  no": "y  是      n  否",
    "search the logs": "搜索日志",
    "ranks, such as 0 3-5; nothing: all in one log": "编号,如 0 3-5;空:全部在一个日志中",
    "Save a checkpoint and stop {}?": "保存检查点并停止 {}?",
    "Stop {} on every node?": "在所有节点上停止 {}?",
    "stopping; this may take a while": "正在停止,可能需要一些时间",
    "the run is over: {}": "运行已结束:{}",
    "reading the logs of all nodes": "正在读取所有节点的日志",
    "diagnosis (c copies it)": "诊断(c 复制)",
    "copy": "复制",
    "try: {}": "可尝试:{}",
    "copied, if the terminal allows it (OSC 52)": "已复制,如果终端允许(OSC 52)",
    "copied into tmux's buffer: its key ] pastes it": "已复制到 tmux 缓冲区:用 tmux 的 ] 键粘贴",
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


def wrapped(text: str, width: int) -> list[str]:
    """The lines of a text, each at most ``width`` columns: broken at spaces, and in a word that is longer."""
    return [part for line in text.split("\n") for part in _parts(line, max(width, 2))]


def _parts(line: str, width: int) -> list[str]:
    parts = []
    while columns(line) > width:
        part = cut(line, width)
        space = part.rfind(" ", 1)
        part = part[:space] if space > len(part) - len(part.lstrip()) else part
        parts.append(part)
        line = line[len(part) :].lstrip(" ")
    return [*parts, line]
