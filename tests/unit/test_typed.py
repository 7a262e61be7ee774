"""Command lines and launch scripts as people type them, also those of guides for single machines."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.errors import UsageError
from provision.launchers import from_words
from provision.typed import unwrap
from provision.typed.shell import UNKNOWN, NotUnderstoodError, Values, commands

EXAMPLES = Path(__file__).parents[2] / "examples"
VLM = ("train_vlm.py", "--config", "configs/vlm_pretrain.yaml", "--stage", "pretrain")
CLM = (
    *("--model_name_or_path", "/path/to/llama-7b", "--dataset_name", "wikitext", "--per_device_train_batch_size", "2"),
    *("--gradient_accumulation_steps", "8", "--deepspeed", "ds_config.json", "--output_dir", "./output"),
)
LAUNCH = """\
export CUDA_VISIBLE_DEVICES=0,1,2,3
export MASTER_ADDR=localhost
export MASTER_PORT=29500

python -m torch.distributed.launch \\
    --nproc_per_node=4 \\
    --master_addr=$MASTER_ADDR \\
    --master_port=$MASTER_PORT \\
    train_vlm.py \\
    --config configs/vlm_pretrain.yaml \\
    --stage pretrain
"""
LAUNCH_CMD = (
    "set CUDA_VISIBLE_DEVICES=0,1,2,3\nset MASTER_ADDR=localhost\nset MASTER_PORT=29500\n\n"
    "python -m torch.distributed.launch --nproc_per_node=4 --master_addr=%MASTER_ADDR% --master_port=%MASTER_PORT% "
    "train_vlm.py --config configs\\vlm_pretrain.yaml --stage pretrain"
)


def facts(job):
    return (job.launcher, job.target, *job.args), dict(job.env), job.nodes, job.per_node, job.total


@pytest.mark.parametrize(
    ("folder", "words", "command", "env", "counts"),
    [
        ("vlm", ["torchrun", "--nproc_per_node=4", *VLM], ("torchrun", *VLM), {}, (None, 4, None)),
        (
            "vlm",
            ["torchrun", "--nproc_per_node=4", "train_vlm.py", "--config", r"configs\vlm_pretrain.yaml", *VLM[3:]],
            ("torchrun", *VLM),
            {},
            (None, 4, None),
        ),
        (
            "vlm",
            ["bash", "scripts/train_multi_gpu.sh", "configs/vlm_pretrain.yaml", "pretrain"],
            ("torchrun", *VLM),
            {},
            (None, 4, None),
        ),
        (
            "vlm",
            [r"scripts\train_multi_gpu.bat", r"configs\vlm_pretrain.yaml", "pretrain"],
            ("torchrun", *VLM),
            {"CONFIG": r"configs\vlm_pretrain.yaml", "STAGE": "pretrain"},
            (None, 4, None),
        ),
        ("vlm", [LAUNCH], ("torchrun", *VLM), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (None, 4, None)),
        ("vlm", [LAUNCH_CMD], ("torchrun", *VLM), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (None, 4, None)),
        (
            "vlm",
            ["torchrun", "--nproc_per_node=4", "--master_addr=localhost", *VLM, "--batch_size", "32", "--lr", "1.6e-3"],
            ("torchrun", *VLM, "--batch_size", "32", "--lr", "1.6e-3"),
            {},
            (None, 4, None),
        ),
        (
            "run_clm",
            [
                *("CUDA_VISIBLE_DEVICES=0,1,2,3", "MASTER_ADDR=localhost", "deepspeed", "--num_gpus=4"),
                *("--module", "training.run_clm", *CLM),
            ],
            ("deepspeed", "training.run_clm", *CLM),
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            (None, 4, None),
        ),
        (
            "run_clm",
            ["scripts/train_4gpu.sh"],
            ("deepspeed", "training.run_clm", *CLM),
            {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            (None, 4, None),
        ),
        (
            "gpt2_deepspeed",
            ["./run_deepspeed_xl.sh"],
            ("deepspeed", "train_deepspeed.py", "--deepspeed_config", "ds_config_zero2.json"),
            {"NCCL_DEBUG": "WARN"},
            (None, 4, None),
        ),
        (
            "gpt2_deepspeed",
            ["chmod +x run_deepspeed_xl.sh\n./run_deepspeed_xl.sh"],
            ("deepspeed", "train_deepspeed.py", "--deepspeed_config", "ds_config_zero2.json"),
            {"NCCL_DEBUG": "WARN"},
            (None, 4, None),
        ),
        (
            "gpt2_deepspeed",
            ["run_deepspeed_xl.bat", "--max_iters", "5"],
            ("deepspeed", "train_deepspeed.py", "--deepspeed_config", "ds_config_zero2.json", "--max_iters", "5"),
            {"NUM_GPUS": "4", "CONFIG": "ds_config_zero2.json"},
            (None, 4, None),
        ),
        (
            "gpt2_deepspeed",
            ["deepspeed", "--hostfile", "hostfile.txt", "--num_gpus", "8", "train.py", "--deepspeed", "z3.json"],
            ("deepspeed", "train.py", "--deepspeed", "z3.json"),
            {},
            (None, 8, None),
        ),
        (
            "gpt2_deepspeed",
            ["accelerate", "launch", "--num_processes", "4", "train.py"],
            ("accelerate", "train.py"),
            {},
            (None, None, 4),
        ),
        ("gpt2_deepspeed", ["python", "train.py"], ("auto", "train.py"), {}, (None, None, None)),
    ],
)
def test_command_lines_of_guides_work_as_typed(monkeypatch, folder, words, command, env, counts):
    monkeypatch.chdir(EXAMPLES / folder)
    assert facts(from_words(words)) == (command, env, *counts)


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("export A=b; torchrun t.py", {"A": "b"}),
        ("export A=b && torchrun t.py", {"A": "b"}),
        ("A=b && torchrun t.py", {"A": "b"}),
        ("A=b torchrun t.py", {"A": "b"}),
        ("export A='b c'; export B=$A; torchrun t.py", {"A": "b c", "B": "b c"}),
        ("set A=b && torchrun t.py", {"A": "b"}),
        ('$env:A="b"; torchrun t.py', {"A": "b"}),
        ("env A=b torchrun t.py", {"A": "b"}),
        ("setenv A b; torchrun t.py", {"A": "b"}),
        ("set -e; export A=${B:-b}; torchrun t.py", {"A": "b"}),
    ],
)
def test_variables_in_front_of_a_command(line, env):
    lines = [[line]]
    if not set(line) & set("'\"$"):  # those are the user's shell's, which passes words on without them
        lines.append(line.split())
    for words in lines:
        job = from_words(words)
        assert (job.launcher, job.target, dict(job.env)) == ("torchrun", "t.py", env)


@pytest.mark.parametrize(
    ("line", "notice"),
    [
        ("nohup torchrun t.py > log 2>&1 &", "nohup: dropped; a run does not need the terminal"),
        ("nohup torchrun t.py > log 2>&1 &", ">log: dropped; the logs of all ranks are in runs/RUN"),
        ("nohup torchrun t.py > log 2>&1 &", "&: dropped; --detach"),
        ("torchrun t.py 2>&1 | tee log", "| tee log: dropped; the logs"),
        (
            "conda run -n llm --no-capture-output torchrun t.py",
            "conda run -n llm --no-capture-output: dropped; the run",
        ),
        ("conda activate llm && torchrun t.py", "conda activate llm: dropped; the run uses"),
        ("source venv/bin/activate; torchrun t.py", "source venv/bin/activate: dropped; the run uses"),
        ("source vars.sh; torchrun t.py", "source vars.sh: dropped; its variables are not set; give them with --env"),
        ("uv run --with wandb torchrun t.py", "uv run --with wandb: dropped; the run uses"),
        ("poetry run torchrun t.py", "poetry run: dropped"),
        ("time torchrun t.py", "time: dropped"),
        ("numactl --cpunodebind=0 torchrun t.py", "numactl --cpunodebind=0: dropped; torchrun --numa-binding"),
        ("taskset -c 0-7 torchrun t.py", "taskset -c 0-7: dropped"),
        ("timeout 2h torchrun t.py", "timeout 2h: dropped"),
        ("sudo -E torchrun t.py", "sudo -E: dropped; the run belongs to the user of the inventory"),
        ("tmux new -d -s x 'torchrun t.py'", "tmux new -d -s x: dropped"),
        ("screen -dmS x torchrun t.py", "screen -dmS x: dropped"),
        ("mkdir -p logs && torchrun t.py", "mkdir -p logs: dropped"),
        ("bash -c 'torchrun t.py'", ""),
        ("cd . && torchrun t.py", ""),
    ],
)
def test_what_is_around_a_command_is_dropped_and_named(line, notice):
    job = from_words([line])
    assert (job.launcher, job.target, job.args) == ("torchrun", "t.py", ())
    assert any(each.startswith(notice) for each in job.notices) or not notice, job.notices


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("srun -N 2 --ntasks-per-node=8 python t.py", ("auto", {}, 2, 8, None)),
        ("srun --nodes=2 -n 16 --export=ALL,A=b python t.py", ("auto", {"A": "b"}, 2, 8, None)),
        ("srun -N2 --ntasks-per-node=1 torchrun --nnodes 2 --nproc_per_node 8 t.py", ("torchrun", {}, 2, 8, None)),
        ("srun -n2 torchrun t.py", ("torchrun", {}, 2, None, None)),
        ("mpirun -np 8 -H a:4,b:4 -x A=b --mca btl tcp python t.py", ("auto", {"A": "b"}, 2, 4, None)),
        ("mpirun -np 16 python t.py", ("auto", {}, None, None, 16)),
        ("mpiexec -n 2 -ppn 1 python t.py", ("auto", {}, None, 1, None)),
    ],
)
def test_numbers_of_srun_and_mpirun_are_the_jobs(line, expected):
    job = from_words([line])
    assert (job.launcher, dict(job.env), job.nodes, job.per_node, job.total) == expected
    assert job.target == "t.py"


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        (
            "srun -N2 --ntasks-per-node=8 torchrun t.py",
            "would start several times",
            "clusterctl train -- torchrun t.py",
        ),
        ("srun -N two torchrun t.py", "not a number of nodes", "--nodes N"),
        ("srun -N 2 torchrun --nnodes 4 t.py", "srun -N 2 and torchrun --nnodes 4 contradict", "one of them"),
        ("srun -N 3 -n 8 python t.py", "cannot be divided equally among 3 nodes", "--gpus-per-node"),
        ("python a.py && python b.py", "a run starts one program", "clusterctl train -- python b.py"),
        ("docker run x torchrun t.py", "docker cannot be run on the nodes", "in the container"),
        ("cd /nowhere && torchrun t.py", "cd /nowhere: the training starts in", "cd /nowhere && clusterctl train"),
        ("torchrun 'a", "a quote that is not closed is not understood", "only the launcher's command"),
        ("torchrun t.py --x $(hostname)", "only the running script knows", "only the launcher's command"),
        ("cat <<EOF\nx\nEOF", "a here-document is not understood", ""),
        ("echo hello there", "it starts no training", "torchrun SCRIPT.py"),
        ("bash -c bash -c bash", "no script to run", "torchrun SCRIPT.py"),
    ],
)
def test_what_cannot_be_followed_is_answered(line, error, hint):
    with pytest.raises(UsageError) as caught:
        from_words([line])
    assert error in str(caught.value)
    assert hint in caught.value.hint


# --- launch scripts ------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Writes a launch script to the current folder and returns the job that it means."""
    monkeypatch.chdir(tmp_path)
    for name in ("MASTER_ADDR", "MASTER_PORT", "NUM_GPUS", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)

    def write(name, text, *arguments, encoding="utf-8"):
        (tmp_path / name).write_bytes(text.encode(encoding))
        return from_words([f"./{name}", *arguments])

    return write


@pytest.mark.parametrize(
    ("text", "arguments", "args"),
    [
        ('torchrun t.py $1 ${2:-two} "$@"', ["a b"], ("a", "b", "two", "a b")),
        ("X=1\nY=$X$X\ntorchrun t.py --x \"$Y\" '$Y'", [], ("--x", "11", "$Y")),
        ("N=${N:=4}\ntorchrun t.py $N # comment\n", [], ("4",)),
        ('if [ -z "$1" ]; then\n  A=none\nelse\n  A=$1\nfi\ntorchrun t.py $A', ["x"], ("x",)),
        ('if [ -z "$1" ]; then\n  A=none\nelse\n  A=$1\nfi\ntorchrun t.py $A', [], ("none",)),
        ("if [[ $# -lt 1 ]]; then echo usage; exit 1; fi\ntorchrun t.py $*", ["x", "y"], ("x", "y")),
        ('[ -n "$1" ] && A=given || A=default\ntorchrun t.py $A', [], ("default",)),
        ("if [ ! -f x ]; then\n echo no\n exit 1\nfi\ntorchrun \\\n  t.py \\\n  a", [], ("a",)),
        ("command -v torchrun || { echo no; exit 1; }\ntorchrun t.py", [], ()),
        ('cd "$(dirname "$0")"\ntorchrun t.py', [], ()),
        ('DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\ncd $DIR\ntorchrun t.py', [], ()),
        ("DATE=$(date +%F)\necho $DATE\ntorchrun t.py", [], ()),
        ('ARGS="--a 1 --b 2"\ntorchrun t.py $ARGS', [], ("--a", "1", "--b", "2")),
        ("hosts=( $(scontrol show hostnames) )\ntorchrun --rdzv_endpoint ${hosts[0]}:1 t.py", [], ()),
        ("torchrun --nnodes $SLURM_NNODES --node_rank=$SLURM_NODEID t.py", [], ()),
    ],
)
def test_a_shell_script_means_one_command(script, text, arguments, args):
    job = script("run.sh", f"#!/bin/bash\nset -euo pipefail\n{text}\n", *arguments)
    assert (job.launcher, job.target, job.args) == ("torchrun", "t.py", args)
    assert job.notices[0].startswith("./run.sh means: "), job.notices


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("for i in 1 2; do\n  torchrun t.py $i\ndone", "line 2: `for`, a loop or a choice, is not understood"),
        ("while true; do torchrun t.py; done", "line 2: `while`"),
        ("case $1 in a) torchrun t.py;; esac", "line 2: `case`"),
        ("run() {\n  torchrun t.py\n}\nrun", "line 2: the function run"),
        ("torchrun a.py\ntorchrun b.py", "starts two programs, in lines 2 and 3"),
        ("if [ -f x ]; then torchrun t.py; fi", "line 2: `torchrun t.py` depends on a condition"),
        ("if nvidia-smi; then N=8; else N=1; fi\ntorchrun t.py $N", "line 2: N depends on a condition"),
        ("torchrun t.py --host $(hostname)", "line 2: ? (a value that only the running script knows)"),
        ("echo only", "it starts no training"),
        ('if [ -z "$1" ]; then echo "usage: run.sh X"; exit 1; fi\ntorchrun t.py $1', "line 2: it exits before"),
        ("torchrun --nproc 8 t.py 'x", "line 2: a quote that is not closed"),
        ("python -c 'print(1)'", "it starts no training"),
    ],
)
def test_a_shell_script_that_cannot_be_followed_is_refused_with_its_line(script, text, error):
    with pytest.raises(UsageError) as caught:
        script("run.sh", f"#!/bin/sh\n{text}\n")
    assert error in str(caught.value)


def test_programs_beside_the_training_are_named(script):
    job = script("run.sh", "module load cuda\nwandb login\nrm -rf out\ntorchrun t.py\necho done\n")
    assert job.notices[1:] == (
        "module load cuda: dropped",
        "wandb login: dropped; only the training is run",
        "rm -rf out: dropped; only the training is run",
    )


def test_an_sbatch_script_gives_nodes_and_the_command_of_srun(script):
    job = script(
        "job.sbatch",
        "#!/bin/bash\n#SBATCH --nodes=2  # two\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\n"
        "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\nexport A=b\n"
        "srun bash -c 'torchrun --nnodes $SLURM_NNODES --node_rank $SLURM_PROCID --nproc_per_node 8 "
        't.py --x "a b"\'\n',
    )
    assert facts(job) == (("torchrun", "t.py", "--x", "a b"), {"A": "b"}, 2, 8, None)
    assert "--node_rank: dropped; clusterctl sets it" in job.notices
    assert any(each.startswith("MASTER_ADDR=…: dropped; its value is known only") for each in job.notices)


@pytest.mark.parametrize(
    ("text", "arguments", "args"),
    [
        ("set X=%1\ntorchrun t.py %X% %*", ["a", "b"], ("a", "a", "b")),
        ('if "%1"=="" (set X=none) else (set X=%1)\ntorchrun t.py %X%', [], ("none",)),
        ('if "%~1"=="" (\n  set X=none\n) else (\n  set X=%~1\n)\ntorchrun t.py %X%', ["x"], ("x",)),
        ("if not exist d (\n echo no\n exit /b 1\n)\ntorchrun ^\n  t.py ^\n  a", [], ("a",)),
        ('cd /d %~dp0\nset "X=1 2"\ncall conda activate llm\ntorchrun t.py %X%\npause', [], ("1", "2")),
    ],
)
def test_a_batch_file_means_one_command(script, text, arguments, args):
    job = script("run.bat", f"@echo off\r\nrem x\r\n{text}\r\n".replace("\n", "\r\n"), *arguments)
    assert (job.launcher, job.target, job.args) == ("torchrun", "t.py", args)


def test_a_batch_file_in_gbk_is_read(script):
    text = "@echo off\r\necho 开始训练\r\ntorchrun t.py --name 实验\r\n"
    assert script("run.bat", text, encoding="gbk").args == ("--name", "实验")


@pytest.mark.parametrize("loop", ["for %%i in (1 2) do torchrun t.py %%i", ":again\ntorchrun t.py\ngoto again"])
def test_a_loop_in_a_batch_file_is_refused_with_its_line(script, loop):
    with pytest.raises(UsageError, match=r"line [13]: .*a loop or a jump, is not understood"):
        script("run.bat", loop)


def test_a_powershell_script_means_one_command(script):
    text = 'param($Config = "x.yaml")\n$env:A = "b"\n$n = 2\ntorchrun --nproc_per_node=$n `\n  t.py --config $Config\n'
    job = script("run.ps1", text, "y.yaml", encoding="utf-16")
    assert facts(job) == (("torchrun", "t.py", "--config", "y.yaml"), {"A": "b"}, None, 2, None)
    with pytest.raises(UsageError, match="line 1: `foreach"):
        script("run.ps1", "foreach ($i in 1..3) { torchrun t.py }")


def test_backslashes_that_the_shell_removed_are_explained(monkeypatch):
    monkeypatch.chdir(EXAMPLES / "vlm")
    with pytest.raises(UsageError) as caught:
        from_words(["scriptstrain_multi_gpu.bat"])
    assert caught.value.hint.endswith("clusterctl train -- scripts/train_multi_gpu.bat")


def test_a_file_that_is_no_script_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("big.sh").write_bytes(b"#" * (300 << 10))
    with pytest.raises(UsageError, match="larger than 256 KiB"):
        from_words(["./big.sh"])
    Path("binary.sh").write_bytes(b"\x7fELF\0\xff\xfe\0")
    with pytest.raises(UsageError, match="is not a text file"):
        from_words(["./binary.sh"])
    Path("folder.sh").mkdir()
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        from_words(["./folder.sh"])


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@given(st.lists(st.text("ab $\"'\\\t", max_size=6), max_size=4))
def test_words_are_those_of_a_shell(parts):
    text = "printf '%s\\n' x " + " ".join(parts)
    shell = subprocess.run(
        ["bash", "--posix", "-c", f"a='A B'; b=; ab=C\n{text}\n"], capture_output=True, text=True, check=False
    )
    try:
        simple = next(commands(text, Values({"a": "A B", "b": "", "ab": "C"})))
    except NotUnderstoodError:
        assert shell.returncode != 0  # it is not closed
        return
    known = UNKNOWN not in "".join(simple.words) and not any(each in text for each in ("$'", '$"', "\\\n"))
    if known and shell.returncode == 0 and not text.endswith("\\"):
        assert "".join(f"{word}\n" for word in simple.words[2:]) == shell.stdout


@given(st.lists(st.sampled_from([*"ab=$(){}[]<>&|;\n\"'`\\ #%*@~1-", "if ", "then ", "fi\n", "else "])).map("".join))
def test_any_text_is_followed_or_refused(text):
    for words in ([text], text.split() or ["x"]):
        with contextlib.suppress(UsageError):
            assert unwrap(words, lambda each: each[0].endswith("b"), {}).words
