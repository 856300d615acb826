"""Names of parameters without the wrapper modules in their paths."""

from torch import nn

__all__ = ["WRAPPED", "clean_name", "clean_names"]

WRAPPED = "_fsdp_wrapped_module"  # FSDP1's attribute of this name, which programs access
_WRAPPER_PREFIXES = (WRAPPED + ".", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def clean_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model`` by clean name, each once."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}
