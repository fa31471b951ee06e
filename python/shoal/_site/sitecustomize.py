# `shoal run` puts this folder first on PYTHONPATH, so Python imports this module when it starts. Its folder leaves
# sys.path at once, and the user's own sitecustomize runs: the program finds everything as it is without Shoal.
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any


def _load(spec: Any) -> Any:
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _begin() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    client = os.path.dirname(here)
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]
    try:
        if os.path.dirname(client) not in sys.path:
            sys.path.append(os.path.dirname(client))  # last: an installed client is found first
        _load(importlib.util.spec_from_file_location("_shoal_run", os.path.join(client, "_run.py"))).install()
    except Exception as e:
        if "run" in os.environ.get("SHOAL_DEBUG", "").split(","):
            sys.stderr.write("shoal run: no hints: %r\n" % e)
    user = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if user is not None and user.loader is not None:
        _load(user)


_begin()
