"""What a job needs in the release and on the nodes: packages with their versions, and the ops that DeepSpeed compiles.

Pure: the arguments and DeepSpeed's configurations in, needs out; needs and the nodes' facts in, findings out.
Sources: LLaMA-Factory 0.9.5 (``hparams/parser.py``, ``extras/misc.py``, ``model/model_utils``), transformers 5.6
(``training_args.py``, ``trainer_optimizer.py``, ``utils/import_utils.py``), accelerate 1.11 (``accelerator.py``) and
DeepSpeed 0.19 (``runtime/engine.py``, ``comm/torch.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from provision.model import Finding

if TYPE_CHECKING:
    from provision.model import Node
    from provision.run import Facts

PACKAGE_CHECK, OP_CHECK = "gate.packages", "gate.ops"


@dataclass(frozen=True)
class Package:
    """A package that the release must have.

    Attributes:
        names: its name, or the names of packages that serve as well, as ``Facts.packages`` has them.
        why: what needs it.
        least: the lowest version; empty: any.
        most: the highest version; empty: any.
        given: only if the release has this package, in this version or a later one.
        is_soft: the training runs without it.
    """

    names: tuple[str, ...]
    why: str
    least: str = ""
    most: str = ""
    given: tuple[str, str] | None = None
    is_soft: bool = False


@dataclass(frozen=True)
class Op:
    """An op that DeepSpeed compiles at the start unless the release has it.

    Attributes:
        name: DeepSpeed's name.
        why: what needs it.
        where: ``host``: it is compiled for the processor; ``gpu``: with GPUs for them, so with nvcc; ``cpu``: it is
            only used without GPUs.
    """

    name: str
    why: str
    where: str = "host"


Need = Package | Op

# Key and value of an argument (a pattern) -> the package.
_VALUES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("quantization_bit", r"[2-8]", ("bitsandbytes",)),
    ("load_in_4bit", "true", ("bitsandbytes",)),
    ("load_in_8bit", "true", ("bitsandbytes",)),
    ("use_qlora", "true", ("bitsandbytes",)),
    ("optim", r"paged_.*|.*_8bit|.*_bnb.*|ademamix", ("bitsandbytes",)),
    ("optim", "adamw_apex_fused", ("apex",)),
    ("optim", "galore_.*", ("galore_torch",)),
    ("optim", "apollo_.*", ("apollo_torch",)),
    ("optim", "(ada)?lomo", ("lomo_optim",)),
    ("optim", "schedule_free_.*", ("schedulefree",)),
    ("optim", "grokadamw", ("grokadamw",)),
    ("half_precision_backend", "apex", ("apex",)),
    ("fp16_backend", "apex", ("apex",)),
    ("flash_attn", "fa2", ("flash_attn",)),
    ("attn_implementation", "flash_attention_2", ("flash_attn",)),
    ("use_flash_attn", "true", ("flash_attn",)),
    ("enable_liger_kernel", "true", ("liger_kernel",)),
    ("use_liger_kernel", "true", ("liger_kernel",)),
    ("use_liger", "true", ("liger_kernel",)),
    ("use_unsloth", "true", ("unsloth",)),
    ("use_galore", "true", ("galore_torch",)),
    ("use_apollo", "true", ("apollo_torch",)),
    ("use_badam", "true", ("badam",)),
    ("use_adam_mini", "true", ("adam_mini",)),
    ("use_swanlab", "true", ("swanlab",)),
)
_SOFT = frozenset({"flash_attn"})  # LLaMA-Factory warns and uses another attention
_METHODS = {"hqq": ("hqq",), "eetq": ("eetq",)}  # LLaMA-Factory's quantization_method
_LOGGERS = {
    "wandb": ("wandb",), "tensorboard": ("tensorboard", "tensorboardx"), "swanlab": ("swanlab",), "mlflow": ("mlflow",),
    "comet_ml": ("comet_ml",), "clearml": ("clearml",), "trackio": ("trackio",),
}  # fmt: skip
_LEAST = {"badam": "1.2.1"}
# LLaMA-Factory 0.9.5 refuses to start with other versions, unless DISABLE_VERSION_CHECK is set.
_FACTORY = (
    ("transformers", "4.55.0", "5.6.0"), ("datasets", "2.16.0", "4.0.0"), ("accelerate", "1.3.0", "1.15.0"),
    ("peft", "0.18.0", "0.20.0"), ("trl", "0.18.0", "0.24.0"),
)  # fmt: skip
_FACTORY_VERSION = "0.9.5"
_BITS = "0.46.1"  # transformers 5 takes no older bitsandbytes
_TRUE = ("1", "y", "true")
_COMPILERS = frozenset({"CUDA_HOME", "CUDA_PATH", "CXX", "PATH"})


def needed(
    values: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], *, factory: bool, env: Mapping[str, str]
) -> tuple[Need, ...]:
    """What a job needs.

    Args:
        values: the arguments of the training, by name.
        configs: DeepSpeed's configurations, by file.
        factory: it is a LLaMA-Factory config.
        env: the run's environment variables.
    """
    found: dict[Need, None] = dict.fromkeys(_packages(values))
    if factory and env.get("DISABLE_VERSION_CHECK", "0").lower() not in _TRUE:
        given = ("llamafactory", _FACTORY_VERSION)
        for name, least, most in _FACTORY:
            found[Package((name,), f"LLaMA-Factory {_FACTORY_VERSION}", least, most, given)] = None
    for file, config in configs.items():
        found |= dict.fromkeys(_of_deepspeed(file, config))
    # With such a variable the run finds compilers that the agent does not.
    return tuple(need for need in found if isinstance(need, Package) or _COMPILERS.isdisjoint(env))


def _packages(values: Mapping[str, Any]) -> Iterator[Package]:
    for key, pattern, names in _VALUES:
        value = _text(values.get(key))
        if value and re.fullmatch(pattern, value):
            chosen = (
                _METHODS.get(_text(values.get("quantization_method")), names) if key == "quantization_bit" else names
            )
            why = f"{key}: {value}"
            yield Package(chosen, why, _LEAST.get(chosen[0], ""), is_soft=key in _SOFT)
            if chosen == ("bitsandbytes",):
                yield Package(chosen, f"{why}, with transformers 5", _BITS, given=("transformers", "5"))
    loggers = values.get("report_to")
    listed: list[Any] = loggers if isinstance(loggers, list) else list(_text(loggers).strip("[]").split(","))
    for name in listed[:20]:
        if (logger := _text(name).strip(" '\"")) in _LOGGERS:
            yield Package(_LOGGERS[logger], f"report_to: {logger}")


def _text(value: Any) -> str:
    return str(value).lower()[:100] if isinstance(value, (str, bool, int, float)) else ""


def _of_deepspeed(file: str, config: Mapping[str, Any]) -> Iterator[Need]:
    yield Package(("deepspeed",), file)
    for section, names in (("wandb", ("wandb",)), ("tensorboard", _LOGGERS["tensorboard"]), ("comet", ("comet_ml",))):
        if _get(config, section, "enabled") is True:
            yield Package(names, f"{file}: {section}")
    kind = str(_get(config, "optimizer", "type") or "").lower()
    if kind in {"muadam", "muadamw", "musgd"}:
        yield Package(("mup",), f"{file}: optimizer {kind}")
    yield from _ops(file, config, kind)


def _ops(file: str, config: Mapping[str, Any], kind: str) -> Iterator[Op]:
    devices = [_get(config, "zero_optimization", name, "device") for name in ("offload_optimizer", "offload_param")]
    is_torch = _get(config, "optimizer", "params", "torch_adam") is True
    if devices[0] in {"cpu", "nvme"} and not is_torch and config.get("zero_force_ds_cpu_optimizer") is not False:
        name = {"lion": "cpu_lion", "adagrad": "cpu_adagrad"}.get(kind, "cpu_adam")
        yield Op(name, f"{file}: offload_optimizer")
    elif kind in {"adam", "adamw"} and not is_torch:
        yield Op("fused_adam", f"{file}: optimizer {kind}", "gpu")
    elif kind in {"lamb", "lion"}:
        yield Op(f"fused_{kind}", f"{file}: optimizer {kind}", "gpu")
    if "nvme" in devices:
        yield Op("async_io", f"{file}: offload to nvme")
    yield Op("deepspeed_shm_comm", f"{file}: DeepSpeed without GPUs", "cpu")


def _get(data: Any, *path: str) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def judge(nodes: Sequence[Node], facts: Mapping[str, Facts], needs: Sequence[Need]) -> Iterator[Finding]:
    """FAIL for a node whose release lacks a package or has the wrong version, or which cannot compile an op."""
    for node in nodes:
        known = facts[node.name]
        if not known.packages:
            continue  # not a site-packages folder that the agent understands
        for need in needs:
            if isinstance(need, Op):
                if found := _op(need, known):
                    yield Finding(OP_CHECK, node.name, "FAIL", found[0], fix=found[1])
            elif found := _package(need, known):
                yield Finding(PACKAGE_CHECK, node.name, "WARN" if need.is_soft else "FAIL", found[0], fix=found[1])


def _package(need: Package, known: Facts) -> tuple[str, str] | None:
    """What is wrong, and what to do; None if nothing is."""
    if need.given is not None:
        version = known.versions.get(need.given[0], "")
        if not version or _numbers(version) < _numbers(need.given[1]) or need.names[0] not in known.packages:
            return None
        if need.given[0] == "llamafactory" and _numbers(version)[:3] != _numbers(_FACTORY_VERSION):
            return None  # another release has other limits
    there = [name for name in need.names if name in known.packages]
    shown = need.names[0].replace("_", "-")
    wanted = ",".join(
        each for each in (f">={need.least}" if need.least else "", f"<={need.most}" if need.most else "") if each
    )
    fix = f"pip install '{shown}{wanted}' in the environment, then: clusterctl pack-env; clusterctl deploy"
    if not there:
        return f"its release has no {shown}, which {need.why} needs", fix
    version = known.versions.get(there[0], "")
    if not version or not wanted:
        return None
    numbers = _numbers(version)
    too_old = bool(need.least) and numbers < _numbers(need.least)
    too_new = bool(need.most) and numbers[: len(_numbers(need.most))] > _numbers(need.most)
    if too_old or too_new:
        return f"its release has {shown} {version}, but {need.why} needs {wanted}", fix
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    match = re.match(r"v?(\d{1,9}(?:\.\d{1,9}){0,7})", version)
    return tuple(map(int, match.group(1).split("."))) if match else ()


def _op(need: Op, known: Facts) -> tuple[str, str] | None:
    if need.name in known.ops or (need.where == "cpu" and known.gpus) or "deepspeed" not in known.packages:
        return None
    on_gpu = need.where == "gpu" and known.gpus > 0
    tools = [("c++", "a C++ compiler"), ("ninja", "ninja"), *([("nvcc", "nvcc")] if on_gpu else [])]
    missing = [name for tool, name in tools if tool not in known.compilers]
    if not missing:
        return None
    text = f"{need.why}: DeepSpeed compiles {need.name} at the start, and there is no {' and no '.join(missing)}"
    if not on_gpu:
        return text, "clusterctl pack-env --with-ops, then: clusterctl deploy"
    build = f"DS_BUILD_{need.name.upper()}=1 pip install --no-build-isolation --force-reinstall --no-deps deepspeed"
    also = (
        'add "torch_adam": true to optimizer.params, or where nvcc is: '
        if need.name == "fused_adam"
        else "where nvcc is: "
    )
    return text, f"{also}{build}; then: clusterctl pack-env; clusterctl deploy"
