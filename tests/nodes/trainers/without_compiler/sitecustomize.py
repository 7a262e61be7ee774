"""DeepSpeed wants a shared-memory op on CPUs that it would compile; these nodes have no compiler, and need none.

With GPUs it is not asked for. ``pack-env --with-ops`` builds it ahead, in minutes, which these tests do not have.
"""

import importlib.util
import sys


class Finder:
    """Takes the op out of DeepSpeed's way to torch.distributed."""

    @classmethod
    def find_spec(cls, name, _path=None, _target=None):
        if name != "deepspeed.comm.torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.build_shm_op = lambda: None

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder)
