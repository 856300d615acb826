"""Optimizers for sharded parameters, and what else steps need: clipping, weights of tokens.

Muon and SOAP update each matrix on one rank, its owner. From the top down::

    groups           which parameters are hidden matrices
    muon, soap       what an owner does with a matrix
    owner_optimizer  a step: matrices on their owners, and AdamW for all else
    exchange         brings parts of matrices to owners, and updates back
    ownership        which rank owns which matrix, and what that sends: integers
    matrices         a parameter as the matrices that it consists of
"""

from shardwise.optim.adam8bit import Adam8bit
from shardwise.optim.groups import parameter_groups
from shardwise.optim.muon import Muon
from shardwise.optim.soap import SOAP

__all__ = ["SOAP", "Adam8bit", "Muon", "parameter_groups"]
