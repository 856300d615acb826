"""`shardwise plan`: a search, and the facts that its page and its tables show."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.errors import ConfigError
from shardwise.forecast.configuration import Configuration
from shardwise.forecast.forecast import Forecast, Forecaster
from shardwise.forecast.planned import call_of
from shardwise.forecast.search.candidates import Goal
from shardwise.forecast.search.scaling import Curve, scaling_curves
from shardwise.forecast.search.search import Progress, Ranking, frontier, search
from shardwise.forecast.view.simulated import recording_of
from shardwise.forecast.view.text import Budget, describe, missing_text, peak_text, with_device_word
from shardwise.plan.spelling import counted
from shardwise.recording.format import RankRecording

__all__ = ["Planned", "make_planned"]


@dataclass(frozen=True)
class Planned:
    """The result of `shardwise plan`."""

    forecaster: Forecaster  # on the winner's cluster
    ranking: Ranking
    curves: list[Curve]
    config: str  # TOML for `shardwise train`; "" if it cannot train in this way
    config_problem: str  # why it cannot
    budget: Budget

    @property
    def winner(self) -> Forecast:
        return self.ranking.winner

    @cached_property
    def frontier(self) -> list[Forecast]:
        return frontier(self.ranking)

    @cached_property
    def recording(self) -> RankRecording:
        """The winner's predicted step, as a recording of a rank of its slowest stage."""
        shown = self.winner.configuration, self.winner.stage
        winner = replace(self.winner, memory=self.forecaster.memory_of_stage(*shown))
        return recording_of(winner, self.forecaster.plan(*shown))

    @property
    def title(self) -> str:
        """Model and cluster, such as ``llama-3-8b on 64 x H100-SXM-80GB``."""
        cluster = self.winner.cluster
        name = self.forecaster.model.name
        return f"{name} on {cluster.num_devices} x {cluster.accelerator.name}"

    @cached_property
    def facts(self) -> list[str]:
        """The inputs of the search."""
        goal, model = self.ranking.goal, self.forecaster.model
        num_trained = model.num_trained(goal.settings.adapters)
        cluster = self.winner.cluster
        network = cluster.node_bandwidth * 8 / 1e9
        place = f"{counted(cluster.devices_per_node, 'GPU')} per node, {network:,.0f} Gbit/s"
        place += " between nodes"
        if cluster.num_nodes == 1:
            place = with_device_word(cluster, f"{counted(cluster.num_devices, 'GPU')} of one node")
        trained = f", {_amount(num_trained)} of them trained"
        sequences, tokens = goal.global_batch, goal.settings.sequence
        return [
            f"{_amount(model.num_parameters)} parameters"
            + f", {goal.settings.adapters}" * (goal.settings.adapters is not None)
            + trained * (num_trained < model.num_parameters),
            place,
            f"{counted(sequences, 'sequence')} of {counted(tokens, 'token')} per step",
            goal.settings.optimizer,
            f"compute in {str(goal.settings.compute_dtype).removeprefix('torch.')}",
            f"best {goal.objective} of {counted(self.ranking.num_compared, 'configuration')}",
            "1 GB is 10^9 bytes",
        ]

    @property
    def shortage(self) -> str:
        """What the winner lacks; "" if it fits."""
        winner = self.winner
        if winner.fits:
            return ""
        ways = ["more or larger GPUs", "shorter sequences"]
        ways += ["--tensor auto"] if winner.configuration.tensor == 1 else []
        has_host = winner.cluster.device_word == "GPU"
        ways += ["--offload"] if has_host and self.ranking.goal.offload == ("none",) else []
        text = (
            f"{self.forecaster.model.name} does not fit: the smallest of "
            f"{counted(self.ranking.num_compared, 'configuration')} "
            f"({describe(winner.configuration)}) needs {missing_text(winner)}, "
            f"{peak_text(winner)}; use {', '.join(ways[:-1])} or {ways[-1]}"
        )
        return with_device_word(winner.cluster, text)

    @property
    def call(self) -> str:
        return call_of(self.winner.configuration)


def _amount(number: int) -> str:
    """Format with four digits, such as "8.03 billion"."""
    is_large = number >= 1e9  # noqa: PLR2004
    return f"{number / 1e9:.4g} billion" if is_large else f"{number / 1e6:.4g} million"


def make_planned(
    forecaster: Forecaster,
    goal: Goal,
    budget: Budget,
    config_of: Callable[[Configuration], str],
    progress: Progress,
    *,
    scaling: bool = True,
) -> Planned:
    """Search for the best configuration and forecast how it scales.

    Args:
        forecaster: predicts steps of the model on the cluster.
        goal: what to train and which configurations to try.
        budget: length and price of the training run.
        config_of: returns the configuration file of a trainer, or raises a ConfigError.
        progress: called with a description of the work under way.
        scaling: whether to forecast how the winner scales, which takes a few seconds.
    """
    ranking = search(forecaster, goal, progress)
    scaling = scaling and ranking.winner.fits
    winner = ranking.winner.configuration
    config = problem = ""
    try:
        config = config_of(winner)
    except ConfigError as error:
        problem = str(error)
    on_winner = forecaster.with_devices(ranking.winner.cluster.num_devices)
    curves = scaling_curves(on_winner, winner, progress) if scaling else []
    return Planned(on_winner, ranking, curves, config, problem, budget)
