"""Runs first in every Python of this clusterctl: the module site imports it.

It is written into the standard library of a tool, and imported nowhere else.
"""

import os
import sys

# The loader has read it already. What is started from here, such as ssh, uses the machine's own libraries.
os.environ.pop("LD_LIBRARY_PATH", None)
if "CLUSTERCTL_LD_LIBRARY_PATH" in os.environ:
    os.environ["LD_LIBRARY_PATH"] = os.environ.pop("CLUSTERCTL_LD_LIBRARY_PATH")

_stdlib = os.path.dirname(os.__file__)
sys.path[:] = [_stdlib, os.path.join(_stdlib, "lib-dynload"), os.path.join(sys.base_prefix, "packages")]

# What can be started again; the program itself would not find its libraries.
sys.executable = os.path.join(sys.base_prefix, "python")
