"""What the second environment is made of: the rehearsal environment with a CUDA build of torch, 5.9 GB.

It runs on machines without a GPU too, with the real torchvision and torchaudio. Its files are not among the sources of
the first environment (`lab_recipe.SOURCES`), so that a change here rebuilds this one alone.
"""

import lab_recipe

SOURCES = ("cuda_recipe.py", "cuda_env.py", *lab_recipe.SOURCES)

# torch 2.11 asks for an older setuptools than the first environment has.
CONDA_WHEELS = ("pip==26.3", "setuptools==81.0.0", "wheel==0.48.0")
TORCH = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")

# What torch brings along, as one set that was tried together.
_TRIED = """
cuda-bindings==13.5.0 cuda-pathfinder==1.9.0 cuda-toolkit==13.0.2 nvidia-cublas==13.1.0.3 nvidia-cuda-cupti==13.0.85
nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cudnn-cu13==9.19.0.56 nvidia-cufft==12.0.0.61
nvidia-cufile==1.15.1.6 nvidia-curand==10.4.0.35 nvidia-cusolver==12.0.4.66 nvidia-cusparse==12.6.3.3
nvidia-cusparselt-cu13==0.8.0 nvidia-nccl-cu13==2.28.9 nvidia-nvjitlink==13.0.88 nvidia-nvshmem-cu13==3.4.5
nvidia-nvtx==13.0.85 triton==3.6.0
"""


def pins() -> list[str]:
    """Everything that pip is held to, one `name==version` each."""
    replaced = {pin.partition("==")[0] for pin in (*CONDA_WHEELS, *TORCH)}
    kept = [pin for pin in lab_recipe.pins() if pin.partition("==")[0] not in replaced]
    return [*CONDA_WHEELS, *TORCH, *_TRIED.split(), *kept]


def digest(python: dict[str, object]) -> str:
    """12 hex digits that name this recipe and the interpreter that is copied."""
    return lab_recipe.digest(python, {name: (lab_recipe.HERE / name).read_bytes() for name in SOURCES})
