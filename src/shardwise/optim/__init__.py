"""Optimizers for sharded parameters, and what else steps need: clipping, weights of tokens."""

from shardwise.optim.adam8bit import Adam8bit
from shardwise.optim.groups import parameter_groups
from shardwise.optim.muon import Muon
from shardwise.optim.soap import SOAP

__all__ = ["SOAP", "Adam8bit", "Muon", "parameter_groups"]
