"""Measures what ``plan --tune`` finds for five different LLaMA-Factory configurations, on one GPU without a network.

    python scripts/benchmarks/tune_gpu.py --llamafactory FOLDER [--time 1800] [--seconds 40] [--candidates 4]
        [--only short,chat] [--work /tmp/tune] [--no-liger]

Wants torch, transformers and LLaMA-Factory 0.9.5. FOLDER holds packages that Python does not find otherwise (made with
``pip install --target``) or a source tree of LLaMA-Factory; "" if all are installed. liger-kernel, flash-attn and
deepspeed are used if they are there. Models have random weights of published shapes, and the data is generated.

The candidates, their log and the choice are those of ``clusterctl plan --tune`` (trainer/plan/tuning.py), and torchrun
starts them as ``clusterctl train`` does. A JSON line for each candidate, one for each configuration with its speed-up
at an equal loss, and a last one with the median. A configuration that does not fit into the remaining time is skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))

from trainer import ds_config  # noqa: E402 - the checkout is not installed here
from trainer.plan import Cluster, Setup, Training, load  # noqa: E402
from trainer.plan.factory import Job, Settings, estimate, settings_of  # noqa: E402
from trainer.plan.faster import faster  # noqa: E402
from trainer.plan.findings import free, keys  # noqa: E402
from trainer.plan.lengths import Lengths  # noqa: E402
from trainer.plan.output import request  # noqa: E402
from trainer.plan.tuning import Measured, candidates, fastest, judged, measured, rows_of_log  # noqa: E402

WORDS = [f"w{number}" for number in range(3000)]
START = 240.0  # seconds to the first step
SLOWER = 3.0  # times the given seconds for the same samples
LEAST = 10  # steps
ALWAYS = {
    "stage": "sft", "do_train": True, "template": "qwen", "dataset_dir": "data", "learning_rate": 1e-5, "bf16": True,
    "report_to": "none", "overwrite_cache": True, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03,
    "num_train_epochs": 3.0, "logging_steps": 1, "save_strategy": "no", "plot_loss": False,
    "include_num_input_tokens_seen": "all", "preprocessing_num_workers": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A configuration as users write it.

    Attributes:
        name: for ``--only``.
        model: a shape of trainer.plan.
        data: ``short`` instructions or long ``chat``.
        config: its keys.
        zero: DeepSpeed's stage; None: no DeepSpeed.
    """

    name: str
    model: str
    data: str
    config: dict[str, Any] = field(default_factory=dict)
    zero: int | None = None


FULL = {"finetuning_type": "full"}
CASES = (
    Case("short", "qwen2.5-3b", "short",
         {**FULL, "cutoff_len": 2048, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
    Case("chat", "qwen2.5-1.5b", "chat",
         {**FULL, "cutoff_len": 4096, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16}),
    Case("lora", "qwen2.5-7b", "short",
         {"finetuning_type": "lora", "lora_target": "all", "lora_rank": 8, "learning_rate": 1e-4, "cutoff_len": 2048,
          "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}),
    Case("zero3", "qwen2.5-0.5b", "short",
         {**FULL, "cutoff_len": 2048, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8}, 3),
    Case("eager", "qwen2.5-3b", "short",
         {**FULL, "cutoff_len": 2048, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4,
          "flash_attn": "disabled"}),
)  # fmt: skip


def tokenizer(folder: Path) -> Any:
    """A small byte-level BPE for the generated words, saved in the folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - after sys.path
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    drawn = random.Random(0)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator((" ".join(drawn.choices(WORDS, k=50)) for _ in range(2000)), trainer)
    tokens = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokens.save_pretrained(folder)
    return made


def text(drawn: random.Random, mean: float, spread: float, most: int) -> str:
    """Random words, log-normally many."""
    return " ".join(drawn.choices(WORDS, k=max(1, min(most, int(drawn.lognormvariate(mean, spread))))))


def records(kind: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Generated records, and their entry in dataset_info.json."""
    drawn = random.Random(1)
    if kind == "short":
        rows = [
            {"instruction": text(drawn, 3.5, 0.8, 400), "input": "", "output": text(drawn, 4.6, 0.9, 900)}
            for _ in range(6000)
        ]
        return rows, {"file_name": "short.json"}
    rows = []
    for _ in range(3000):
        turns = drawn.randint(1, 5)
        rows.append({
            "conversations": [
                {"from": who, "value": text(drawn, *size)}
                for _ in range(turns)
                for who, size in (("human", (3.5, 0.8, 300)), ("gpt", (4.9, 0.8, 600)))
            ]
        })  # fmt: skip
    return rows, {"file_name": "chat.json", "formatting": "sharegpt"}


def write_data(folder: Path, made: Any) -> dict[str, Lengths]:
    """Write both data sets. Returns their lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    info, found = {}, {}
    for kind in ("short", "chat"):
        rows, info[kind] = records(kind)
        (folder / f"{kind}.json").write_text(json.dumps(rows))
        found[kind] = Lengths(tuple(length(row, made) for row in rows), len(rows), exact=True)
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return found


def length(row: dict[str, Any], made: Any) -> int:
    """Tokens of a record with its template."""
    parts = [each["value"] for each in row.get("conversations", ())] or [row["instruction"], row["output"]]
    return sum(len(made.encode(part).ids) + 5 for part in parts)


def write_model(name: str, folder: Path) -> None:
    """A model with random weights of a published shape, made on the GPU."""
    import torch  # noqa: PLC0415
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415

    shape = load(name)
    config = Qwen2Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context, tie_word_embeddings=shape.tied, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def config_of(case: Case, job: Job, base: Settings, settings: Settings, name: str, work: Path) -> Path:
    """The configuration of a candidate, as JSON, which is YAML."""
    values = {**ALWAYS, **case.config, **keys(base, settings)}
    values |= {
        "model_name_or_path": f"model-{Path(case.model).stem}",
        "dataset": case.data,
        "output_dir": f"out-{name}",
    }
    values |= free(job, base) if settings != base else {}
    if settings.zero is not None:
        made = ds_config.make(request(Training(job.shape, settings.method), job.cluster, Setup(settings.zero)))
        (work / f"{name}.ds.json").write_text(ds_config.text(made))
        values["deepspeed"] = f"{name}.ds.json"
    if not gpu():
        values |= {"use_cpu": True, "bf16": False}
    file = work / f"{name}.yaml"
    file.write_text(json.dumps(values, indent=1))
    return file


def gpu() -> bool:
    """Whether there is a GPU."""
    import torch  # noqa: PLC0415

    return bool(torch.cuda.is_available())


def port() -> int:
    """A free port."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def run(config: Path, work: Path, *, seconds: float, steps: int | None, until: float) -> tuple[str, str]:
    """Train until the time is over or the steps are done. Returns the log and the last lines of the output."""
    name = config.stem
    log = work / f"out-{name}" / "trainer_log.jsonl"
    shutil.rmtree(log.parent, ignore_errors=True)
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", str(port())]
    first: float | None = None
    began = time.monotonic()
    with (work / f"{name}.log").open("wb") as out:
        process = subprocess.Popen(
            [*argv, "-m", "llamafactory.launcher", str(config)],
            cwd=work, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                rows = rows_of_log(log.read_text(errors="replace")) if log.exists() else []
                now = time.monotonic()
                first = now if rows and first is None else first
                if first is None and now - began > START:
                    break
                if now > until or (first is not None and now - first > seconds):
                    break
                if steps is not None and rows and rows[-1].step >= steps:
                    break
                with_timeout(process, 0.5)
        finally:
            end(process)
    tail = (work / f"{name}.log").read_text(errors="replace").splitlines()
    errors = [row for row in tail if "out of memory" in row.lower()] or [row for row in tail if "Error" in row]
    return (log.read_text(errors="replace") if log.exists() else ""), (errors or tail or [""])[-1][-300:]


def with_timeout(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for the end of a process, at most so long."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its workers, and then whatever is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with_timeout(process, 40)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def one(case: Case, job: Job, work: Path, given: argparse.Namespace, until: float) -> dict[str, Any]:
    """Measure the candidates of a configuration."""
    deepspeed = None if case.zero is None else {"zero_optimization": {"stage": case.zero}}
    base = settings_of({**ALWAYS, **case.config}, deepspeed)
    has = {"liger": given.liger and installed("liger_kernel"), "fa2": installed("flash_attn")}
    found = faster(job, base, **has)
    chosen = candidates(job, found, **has, deepspeed=installed("deepspeed"), most=given.candidates)
    results: list[Measured] = []
    samples, longest = 0.0, 0.0
    for number, candidate in enumerate(chosen):
        began = time.monotonic()
        if results and began + longest > until:
            break
        expected = estimate(job, candidate.settings)
        name = f"{case.name}-{number}"
        file = config_of(case, job, base, candidate.settings, name, work)
        steps = max(LEAST, round(samples / expected.samples)) if samples else None
        limit = given.seconds * (SLOWER if steps else 1)
        log, tail = run(file, work, seconds=limit, steps=steps, until=until)
        rows = rows_of_log(log)
        result = measured(
            candidate,
            rows,
            job.lengths.cut(base.cutoff).mean * job.lengths.total,
            until=results[0].until if results else None,
        )
        if result.dropped:
            result = Measured(candidate, steps=len(rows), dropped=f"{result.dropped}: {tail}")
        samples = samples or (rows[-1].step * expected.samples if rows else 0.0)
        longest = max(longest, time.monotonic() - began)
        results.append(result)
        say(case=case.name, **shown(result), estimated=expected.tokens, seconds=round(time.monotonic() - began, 1))
        if results[0].dropped:
            break
    results = judged(results)
    best = fastest(results)
    base_result = results[0]
    gain = best.epochs / base_result.epochs if best is not None and base_result.epochs else None
    recommended = next((each for each in results if each.candidate.name == "recommended" and not each.dropped), None)
    return {
        "case": case.name,
        "model": case.model,
        "best": None if best is None else best.candidate.name,
        "speedup": gain,
        "speedup_untuned": recommended.epochs / base_result.epochs if recommended and base_result.epochs else None,
        "estimated_speedup": found.then.tokens / found.now.tokens,
        "candidates": [shown(each) for each in results],
        "not_measured": len(chosen) - len(results),
    }


def shown(result: Measured) -> dict[str, Any]:
    """A result as JSON."""
    return {
        "candidate": result.candidate.name, "settings": asdict(result.candidate.settings),
        "tokens": round(result.tokens), "loss": round(result.loss, 4) if result.epochs else None,
        "loss_error": round(result.error, 4), "memory": result.memory, "steps": result.steps, "dropped": result.dropped,
    }  # fmt: skip


def installed(name: str) -> bool:
    """Whether Python finds a package."""
    return importlib.util.find_spec(name) is not None


def say(**line: Any) -> None:
    """Print a JSON line."""
    print(json.dumps(line), flush=True)


def use(folder: str) -> None:
    """Let this process and its children find LLaMA-Factory, and keep them off the network."""
    paths = [str(path) for path in (Path(folder).resolve() / "src", Path(folder).resolve()) if folder and path.is_dir()]
    sys.path[1:1] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "WANDB_DISABLED": "true",
        "RECORD_VRAM": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llamafactory", default="", metavar="FOLDER", help="where its packages are")
    parser.add_argument("--time", type=float, default=1800, help="seconds for everything")
    parser.add_argument("--seconds", type=float, default=40, help="of a configuration as it is, after its first step")
    parser.add_argument("--candidates", type=int, default=4)
    parser.add_argument("--only", default=",".join(case.name for case in CASES))
    parser.add_argument("--work", type=Path, default=Path("/tmp/tune"))
    parser.add_argument("--model", default="", help="another shape, or its config.json, to try the program")
    parser.add_argument("--no-liger", dest="liger", action="store_false")
    given = parser.parse_args()
    until = time.monotonic() + given.time
    use(given.llamafactory)
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    made = tokenizer(work / "tokenizer")
    lengths = write_data(work / "data", made)
    import torch  # noqa: PLC0415 - LLaMA-Factory's folder may have it

    card = ds_config.find(torch.cuda.get_device_name() if gpu() else "H100")
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30 if gpu() else card.memory
    cluster = Cluster(1, 1, card, memory, cores=os.cpu_count())
    has = {name: installed(name) for name in ("liger_kernel", "flash_attn", "deepspeed", "llamafactory")}
    say(gpu=card.name, memory=memory, torch=torch.__version__, has=has)
    gains = []
    cases = [case for case in CASES if case.name in given.only.split(",")]
    for number, case in enumerate(cases):
        if case.zero is not None and not installed("deepspeed"):
            say(case=case.name, skipped="deepspeed is not installed")
            continue
        share = (until - time.monotonic()) / (len(cases) - number)
        if share < 2 * given.seconds:
            say(case=case.name, skipped="no time left")
            continue
        limit = time.monotonic() + share
        name = given.model or case.model
        case = Case(case.name, name, case.data, case.config, case.zero)  # noqa: PLW2901 - the same with another model
        folder = work / f"model-{Path(name).stem}"
        if not (folder / "config.json").exists():
            write_model(name, folder)
            shutil.copytree(work / "tokenizer", folder, dirs_exist_ok=True)
        result = one(case, Job(load(name), lengths[case.data], cluster), work, given, limit)
        say(**result)
        if result["speedup"]:
            gains.append(result["speedup"])
        if not any(each.model == name for each in cases[number + 1 :]) and not given.model:
            shutil.rmtree(folder)
    say(median=statistics.median(gains) if gains else None, speedups=gains, goal=2, aim=4)


if __name__ == "__main__":
    main()
