"""No module of the package unpickles what it did not write.

A pickle may call any function, so whoever can write the file or the key that is unpickled runs
code in the job. The test reads the syntax tree of every module and resolves the names of imports.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise

ROOT = Path(shardwise.__file__).parent

# Functions and classes that unpickle, or that evaluate what they read, by their full names.
UNPICKLING = {
    f"{module}.{name}"
    for module in ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal")
    for name in ("load", "loads", "Unpickler")
} | {
    "shelve.open",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.unsafe_load_all",
    "yaml.full_load",
    "yaml.full_load_all",
    "yaml.Loader",
    "yaml.UnsafeLoader",
    "multiprocessing.connection.Client",
    "multiprocessing.connection.Listener",
    "torch.jit.load",
    "torch.package.PackageImporter",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "torch.utils.model_zoo.load_url",
}
# Methods and functions whose last name says it, whatever they are called on.
BY_LAST_NAME = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "read_metadata",  # of torch.distributed.checkpoint
    "recv_object_list",
    "scatter_object_list",
}
# Calls that unpickle unless an argument prevents it: the name and the argument that must be there.
GUARDED: dict[str, tuple[str, bool | None]] = {
    "torch.load": ("weights_only", True),
    "torch.serialization.load": ("weights_only", True),
    "torch.distributed.checkpoint.load": ("storage_reader", None),
    "torch.distributed.checkpoint.state_dict_loader.load": ("storage_reader", None),
}
# Calls that unpickle only with this argument.
UNGUARDED: dict[str, tuple[str, bool]] = {
    "numpy.load": ("allow_pickle", True),
    "numpy.lib.format.read_array": ("allow_pickle", True),
}

# The ranks of one job exchange objects over their own process group, which they trust as they
# trust its tensors; they never come from a store's keys, a file or another job.
OWN_RANKS = "the job's own ranks, over their process group"
ALLOWED: dict[tuple[str, str], str] = {
    ("checkpoint/unpickling.py", "pickle.Unpickler"): "refuses all names that are not in its table",
    ("checkpoint/foreign.py", "read_metadata"): "of that reader",
    ("integrations/lightning.py", "read_metadata"): "of that reader",
    ("integrations/lightning.py", "torch.load"): "if the user passes weights_only=False, as there",
    ("verification/exchange.py", "all_gather_object"): OWN_RANKS,
    ("fsdp/distribute.py", "all_gather_object"): OWN_RANKS,
    ("fsdp/distribute.py", "broadcast_object_list"): OWN_RANKS,
    ("integrations/uneven_batches.py", "broadcast_object_list"): OWN_RANKS,
    ("launch/world.py", "all_gather_object"): OWN_RANKS,
    ("launch/world.py", "broadcast_object_list"): OWN_RANKS,
}


def test_nothing_unpickles() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in sorted(ROOT.rglob("*.py"))
        for name in unpickling(path.read_text(encoding="utf-8"))
    }
    assert found - ALLOWED.keys() == set(), "use plain data, or torch.load(..., weights_only=True)"
    assert ALLOWED.keys() - found == set(), "no longer there: remove it from the list"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import pickle\npickle.loads(x)", "pickle.loads"),
        ("import pickle as p\ndef f(x):\n    return p.load(x)", "pickle.load"),
        ("from pickle import loads as parse\nparse(x)", "pickle.loads"),
        ("def f():\n    from pickle import loads\n    return map(loads, x)", "pickle.loads"),
        ("import pickle\nclass U(pickle.Unpickler): pass", "pickle.Unpickler"),
        ("import pickle\nread = getattr(pickle, 'loads')", "pickle.loads"),
        ("from pickle import *", "pickle.*"),
        ("import importlib\nimportlib.import_module('pickle').loads(x)", "pickle"),
        ("__import__('marshal').loads(x)", "marshal"),
        ("import dill, marshal, shelve\nmarshal.loads(x)", "marshal.loads"),
        ("import shelve\nshelve.open(x)", "shelve.open"),
        ("import torch\ntorch.load(x)", "torch.load"),
        ("import torch\ntorch.load(x, weights_only=False)", "torch.load"),
        ("import torch\ntorch.load(x, weights_only=flag)", "torch.load"),
        ("import torch\ntorch.load(x, **options)", "torch.load"),
        ("from torch import load\nload(x)", "torch.load"),
        ("import torch\nread = torch.load", "torch.load"),
        ("import numpy as np\nnp.load(x, allow_pickle=True)", "numpy.load"),
        ("import numpy as np\nnp.load(x, allow_pickle=flag)", "numpy.load"),
        ("import numpy as np\nnp.load(x, **options)", "numpy.load"),
        ("import yaml\nyaml.load(x, Loader=yaml.Loader)", "yaml.load"),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", "all_gather_object"),
        ("from torch.distributed import broadcast_object_list", "broadcast_object_list"),
        (
            "from torch.distributed.checkpoint import state_dict_loader as s\ns.load(x)",
            "torch.distributed.checkpoint.state_dict_loader.load",
        ),
        ("reader.read_metadata()", "read_metadata"),
    ],
)
def test_each_way_is_found(source: str, name: str) -> None:
    assert name in set(unpickling(source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.dumps(x)",
        "import torch\ntorch.load(x, weights_only=True)",
        "import json\njson.loads(x)",
        "import numpy as np\nnp.load(x)",
        "import numpy as np\nnp.load(x, allow_pickle=False)",
        "import yaml\nyaml.safe_load(x)",
        "import shardwise as sw\nsw.load(x)",
        "loads = [0] * 3\nloads[0] += 1",
        "import torch.distributed.checkpoint as dcp\ndcp.load(x, storage_reader=reader)",
    ],
)
def test_other_calls_are_not_found(source: str) -> None:
    assert list(unpickling(source)) == []


def unpickling(source: str) -> Iterator[str]:
    """What ``source`` uses to unpickle, by full name."""
    tree = ast.parse(source)
    names = dict(_imports(tree))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    yield from (name for name in names.values() if name in BY_LAST_NAME)
    yield from _imported_wholly(tree)
    for call in calls.values():
        yield from _dynamic(call, names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            name, last = _full_name(node, names), getattr(node, "attr", "")
            if name in UNPICKLING or not _is_safe(name, calls.get(id(node))):
                yield name
            elif last in BY_LAST_NAME:
                yield last


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that imports bind anywhere in the module, with the full names of what they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                top = one.name.partition(".")[0]
                yield (one.asname, one.name) if one.asname else (top, top)
        elif isinstance(node, ast.ImportFrom):
            for one in node.names:
                name = f"{node.module}.{one.name}"
                last = one.name if one.name in BY_LAST_NAME else name
                yield one.asname or one.name, last


def _imported_wholly(tree: ast.AST) -> Iterator[str]:
    modules = {name.rpartition(".")[0] for name in UNPICKLING}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            yield from (f"{node.module}.*" for one in node.names if one.name == "*")


def _dynamic(call: ast.Call, names: dict[str, str]) -> Iterator[str]:
    """Modules and attributes that a call names in a string."""
    function = _full_name(call.func, names)
    texts = [x.value for x in call.args if isinstance(x, ast.Constant)]
    if function in ("__import__", "importlib.import_module"):
        modules = {name.partition(".")[0] for name in UNPICKLING} - {"torch", "multiprocessing"}
        yield from (text for text in texts if text in modules)
    elif function == "getattr" and texts:
        name = ".".join((_full_name(call.args[0], names), str(texts[0])))
        if name in UNPICKLING | GUARDED.keys():
            yield name


def _full_name(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_full_name(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def _is_safe(name: str, call: ast.Call | None) -> bool:
    """Whether an argument of ``call`` prevents that ``name`` unpickles."""
    passed = {x.arg: x.value for x in call.keywords} if call else {}
    if name in UNGUARDED and call is not None:
        argument, value = UNGUARDED[name]
        found = passed.get(argument, ast.Constant(not value))
        return None not in passed and isinstance(found, ast.Constant) and found.value is not value
    if name in GUARDED:
        argument, wanted = GUARDED[name]
        guard = passed.get(argument)
        if wanted is None:
            return guard is not None
        return isinstance(guard, ast.Constant) and guard.value is wanted
    return True
