"""Names of parameters, with and without the wrappers around the modules that have them."""

from torch import nn

__all__ = ["WRAPPED", "clean_name", "clean_names"]

WRAPPED = "_fsdp_wrapped_module"  # FSDP1's attribute, which programs know
_OF_WRAPPERS = (WRAPPED + ".", "_checkpoint_wrapped_module.")


def clean_name(name: str) -> str:
    """``name`` as it is without wrappers."""
    for part in _OF_WRAPPERS:
        name = name.replace(part, "")
    return name


def clean_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``model``, each once."""
    return {clean_name(name): parameter for name, parameter in model.named_parameters()}
