"""The generated parts of pages: the API, the command line and the configuration.

All of it comes from the sources: docstrings (which mkdocstrings renders), the options of the
commands, and the fields and comments of the configuration.
"""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typer.main import get_command

from shardwise.cli import app
from shardwise.train.config import Config

__all__ = ["GENERATED"]

PACKAGE = Path(inspect.getfile(Config)).parents[1]
INTEGRATIONS = ("transformers", "accelerate", "lightning", "profiler", "vllm")
# The headings of the API, by the package that defines a name; others get a heading of their own.
HEADINGS = {
    "api": "Sharding",
    "runtime": "Sharding",
    "plan": "Options of `fully_shard`",
    "tensor": "Sharded parameters",
    "optim": "Training",
    "features": "Training",
    "checkpoint": "Checkpoints",
    "weights": "Weights for inference",
    "recording": "Recording and verifying",
    "verification": "Recording and verifying",
    "forecast": "Fitting into memory",
    "errors": "Errors",
}
# What public functions return, if its class has no public name.
RETURNED = {"ledger": ("shardwise.runtime.ledger.Ledger",)}
# What is shown of classes that also have methods for the engine.
OWN_MEMBERS: Mapping[str, list[str]] = {
    "Initialization": [],
    "Ledger": [
        "step",
        "records",
        "events",
        "names",
        "span",
        "gathered_bytes",
        "peak_gathered_bytes",
        "overlapped_share",
    ],
    "MixedPrecisionPolicy": [],
    "Outer": [],
    "PipelineStage": [],
    "Strategy": ["from_deepspeed"],
    "Wire": [],
}
_TYPES = {"str": "text", "int": "integer", "float": "number", "bool": "boolean"}
_LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def api() -> str:
    """The names of `shardwise.public`, under a heading for each kind."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    headings = dict.fromkeys(HEADINGS.values())
    for module, name in _imports(PACKAGE / "public.py"):
        if module == "shardwise":  # `sw.optim`, a module that is public as a whole
            exports = _exports(PACKAGE / name / "__init__.py")
            groups[f"`sw.{name}`"] += [f"shardwise.{name}.{one}" for one in exports]
        else:
            package = module.split(".")[1]
            heading = HEADINGS.get(package, package.capitalize())
            groups[heading] += [f"shardwise.public.{name}", *RETURNED.get(name, ())]
    parts = []
    for heading in [*headings, *sorted(set(groups) - set(headings))]:
        parts += [f"## {heading}", *map(_entry, groups[heading])]
    return "\n\n".join(parts) + "\n"


def fsdp() -> str:
    """What is in `shardwise.fsdp` besides PyTorch's own classes."""
    names = [
        f"{module}.{name}"  # `shardwise.fsdp.fully_shard` is a module, too
        for module, name in _imports(PACKAGE / "fsdp" / "__init__.py")
        if module.startswith("shardwise.fsdp.") and name != "*"
    ]
    more = [
        "shardwise.fsdp.frameworks.replace_torch_fsdp",
        "shardwise.fsdp.porting.options_from_deepspeed",
        "shardwise.fsdp.porting.options_from_accelerate",
    ]
    return "\n\n".join(map(_entry, [*names, *more])) + "\n"


def integrations() -> str:
    """The public names of each module of `shardwise.integrations`."""
    parts = []
    for module in INTEGRATIONS:
        parts.append(f"## shardwise.integrations.{module}")
        parts += [
            _entry(f"shardwise.integrations.{module}.{name}")
            for name in _exports(PACKAGE / "integrations" / f"{module}.py")
        ]
    parts += ["## shardwise.pipeline", _entry("shardwise.pipeline.PipelineStage")]
    weights = _exports(PACKAGE / "weights" / "__init__.py")
    parts += ["## shardwise.weights", *(_entry(f"shardwise.weights.{name}") for name in weights)]
    return "\n\n".join(parts)


def _entry(path: str) -> str:
    members = OWN_MEMBERS.get(path.rpartition(".")[2])
    return (
        f"::: {path}" if members is None else f"::: {path}\n    options:\n      members: {members}"
    )


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a file imports from shardwise."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardwise"):
            yield from ((str(node.module), alias.name) for alias in node.names)


def _exports(path: Path) -> list[str]:
    """``__all__`` of a file that need not be importable here."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise ValueError(f"{path} has no __all__")


def command_line() -> str:
    """A section for each command: what it does, its arguments and its options."""
    group: Any = get_command(app)
    return "\n\n".join(_command(name, command) for name, command in sorted(group.commands.items()))


def _command(name: str, command: Any) -> str:
    context = command.context_class(command, info_name=name)
    usage = " ".join(command.collect_usage_pieces(context)).translate({123: "", 125: ""})
    rows = "\n".join(map(_option, command.params))
    table = f"| | default | |\n|---|---|---|\n{rows}"
    description = inspect.cleandoc(command.help)
    return (
        f"## shardwise {name}\n\n```text\nshardwise {name} {usage}\n```\n\n{description}\n\n{table}"
    )


def _option(parameter: Any) -> str:
    names = parameter.opts + parameter.secondary_opts
    metavar = "" if getattr(parameter, "is_flag", False) else f" {parameter.metavar or 'TEXT'}"
    is_argument = parameter.param_type_name == "argument"
    shown = parameter.metavar if is_argument else ", ".join(names) + metavar
    default = parameter.default
    is_plain = default not in (None, "", ()) and not callable(default) and not is_argument
    value = (
        f"`{str(default).lower() if isinstance(default, bool) else default}`" if is_plain else ""
    )
    return f"| {_code(shown)} | {value} | {_cell(parameter.help or '')} |"


def configuration() -> str:
    """A table for each section of the TOML file: key, type, default and comment."""
    parts = []
    for section, field in Config.model_fields.items():
        model = type(field.default)
        comments = _comments(model)
        rows = "\n".join(
            f"| `{key}` | {_cell(_kind(one.annotation, one.metadata))} | `{_value(one.default)}` | "
            f"{_cell(comments.get(key, ''))} |"
            for key, one in model.model_fields.items()
        )
        summary = (model.__doc__ or "").partition(": ")[2]
        title = summary[:1].upper() + summary[1:]
        parts.append(
            f"## [{section}]\n\n{title}\n\n| key | type | default | |\n|---|---|---|---|\n{rows}"
        )
    return "\n\n".join(parts) + "\n"


def _comments(model: type) -> Mapping[str, str]:
    """The comments above and behind each field."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(model).splitlines():
        if alone := re.fullmatch(r"    # (.*)", line):
            above.append(alone[1])
        elif field := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
            found[field[1]] = " ".join([*above, field[2] or ""]).strip()
            above = []
    return found


def _kind(annotation: Any, limits: list[Any]) -> str:
    """A type as a reader of TOML knows it."""
    if annotation in (str, int, float, bool):
        words = [_TYPES[annotation.__name__]]
    elif choices := [
        repr(one) for one in getattr(annotation, "__args__", ()) if isinstance(one, str)
    ]:
        words = ["one of " + ", ".join(choices).replace("'", '"')]
    elif annotation == dict[str, Any]:
        words = ["table"]
    elif "tuple" not in str(annotation):
        words = [" or ".join(_TYPES[one.__name__] for one in annotation.__args__)]
    else:
        words = ["text or list" if "str |" in str(annotation) else "list"]
    for limit in limits:
        for name, sign in _LIMITS.items():
            if getattr(limit, name, None) is not None:
                words.append(f"{sign} {getattr(limit, name)}")
    return ", ".join(words)


def _value(default: object) -> str:
    """As it is written in TOML."""
    match default:
        case bool():
            return str(default).lower()
        case str():
            return f'"{default}"'
        case tuple():
            return f"[{', '.join(map(str, default))}]"
        case _:
            return str(default)


def _code(text: str) -> str:
    """In a code span a bar cannot be escaped; in HTML it can."""
    return f"<code>{text.replace('|', '&#124;')}</code>"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


GENERATED: Mapping[str, Callable[[], str]] = {
    "api": api,
    "fsdp": fsdp,
    "integrations": integrations,
    "command line": command_line,
    "configuration": configuration,
}
